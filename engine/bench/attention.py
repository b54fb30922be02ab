"""One rank of a measurement of attention: `python -m engine.bench.attention FOLDER`, with RANK in the environment.

FOLDER contains the cell (`engine.bench.spec`) and is shared by all ranks for their rendezvous; rank 0 writes the result
to it: seconds of forward and backward, and the part added by communication.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.library import ContextParallel, open_channels, resolve_here
from engine.attention.transport import SilentTransport
from engine.bench.measure import environment, run_rank, slowest_rank, summarise, synchronize, turns
from engine.bench.spec import AttentionCell, HeadShape
from engine.config.errors import ConfigError
from engine.config.schema import to_plain
from engine.distributed.mesh import build_mesh
from engine.planning.program.ops import LinkBytes
from engine.training.rank.process import leave


@dataclass
class Contestant:
    """A variant with its inputs, and the seconds (of the slowest rank) of each of its calls by name."""

    variant: str
    attention: ContextParallel
    silent: ContextParallel  # without communication
    inputs: list[Tensor]  # q, k, v, dout of this rank, [1, T, heads, D]
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[str, int] = field(default_factory=dict)  # bytes that this rank sends in one call


def measure(cell: AttentionCell, device: torch.device) -> dict[str, Any]:
    """Measure all variants of the cell, one after another."""
    contestants, skipped = build_contestants(cell, device)
    for counts, contestant in turns(contestants, cell.rounds):
        call(contestant, device, counts=counts)
    rows = [result_row(contestant, cell) for contestant in contestants]
    for row in rows:
        row["time_over_first"] = row["total"]["median_s"] / rows[0]["total"]["median_s"]
    return {"environment": environment(device), "results": rows, "skipped": skipped}


def build_contestants(cell: AttentionCell, device: torch.device) -> tuple[list[Contestant], dict[str, str]]:
    """Return (variants that can run here, reason by name for all others), equal on every rank.

    All variants share one transport: threads of further ones would wake up often and slow down the measured calls.
    """
    contestants, skipped = [], {}
    first = cell.run_config(cell.variants[0])
    mesh = build_mesh(first.parallel, first.cluster)
    channels, transport = open_channels(first, mesh), SilentTransport()
    for variant in cell.variants:
        try:
            resolved = resolve_here(cell.run_config(variant), mesh)
            attention = ContextParallel.of_run(resolved, mesh, channels)
        except ConfigError as error:
            skipped[variant] = "; ".join(error.problems)
            continue
        rows = torch.from_numpy(attention.layout.positions(attention.rank))
        inputs = [x[rows][None].to(device) for x in global_inputs(cell.shape, attention.padded_seq_len)]
        silent = attention.with_runtimes(lambda runtime: replace(runtime, transport=transport))
        contestants.append(Contestant(variant, attention, silent, inputs))
    return contestants, skipped


def global_inputs(shape: HeadShape, rows: int) -> list[Tensor]:
    """Return q, k, v, dout of the whole sequence, [rows, heads, D], equal on every rank."""
    generator = torch.Generator().manual_seed(0)
    counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return [torch.randn(rows, count, shape.head_dim, generator=generator).to(dtype) for count in counts]


def call(contestant: Contestant, device: torch.device, *, counts: bool) -> None:
    """Run one forward and backward pass with and one without communication; record the times if `counts`."""
    attention, forward = contestant.attention, LinkBytes()

    def note_forward() -> None:
        nonlocal forward
        forward = attention.traffic()

    attention.reset_traffic()
    measured = timed_pass(attention, contestant.inputs, device, between=note_forward)
    sent = attention.traffic()
    contestant.sent = {
        "intra": sent.intra_bytes,
        "inter": sent.inter_bytes,
        "host": sent.host_bytes,
        "forward": forward.total,
        "backward": sent.total - forward.total,
    }
    measured["without_communication"] = timed_pass(contestant.silent, contestant.inputs, device)["total"]
    for name, seconds in measured.items() if counts else ():
        contestant.seconds[name].append(seconds)


def timed_pass(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: Sequence[Tensor],
    device: torch.device,
    between: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return seconds of forward, backward and total, each of the slowest rank, for inputs q, k, v, dout. Collective.

    `between` is called after forward and counts as forward.
    """
    *leaves, dout = inputs
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    out = attention(q, k, v)
    synchronize(device)
    between()
    middle = time.perf_counter()
    torch.autograd.grad(out, (q, k, v), dout)
    synchronize(device)
    end = time.perf_counter()
    names = ("forward", "backward", "total")
    return dict(zip(names, slowest_rank([middle - start, end - middle, end - start]), strict=True))


def result_row(contestant: Contestant, cell: AttentionCell) -> dict[str, Any]:
    """Return the figures of one variant as plain values; collective, since bytes are summed over ranks."""
    sent = torch.tensor(list(contestant.sent.values()), dtype=torch.int64)
    dist.all_reduce(sent)
    row: dict[str, Any] = {"variant": contestant.variant, "mask": cell.mask, "seq_len": cell.seq_len}
    row |= {name: asdict(summarise(seconds)) for name, seconds in contestant.seconds.items()}
    row["sent_bytes_all_ranks"] = dict(zip(contestant.sent, sent.tolist(), strict=True))
    row["exposed_s"] = row["total"]["median_s"] - row["without_communication"]["median_s"]
    return row | {"method": to_plain(contestant.attention.method)}


if __name__ == "__main__":
    leave(run_rank(AttentionCell, sys.argv[1:], measure))
