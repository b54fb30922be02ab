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
    """The recurrence as it is defined, with q and k of unit length."""
    q, k, v, g, beta = inputs
    group = v.shape[2] // k.shape[2]
    q, k = (F.normalize(x, dim=-1, eps=1e-12).repeat_interleave(group, 2) for x in (q, k))
    g = g if g.dim() == 4 else g[..., None].expand_as(k)
    rows = []
    for t in range(q.shape[1]):
        if t == 0 or t in documents:
            state = torch.zeros(*v.shape[:1], v.shape[2], k.shape[3], v.shape[3], dtype=v.dtype)
        state = state * g[:, t, :, :, None].exp()
        predicted = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        update = beta[:, t, :, None] * (v[:, t] - predicted)
        state = state + k[:, t, :, :, None] * update[:, :, None]
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(rows, 1)


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
