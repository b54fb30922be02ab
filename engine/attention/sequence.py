"""A sequence on one rank of those that share it: its rows, its plans, and attention over all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.context import AttentionContext, AttentionGroup, build_context
from engine.attention.runtime import run_attention
from engine.planning.sequence.layers import LayerAttention
from engine.planning.sequence.layout import Layout
from engine.planning.sequence.lengths import padded_length
from engine.planning.sequence.mask import Mask

if TYPE_CHECKING:
    from engine.attention.library import ContextParallel


class SequenceContext:
    """Sequences of one length on one rank: which rows it holds, and the plans of attention over all of them.

    Made by `ContextParallel.context`. Holds no tensor of a sequence, so one serves any number of batches and layers.
    """

    # A plain class: wrappers of models copy the dataclasses that they find among the arguments.
    def __init__(
        self, parallel: ContextParallel, group: AttentionGroup, seq_len: int, layers: Sequence[LayerAttention]
    ) -> None:
        self.parallel = parallel
        self.seq_len = seq_len
        self._attention: AttentionContext = build_context(group, layers, padded_length(seq_len, parallel.size))
        rows = torch.from_numpy(self.layout.positions(parallel.rank))
        self._has_padding = bool((rows >= seq_len).any())
        self.positions = rows.to(parallel.device)  # [T] int64; those from seq_len on are padding

    @property
    def layout(self) -> Layout:
        """Which positions every rank holds."""
        return self._attention.layout

    @property
    def padded_len(self) -> int:
        """Tokens that are divided among the ranks: seq_len and padding, which sees nothing and is seen by nobody."""
        return self.layout.seq_len

    @property
    def local_len(self) -> int:
        """Rows T of this rank, padding included."""
        return self.layout.rows(self.parallel.rank)

    def mask(self, layer: int) -> Mask:
        """Who sees whom in a layer."""
        layers = self._attention.layers
        return layers[layer % len(layers)].mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """`attention` without its checks."""
        runtimes = self._attention.runtimes
        return run_attention(q, k, v, runtimes[layer % len(runtimes)])

    def shard(self, whole: Tensor, dim: int = 1, pad_value: float = 0) -> Tensor:
        """This rank's rows of a tensor with all seq_len of them along `dim`, padding filled, on the context's device.

        Every rank gives the same `whole`. Shift labels before (docs/library.md). Differentiable; sends nothing.
        """
        if whole.shape[dim] != self.seq_len:
            raise ValueError(
                f"shard: dimension {dim} of {tuple(whole.shape)} has {whole.shape[dim]} rows; expected the whole "
                f"sequence, seq_len={self.seq_len}"
            )
        positions = self.positions.to(whole.device)
        local = whole.index_select(dim, positions.clamp(max=self.seq_len - 1))
        if self._has_padding:
            shape = [1] * whole.dim()
            shape[dim] = -1
            local = local.masked_fill((positions >= self.seq_len).view(shape), pad_value)
        return local.to(self.parallel.device)

    def gather(self, local: Tensor, dim: int = 1) -> Tensor:
        """All rows in the order of their positions, without padding, on every rank; the inverse of `shard`.

        All ranks of the group must call it. Not differentiable: the result is detached. Sends local's bytes to all.
        """
        rows = self.layout.row_counts
        if local.shape[dim] != self.local_len:
            raise ValueError(
                f"gather: dimension {dim} of {tuple(local.shape)} has {local.shape[dim]} rows; expected this rank's "
                f"{self.local_len}"
            )
        own = local.detach().movedim(dim, 0).contiguous()
        whole = own.new_empty(self.seq_len, *own.shape[1:])
        for rank, part in enumerate(self._all_parts(own, max(rows))):
            positions = torch.from_numpy(self.layout.positions(rank)).to(own.device)
            real = positions < self.seq_len
            whole[positions[real]] = part[: rows[rank]][real]
        return whole.movedim(0, dim)

    def _all_parts(self, own: Tensor, most_rows: int) -> list[Tensor]:
        """`own` of every rank, each with at least its own rows."""
        if self.parallel.size == 1:
            return [own]
        sent = own.new_zeros(most_rows, *own.shape[1:])
        sent[: len(own)] = own
        parts = [torch.empty_like(sent) for _ in range(self.parallel.size)]
        dist.all_gather(parts, sent, group=self.parallel.process_group)
        return parts


def attention(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, layer: int = 0) -> Tensor:
    """out [B, T, H, D]: softmax(q k^T / sqrt(D)) v of this rank's queries over the keys of all ranks.

    q [B, T, H, D], k and v [B, T, K, D] in the context's dtype, on its device, rows in the order of
    `context.positions`. `layer` chooses among the masks that the context was given.

    Under autocast the tensors are cast first, as torch's own attention does; the context's dtype is then autocast's.

    Differentiable. All ranks of the group must call it, and run backward through it, equally often in the same order:
    each call sends messages that the others wait for. Raises ValueError for tensors that do not fit.
    """
    kind = context.parallel.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    problems = _input_problems(q, k, v, context)
    if problems:
        raise ValueError("attention: " + "; ".join(problems))
    with torch.autocast(kind, enabled=False):
        return context.attend(q, k, v, layer)


def _input_problems(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> list[str]:
    """One sentence per tensor that does not fit."""
    parallel, heads = context.parallel, context.parallel.heads
    problems = []
    batch = q.shape[0] if q.dim() == 4 else "B"
    rows = context.local_len
    for name, tensor, count in (("q", q, heads.num_heads), ("k", k, heads.num_kv_heads), ("v", v, heads.num_kv_heads)):
        expected = (batch, rows, count, heads.head_dim)
        if tuple(tensor.shape) != expected:
            note = f"; this rank holds {rows} of {context.padded_len} rows" if tensor.shape[1:2] != (rows,) else ""
            problems.append(
                f"{name} has shape {tuple(tensor.shape)}, expected [batch, rows, heads, head_dim] = "
                f"({', '.join(map(str, expected))}){note}"
            )
        if tensor.dtype != parallel.dtype:
            problems.append(
                f"{name} is {tensor.dtype}, expected {parallel.dtype}: cast it, or set ContextParallel(dtype=)"
            )
        if tensor.device.type != parallel.device.type:
            problems.append(f"{name} lies on {tensor.device}, expected {parallel.device}")
    return problems
