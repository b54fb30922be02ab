"""The gated delta rule in torch, in chunks of rows: on any device, in the dtype of its inputs.

Inside a chunk that is entered with state S, with G the cumulative sum of g and P[i,j] = exp(G[i] - G[j]) for j <= i:

    (I + tril(diag(beta) (k k' * P), -1)) [U | W] = diag(beta) [v | k exp G]          solved for U and W
    out = (q exp G) S + tril(q k' * P) (U - W S)
    S'  = diag(exp G_last) S + (k exp(G_last - G))' (U - W S) = M S + N

Only S is needed of the rows before, so M and N of all chunks are computed together, `scan_states` passes the states
over chunks, spans and ranks, and all outputs are computed together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.linear.rule import DeltaInputs
from engine.attention.linear.sequence import ChunkMasks, LinearSequence
from engine.attention.linear.states import scan_states

CHUNK_SIZE = 64
CHANNEL_GATED_CHUNK_SIZE = 16  # P has one more dimension of dk


class _Chunks(NamedTuple):
    """Inputs by chunk, [chunks, n, C, ...] with n batch entries and heads; G is [..., 1], or [..., dk] in KDA."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class ChunkedDeltaRule:
    """`DeltaRule` by torch operations, in float32 or, for inputs in float64, in that."""

    name = "torch"

    def __init__(self, chunk_size: int | None = None) -> None:
        """`chunk_size`: rows that are computed together; None: by the gate."""
        self._chunk_size = chunk_size

    def __call__(self, inputs: DeltaInputs, sequence: LinearSequence) -> Tensor:
        """See `DeltaRule`."""
        size = self._chunk_size or (CHANNEL_GATED_CHUNK_SIZE if inputs.has_channel_gate else CHUNK_SIZE)
        dtype = torch.promote_types(inputs.v.dtype, torch.float32)
        q, k, v, g, beta = (x.to(dtype) for x in inputs[:5])
        if inputs.normalizes_qk:
            q, k = _unit_length(q), _unit_length(k)
        shared_by = v.shape[2] // k.shape[2]
        if shared_by > 1:
            q, k = q.repeat_interleave(shared_by, 2), k.repeat_interleave(shared_by, 2)
        gate = g if inputs.has_channel_gate else g[..., None]
        rows = (q * q.shape[-1] ** -0.5, k, v, gate, beta[..., None])
        chunks = _Chunks(*(_to_chunks(x, sequence, size) for x in rows))
        return _to_rows(_compute(chunks, sequence, size), sequence, size, batch=q.shape[0]).to(inputs.v.dtype)


def _unit_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _compute(chunks: _Chunks, sequence: LinearSequence, size: int) -> Tensor:
    """Return out [chunks, n, C, dv]."""
    q, k, v, g, beta = chunks
    masks = sequence.chunk_masks(size)
    # Differences of sums of strong decays cancel: in float32 they would cost 4 digits of a gradient.
    total = g.double().cumsum(-2)  # [chunks, n, C, 1 or dk] since the chunk began
    decay, remaining = total.to(g.dtype).exp(), (total[..., -1:, :] - total).to(g.dtype).exp()
    kk, qk = _products(q, k, total, masks)
    entering, leaving = k * decay, k * remaining
    queries, carried = q * decay, decay[..., -1:, :].mT  # carried: [chunks, n, 1 or dk, 1]
    if masks is not None:  # rows of other documents neither see the state before nor are seen after
        entering, queries, leaving = entering * masks.first, queries * masks.first, leaving * masks.last
        carried = carried * masks.unbroken
    solved = torch.linalg.solve_triangular(
        kk * beta, torch.cat([v, entering], -1) * beta, upper=False, unitriangular=True
    )
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    transitions = carried * identity - leaving.mT @ w
    states = scan_states(transitions, leaving.mT @ u, sequence, sequence.num_chunks(size))
    out: Tensor = queries @ states + qk @ (u - w @ states)
    return out


def _products(q: Tensor, k: Tensor, total: Tensor, masks: ChunkMasks | None) -> tuple[Tensor, Tensor]:
    """Return k k' and q k' with the decay between the rows, [chunks, n, C, C]; zero above the diagonal."""
    size = q.shape[-2]
    hidden = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    if masks is not None:
        hidden = hidden | ~masks.same
    if total.shape[-1] == 1:
        # Masked before exp: above the diagonal it would overflow, and inf * 0 is no gradient.
        decay = (total - total.mT).to(q.dtype).masked_fill(hidden, -torch.inf).exp()
        return (k @ k.mT) * decay, (q @ k.mT) * decay
    between = (total[..., :, None, :] - total[..., None, :, :]).to(q.dtype)
    between = between.masked_fill(hidden[..., None], -torch.inf).exp()
    decayed = between * k[..., None, :, :]  # [chunks, n, C, C, dk]
    return (decayed @ k[..., None]).squeeze(-1), (decayed @ q[..., None]).squeeze(-1)


def _to_chunks(x: Tensor, sequence: LinearSequence, size: int) -> Tensor:
    """[B, T, H, D] -> [chunks, B * H, C, D]; rows of zeros, which do nothing, fill the last chunk of a span."""
    spans = [
        F.pad(x[:, span.row : span.row + span.stop - span.start], (0, 0, 0, 0, 0, -(span.stop - span.start) % size))
        for span in sequence.local_spans
    ]
    rows = torch.cat(spans, 1) if len(spans) > 1 else spans[0]
    batch, padded, heads, dim = rows.shape
    return (
        rows.reshape(batch, padded // size, size, heads, dim)
        .permute(1, 0, 3, 2, 4)
        .reshape(-1, batch * heads, size, dim)
    )


def _to_rows(chunks: Tensor, sequence: LinearSequence, size: int, batch: int) -> Tensor:
    """Inverse of `_to_chunks`."""
    count, folded, _, dim = chunks.shape
    rows = chunks.reshape(count, batch, folded // batch, size, dim).permute(1, 0, 3, 2, 4)
    rows = rows.reshape(batch, count * size, folded // batch, dim)
    spans, first = [], 0
    for span, of_span in zip(sequence.local_spans, sequence.num_chunks(size), strict=True):
        spans.append(rows[:, first : first + span.stop - span.start])
        first += of_span * size
    return torch.cat(spans, 1) if len(spans) > 1 else spans[0]
