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
    """Heads of one sequence: `channels` of the weight's rows make them, number `into` of those that are asked for."""

    sequence: int
    channels: slice
    into: slice

    @property
    def num_heads(self) -> int:
        """How many."""
        return int(self.into.stop - self.into.start)


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
        self._weight, self._bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        self._dtypes = weight.dtype, None if bias is None else bias.dtype
        total = accumulate_dtype(dtype)
        self._sum = torch.zeros_like(weight, dtype=total) if trains else None
        self._bias_sum = torch.zeros_like(bias, dtype=total) if trains and bias is not None else None

    @property
    def num_heads(self) -> int:
        """Heads of k and v, of all sequences."""
        return self.sequences * self.heads.num_kv_heads

    def expand(self, latents: Tensor, heads: slice | None = None) -> dict[str, Tensor]:
        """k [n, h, qk_dim] and v [n, h, v_dim] of latents [n, sequences, rank + rope_dim]; `heads`: None: all."""
        nope, keys, values = self.heads.nope_dim, [], []
        for part in self._parts(heads):
            c, rope = self._split(latents, part)
            bias = None if self._bias is None else self._bias[part.channels]
            both = linear(c, self._weight[part.channels], bias).view(len(c), part.num_heads, -1)
            keys.append(torch.cat([both[..., :nope], rope[:, None].expand(-1, part.num_heads, -1)], -1))
            values.append(both[..., nope:])
        return {"k": _joined(keys), "v": _joined(values)}

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
        for part in self._parts(heads):
            c, _ = self._split(latents, part)
            total, rope_total = self._split(sums, part)
            gradients = torch.cat([dk[:, part.into, :nope], dv[:, part.into]], -1).flatten(1)
            rows = gradients.to(latents.dtype)
            _add_product(total, rows, self._weight[part.channels])
            rope_total += dk[:, part.into, nope:].sum(1, dtype=sums.dtype)
            if self._sum is not None:
                _add_product(self._sum[part.channels], rows.T, c)
            if self._bias_sum is not None:
                self._bias_sum[part.channels] += gradients.sum(0, dtype=self._bias_sum.dtype)

    @property
    def weight_gradient(self) -> Tensor:
        """This rank's share, in the shape and dtype of the weight."""
        assert self._sum is not None
        return self._sum.to(self._dtypes[0])

    @property
    def bias_gradient(self) -> Tensor:
        """This rank's share, in the shape and dtype of the bias."""
        assert self._bias_sum is not None
        return self._bias_sum.to(self._dtypes[1])

    def _split(self, x: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
        """Views of what belongs to c and to k_rope, of the part's sequence."""
        rank = self.heads.latent.rank
        return x[:, part.sequence, :rank], x[:, part.sequence, rank:]

    def _parts(self, heads: slice | None) -> Iterator[_Part]:
        """Some heads of all sequences, or (None) all, sequence by sequence."""
        count, (channels, _) = self.heads.num_kv_heads, self.heads.weight_shape
        first_head, end = (heads.start, heads.stop) if heads else (0, self.num_heads)
        for sequence in range(first_head // count, -(-end // count)):
            start = sequence * count
            first, last = max(first_head, start), min(end, start + count)
            of_weight = slice(*((head - start) * (channels // count) for head in (first, last)))
            yield _Part(sequence, of_weight, slice(first - first_head, last - first_head))


def _joined(parts: list[Tensor]) -> Tensor:
    """Heads of one or more sequences."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matrix product of a and b, which may be narrower; without a temporary where they are not."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
