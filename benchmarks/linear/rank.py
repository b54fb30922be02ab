"""One rank of the comparison, `python -m benchmarks.linear.rank FOLDER`; both ways run the same rule and messages."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engine.attention import ContextParallel
from engine.attention.linear import DeltaInputs, LinearSequence, gated_delta_rule
from engine.attention.linear.spans import build_spans
from engine.bench.measure import environment, run_rank, slowest_rank, summarise, turns
from engine.bench.spec import RankSetup, Rounds
from engine.planning.visibility.layout import build_layout
from engine.training.rank.process import leave

STATES, HEADS = "states", "all-to-all over heads"


@dataclass(frozen=True)
class LinearCell:
    """A layer with as many heads of q and k as of v; `layout` is that of the states, heads take the contiguous one."""

    setup: RankSetup
    seq_len: int
    heads: int
    key_dim: int
    value_dim: int
    layout: str
    dtype: str
    rounds: Rounds


class AllToAll(torch.autograd.Function):
    """[P, ...] -> [P, ...]: part i goes to rank i; the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, sequence: LinearSequence) -> Tensor:
        ctx.sequence = sequence
        return exchange_parts(parts, sequence)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
        return exchange_parts(gradients, ctx.sequence), None


def exchange_parts(parts: Tensor, sequence: LinearSequence) -> Tensor:
    """All-to-all by the messages that states take."""
    parts, received = parts.contiguous(), torch.empty_like(parts, memory_format=torch.contiguous_format)
    peers = [peer for peer in range(len(parts)) if peer != sequence.rank]
    sequence.exchange({peer: parts[peer] for peer in peers}, {peer: received[peer] for peer in peers})
    received[sequence.rank] = parts[sequence.rank]
    return received


def over_heads(inputs: DeltaInputs, sequence: LinearSequence, whole: LinearSequence) -> Tensor:
    """The rule over all rows of some heads: two all-to-alls in forward, two in backward."""
    size, dk, dv = dist.get_world_size(), inputs.k.shape[-1], inputs.v.shape[-1]
    packed = torch.cat([*inputs[:3], inputs.g[..., None], inputs.beta[..., None]], -1)  # [1, T / P, H, 2 dk + dv + 2]
    rows = AllToAll.apply(packed[0].unflatten(1, (size, -1)).transpose(0, 1), sequence)  # [P, T / P, H / P, ...]
    q, k, v, g, beta = rows.flatten(0, 1)[None].split([dk, dk, dv, 1, 1], -1)
    out = gated_delta_rule(DeltaInputs(q, k, v, g[..., 0], beta[..., 0], True), whole)  # [1, T, H / P, dv]
    return AllToAll.apply(out[0].unflatten(0, (size, -1)), sequence).transpose(0, 1).flatten(1, 2)[None]


def make_inputs(cell: LinearCell, positions: Tensor) -> tuple[DeltaInputs, Tensor]:
    """q, k, v, g, beta of this rank's rows, and the gradient of the output."""
    random = torch.Generator().manual_seed(0)
    dtype: torch.dtype = getattr(torch, cell.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, cell.seq_len, cell.heads, *shape, generator=random)[:, positions]

    rows = normal(cell.key_dim), normal(cell.key_dim), normal(cell.value_dim), -F.softplus(normal()), normal().sigmoid()
    leaves = [x.to(dtype).requires_grad_() for x in rows]
    return DeltaInputs(*leaves, normalizes_qk=True), normal(cell.value_dim).to(dtype)


def measure(cell: LinearCell, device: torch.device) -> dict[str, Any]:
    """Both ways in turn, and what they differ by."""
    setup = cell.setup
    axes = {"num_heads": cell.heads, "head_dim": cell.key_dim, "nodes": setup.nodes, "dtype": torch.float32}
    ways: dict[str, tuple[ContextParallel, Callable[[], Tensor], DeltaInputs, Tensor]] = {}
    for name, layout in ((STATES, cell.layout), (HEADS, "contiguous")):
        parallel = ContextParallel(preset="ring", layout=layout, **axes)
        context = parallel.context(cell.seq_len)
        inputs, dout = make_inputs(cell, context.positions)
        whole = all_rows_of(context.linear, cell.seq_len)
        call = (
            (lambda i=inputs, s=context.linear: gated_delta_rule(i, s))
            if name == STATES
            else (lambda i=inputs, s=context.linear, w=whole: over_heads(i, s, w))
        )
        ways[name] = parallel, call, inputs, dout
    seconds: dict[str, list[float]] = defaultdict(list)
    sent: dict[str, Any] = {}
    for counts, name in turns(list(ways), cell.rounds):
        parallel, call, inputs, dout = ways[name]
        parallel.reset_traffic()
        dist.barrier()
        start = time.perf_counter()
        out = call()
        torch.autograd.grad(out, inputs[:5], dout)
        (total,) = slowest_rank([time.perf_counter() - start])
        sent[name] = parallel.traffic()
        if counts:
            seconds[name].append(total)
    rows = [
        {"variant": name, "total": asdict(summarise(seconds[name]))}
        | {key: slowest_rank([value])[0] for key, value in sent[name]._asdict().items()}
        for name in ways
    ]
    return {"environment": environment(device), "results": rows}


def all_rows_of(sequence: LinearSequence, seq_len: int) -> LinearSequence:
    """The sequence of a rank that has all rows of its heads."""
    spans = build_spans(build_layout("contiguous", seq_len, 1), (), seq_len)
    return LinearSequence(spans, 0, sequence.transport, None, sequence.device)


def main() -> int:
    """Measure as the folder's cell says."""
    return run_rank(LinearCell, sys.argv[1:], measure)


if __name__ == "__main__":
    leave(main())
