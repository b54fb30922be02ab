"""Keys and values as compressed latents (DeepSeek-V2's multi-head latent attention, arXiv:2405.04434).

A token's keys and values are a latent c [rank] and a key k_rope [rope_dim] that all heads share. Head h has

    k = [W_k c + b_k, k_rope]        v = W_v c + b_v        W_k [qk_dim - rope_dim, rank], W_v [v_dim, rank]

Where latents travel, rank + rope_dim numbers per token do, in place of heads * (qk_dim + v_dim). A tile expands those
that it reads; in backward its dk and dv become gradients of the latents, which travel like dk and dv:

    dc = sum over heads of W_k^T dk[nope] + W_v^T dv        dk_rope = sum over heads of dk[rope]

and those of W and b, which every rank adds up for its own tiles. Each tile is computed by one rank, so the sum of the
ranks' shares is the gradient: it is reduced like that of any other parameter, and not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.device.row_blocks import accumulate_dtype
from engine.planning.program.ops import LatentShape


class LatentHeads(NamedTuple):
    """What latents are expanded to: kv heads of one sequence, and widths of a head of k and of v."""

    latent: LatentShape
    num_kv_heads: int
    qk_dim: int
    v_dim: int

    @property
    def nope_dim(self) -> int:
        """Channels of k that come from the latent."""
        return self.qk_dim - self.latent.rope_dim

    @property
    def weight_shape(self) -> tuple[int, int]:
        """That of the linear layer from c to k and v: per head first the channels of k, then those of v."""
        return self.num_kv_heads * (self.nope_dim + self.v_dim), self.latent.rank


class _Part(NamedTuple):
    """Heads of one sequence: `heads` of its own, number `into` of those that are asked for."""

    sequence: int
    heads: slice
    into: slice


class LatentExpansion:
    """From latents to k and v, and from dk and dv back; sums of the gradients of weight and bias."""

    def __init__(
        self,
        heads: LatentHeads,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        sequences: int = 1,
        trains: bool = False,
    ) -> None:
        """Start one run of a plan.

        Args:
            heads: Of one sequence.
            weight: [K * (nope_dim + v_dim), rank].
            bias: [K * (nope_dim + v_dim)]; None: there is none.
            dtype: Of the latents, and of k and v.
            sequences: That are folded into the heads, K of each.
            trains: Whether gradients of weight and bias are wanted.
        """
        self.heads, self.sequences = heads, sequences
        self._weight_dtype = weight.dtype
        self._weights = self._by_operand(weight.to(dtype))  # [K, nope_dim, rank], [K, v_dim, rank]
        self._biases = None if bias is None else self._by_operand(bias.to(dtype))
        total = accumulate_dtype(dtype)
        self._sums = [torch.zeros_like(x, dtype=total) for x in self._weights] if trains else None
        self._bias_sums = [torch.zeros_like(x, dtype=total) for x in self._biases or ()] if trains else None

    @property
    def num_heads(self) -> int:
        """Heads of k and v, of all sequences."""
        return self.sequences * self.heads.num_kv_heads

    def expand(self, latents: Tensor, heads: slice | None = None) -> dict[str, Tensor]:
        """k [n, h, qk_dim] and v [n, h, v_dim] of latents [n, sequences, rank + rope_dim]; `heads`: None: all."""
        heads = heads or slice(0, self.num_heads)
        rows, count, nope = latents.shape[0], heads.stop - heads.start, self.heads.nope_dim
        k = latents.new_empty(rows, count, self.heads.qk_dim)
        v = latents.new_empty(rows, count, self.heads.v_dim)
        for part in self._parts(heads):
            c, rope = self._split(latents, part)
            for number, target in enumerate((k[:, part.into, :nope], v[:, part.into])):
                bias = None if self._biases is None else self._biases[number][part.heads].flatten()
                target.copy_(linear(c, self._weights[number][part.heads].flatten(0, 1), bias).view(target.shape))
            k[:, part.into, nope:] = rope[:, None]
        return {"k": k, "v": v}

    def add_gradients(self, sums: Tensor, latents: Tensor, dk: Tensor, dv: Tensor, heads: slice | None = None) -> None:
        """Add the latents' gradient to `sums`, and to those of weight and bias if they train.

        Args:
            sums: [n, sequences, rank + rope_dim], fp32 or float64.
            latents: Of the same rows.
            dk: [n, h, qk_dim] of `heads`.
            dv: [n, h, v_dim].
            heads: None: all.
        """
        nope = self.heads.nope_dim
        for part in self._parts(heads or slice(0, self.num_heads)):
            c, _ = self._split(latents, part)
            total, rope_total = self._split(sums, part)
            for number, gradient in enumerate((dk[:, part.into, :nope], dv[:, part.into])):
                rows = gradient.to(latents.dtype).flatten(1)
                _add_product(total, rows, self._weights[number][part.heads].flatten(0, 1))
                if self._sums is not None:
                    _add_product(self._sums[number][part.heads].flatten(0, 1), rows.T, c)
                if self._bias_sums:
                    of_heads = self._bias_sums[number][part.heads]
                    of_heads += gradient.sum(0, dtype=of_heads.dtype)
            rope_total += dk[:, part.into, nope:].sum(1, dtype=sums.dtype)

    @property
    def weight_gradient(self) -> Tensor:
        """This rank's share, in the shape and dtype of the weight."""
        assert self._sums is not None
        return torch.cat(self._sums, 1).flatten(0, 1).to(self._weight_dtype)

    @property
    def bias_gradient(self) -> Tensor:
        """This rank's share, in the shape of the bias and the dtype of the weight."""
        assert self._bias_sums
        return torch.cat(self._bias_sums, 1).flatten().to(self._weight_dtype)

    def _by_operand(self, x: Tensor) -> list[Tensor]:
        """[K * (nope_dim + v_dim), ...] -> what makes k, [K, nope_dim, ...], and v, [K, v_dim, ...]; contiguous."""
        per_head = x.view(self.heads.num_kv_heads, -1, *x.shape[1:])
        return [part.contiguous() for part in (per_head[:, : self.heads.nope_dim], per_head[:, self.heads.nope_dim :])]

    def _split(self, x: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
        """Views of what belongs to c and to k_rope, of the part's sequence."""
        rank = self.heads.latent.rank
        return x[:, part.sequence, :rank], x[:, part.sequence, rank:]

    def _parts(self, heads: slice) -> Iterator[_Part]:
        """Some heads of all sequences, sequence by sequence."""
        count = self.heads.num_kv_heads
        for sequence in range(heads.start // count, -(-heads.stop // count)):
            first, last = max(heads.start, sequence * count), min(heads.stop, (sequence + 1) * count)
            start = sequence * count
            yield _Part(sequence, slice(first - start, last - start), slice(first - heads.start, last - heads.start))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matrix product of a and b, which may be narrower; without a temporary where they are not."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
