"""One rank of the comparison, `python -m benchmarks.peers.rank FOLDER`: variants are our presets or names of PEERS."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.methods import PEERS, PeerMethod, build_peer
from engine.attention.library import ContextParallel, open_channels, resolve_here
from engine.attention.transport import Transport
from engine.bench.attention import global_inputs, timed_pass
from engine.bench.measure import environment, run_rank, summarise, turns
from engine.bench.spec import AttentionCell
from engine.config.errors import ConfigError
from engine.distributed.mesh import Mesh, build_mesh
from engine.training.rank.process import leave

OUTPUTS = ("out", "dq", "dk", "dv")


@dataclass
class Contestant:
    """A method with its inputs on this rank, its relative errors and the seconds of its passes."""

    method: PeerMethod
    inputs: list[Tensor]
    errors: dict[str, float]
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def measure(cell: AttentionCell, device: torch.device) -> dict[str, Any]:
    """All variants of the cell, in turn."""
    contestants, skipped = build(cell)
    for counts, contestant in turns(contestants, cell.rounds):
        times = timed_pass(contestant.method.attention, contestant.inputs, device)
        for name, seconds in times.items() if counts else ():
            contestant.seconds[name].append(seconds)
    rows = [
        {"variant": c.method.name, "peer": c.method.name in PEERS, "seq_len": cell.seq_len, "mask": cell.mask}
        | {name: asdict(summarise(seconds)) for name, seconds in c.seconds.items()}
        | {"relative_error": c.errors}
        for c in contestants
    ]
    return {"environment": environment(device), "results": rows, "skipped": skipped}


def build(cell: AttentionCell) -> tuple[list[Contestant], dict[str, str]]:
    """(what can run, the reason for what cannot); all get slices of the same global inputs."""
    whole = global_inputs(cell.shape, cell.seq_len)
    reference = float64_reference(whole)
    contestants, skipped = [], {}
    first = cell.run_config("ring")
    mesh = build_mesh(first.parallel, first.cluster)
    channels = open_channels(first, mesh)
    for name in cell.variants:
        try:
            method = build_peer(name, cell) if name in PEERS else build_ours(name, cell, mesh, channels)
        except ConfigError as error:
            skipped[name] = "; ".join(error.problems)
            continue
        inputs = [x[method.positions][None] for x in whole]
        contestants.append(Contestant(method, inputs, relative_errors(method, inputs, reference)))
    return contestants, skipped


def build_ours(variant: str, cell: AttentionCell, mesh: Mesh, channels: Transport) -> PeerMethod:
    """A preset of this project in the same form."""
    if cell.seq_len % (2 * cell.setup.ranks):
        raise ConfigError(
            f"{cell.seq_len} tokens are not a multiple of twice {cell.setup.ranks} ranks: peers do not pad"
        )
    attention = ContextParallel.of_run(resolve_here(cell.run_config(variant), mesh), mesh, channels)
    return PeerMethod(variant, torch.from_numpy(attention.layout.positions(attention.rank)), attention)


def float64_reference(whole: Sequence[Tensor]) -> dict[str, Tensor]:
    """out, dq, dk, dv [N, heads, D] of the rounded inputs in float64 (torch's own attention), the same on all ranks."""
    q, k, v, dout = (x.double().transpose(0, 1)[None] for x in whole)
    if dist.get_rank() == 0:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        tensors = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    else:
        tensors = [torch.empty_like(x) for x in (q, q, k, v)]
    rows = [x[0].transpose(0, 1).contiguous() for x in tensors]
    for x in rows:
        dist.broadcast(x, 0)
    return dict(zip(OUTPUTS, rows, strict=True))


def relative_errors(method: PeerMethod, inputs: Sequence[Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """|result - reference| / |reference| (Frobenius norms over all ranks) of out, dq, dk and dv."""
    q, k, v, dout = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = method.attention(*leaves)
    results = (out.detach(), *torch.autograd.grad(out, leaves, dout))
    errors = {}
    for name, result in zip(OUTPUTS, results, strict=True):
        wanted = reference[name][method.positions]
        sums = torch.stack([(result[0].double() - wanted).square().sum(), wanted.square().sum()])
        dist.all_reduce(sums)
        errors[name] = float((sums[0] / sums[1]).sqrt())
    return errors


if __name__ == "__main__":
    leave(run_rank(AttentionCell, sys.argv[1:], measure))
