"""Linear layers of one process, a document and a row at a time, and the same over ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.linear import LinearSequence
from engine.attention.linear.spans import build_spans
from engine.attention.transport import Transport
from engine.planning.program.ops import Channel
from engine.planning.visibility.layout import Layout
from testkit.thread_ranks import run_on_threads


def make_inputs(seq_len: int, *, channel_gate: bool = False, seed: int = 0) -> list[Tensor]:
    """q, k, v, g, beta in float64 with 2 heads of k and 4 of v (as many in KDA), dk=5, dv=3."""
    random = torch.Generator().manual_seed(seed)
    heads = 4 if channel_gate else 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, seq_len, *shape, generator=random, dtype=torch.float64)

    g = -0.3 * F.softplus(normal(4, 5) if channel_gate else normal(4))
    return [normal(heads, 5), normal(heads, 5), normal(4, 3), g, torch.sigmoid(normal(4))]


def delta_rule_by_rows(inputs: Sequence[Tensor], documents: Sequence[int]) -> Tensor:
    """The recurrence as it is defined, document by document, with q and k of unit length."""
    batch, seq_len, heads, dv = inputs[2].shape
    zeros = inputs[2].new_zeros(batch, heads, inputs[1].shape[3], dv)
    ends = [*documents[1:], seq_len]
    parts = [
        _rows_from_state([x[:, start:stop] for x in inputs], zeros, normalizes=True)[0]
        for start, stop in zip(documents, ends, strict=True)
    ]
    return torch.cat(parts, 1)


def _rows_from_state(inputs: Sequence[Tensor], state: Tensor, *, normalizes: bool) -> tuple[Tensor, Tensor]:
    """(out, final state) of q, k [B, T, Hk, dk], v [B, T, H, dv], g and beta, from a state [B, H, dk, dv]."""
    q, k, v, g, beta = inputs
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    if normalizes:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = g if g.dim() == 4 else g[..., None].expand_as(k)
    rows = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, :, None].exp()
        predicted = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        update = beta[:, t, :, None] * (v[:, t] - predicted)
        state = state + k[:, t, :, :, None] * update[:, :, None]
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(rows, 1), state


def convolution_by_documents(x: Tensor, weight: Tensor, bias: Tensor, documents: Sequence[int]) -> Tensor:
    """x [B, channels, T]: every document by itself, zeros before it."""
    ends = [*documents[1:], x.shape[-1]]
    return torch.cat(
        [
            F.conv1d(F.pad(x[..., a:b], (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=len(weight))
            for a, b in zip(documents, ends, strict=True)
        ],
        -1,
    )


def over_ranks(
    function: Callable[[list[Tensor], LinearSequence], Tensor],
    inputs: Sequence[Tensor],
    dout: Tensor,
    layout: Layout,
    documents: Sequence[int],
    dim: int = 1,
) -> tuple[Tensor, list[Tensor], list[int]]:
    """(out, gradients of the inputs, bytes sent by every rank) of `function` over threads that share the rows."""
    seq_len = dout.shape[dim]
    rows = [torch.from_numpy(layout.positions(rank)) for rank in range(layout.size)]

    def local(x: Tensor, rank: int) -> Tensor:
        padded = torch.cat([x, x.new_zeros(*x.shape[:dim], layout.seq_len - seq_len, *x.shape[dim + 1 :])], dim)
        return padded.index_select(dim, rows[rank])

    def run(rank: int, transport: Transport) -> tuple[Tensor, list[Tensor], int]:
        spans = build_spans(layout, documents, seq_len)
        sequence = LinearSequence(spans, rank, transport, Channel.HEADS, torch.device("cpu"))
        shard = [local(x, rank).requires_grad_() for x in inputs]
        out = function(shard, sequence)
        gradients = torch.autograd.grad(out, shard, local(dout, rank))
        return out.detach(), list(gradients), sum(transport.meter.sent)

    results = run_on_threads(layout.size, run)

    def whole(parts: Sequence[Tensor]) -> Tensor:
        order = torch.argsort(torch.cat(rows))
        return torch.cat(list(parts), dim).index_select(dim, order).narrow(dim, 0, seq_len)

    gradients = [whole([result[1][index] for result in results]) for index in range(len(inputs))]
    return whole([result[0] for result in results]), gradients, [result[2] for result in results]


def flash_linear_by_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """The interface of chunk_gated_delta_rule and chunk_kda of flash-linear-attention 0.6, computed row by row."""
    assert output_final_state
    assert q.shape[0] == 1
    ends = cu_seqlens.tolist()
    assert initial_state.shape[0] == len(ends) - 1
    results = [
        _rows_from_state(
            [x[:, start:stop] for x in (q, k, v, g, beta)], state[None].to(v), normalizes=use_qk_l2norm_in_kernel
        )
        for start, stop, state in zip(ends, ends[1:], initial_state, strict=False)
    ]
    return torch.cat([out for out, _ in results], 1), torch.cat([state for _, state in results])
