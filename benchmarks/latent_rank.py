"""What every rank of `benchmarks.bench_latent` does: time attention whose latents travel, or are expanded before."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention import ContextParallel, LatentShape, SequenceContext, latent_attention
from engine.bench.measure import run_rank, slowest_rank, summarise, turns
from engine.bench.spec import RankSetup, Rounds
from engine.config.settings import KvForm

FORMS: tuple[KvForm, ...] = ("expanded", "latent")


@dataclass(frozen=True)
class LatentCell:
    """Both forms under one preset at one length; `document_tokens`: of equal packed documents, 0: one sequence."""

    preset: str
    seq_len: int
    document_tokens: int
    num_heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rank: int
    setup: RankSetup
    rounds: Rounds

    @property
    def documents(self) -> tuple[int, ...]:
        """First positions of the documents."""
        return tuple(range(0, self.seq_len, self.document_tokens)) if self.document_tokens else ()


@dataclass(frozen=True)
class _Contestant:
    form: KvForm
    parallel: ContextParallel
    context: SequenceContext


def measure(cell: LatentCell, device: torch.device) -> dict[str, Any]:
    """Seconds and bytes of both forms. Collective."""
    contestants = [_contestant(cell, form, device) for form in FORMS]
    inputs = _inputs(cell, contestants[0].context)
    seconds: defaultdict[str, list[list[float]]] = defaultdict(list)
    sent: dict[str, list[int]] = {}
    for counts, each in turns(contestants, cell.rounds):
        times, sent[each.form] = _timed(each, inputs)
        if counts:
            seconds[each.form].append(times)
    rows = {}
    for form, calls in seconds.items():
        total = torch.tensor(sent[form])
        dist.all_reduce(total)
        names = ("forward", "backward")
        rows[form] = {
            name: asdict(summarise(column)) for name, column in zip(names, zip(*calls, strict=True), strict=True)
        }
        rows[form]["total"] = asdict(summarise([sum(call) for call in calls]))
        rows[form]["sent_bytes_all_ranks"] = dict(zip(names, total.tolist(), strict=True))
    return rows


def _contestant(cell: LatentCell, form: KvForm, device: torch.device) -> _Contestant:
    layout = {"layout": "per_document"} if cell.document_tokens else {}
    parallel = ContextParallel(
        num_heads=cell.num_heads,
        head_dim=cell.nope_dim + cell.rope_dim,
        v_dim=cell.v_dim,
        latent=LatentShape(cell.rank, cell.rope_dim),
        kv_form=form,
        preset=cell.preset,
        nodes=cell.setup.nodes,
        dtype=torch.float32,
        device=device,
        **layout,
    )
    return _Contestant(form, parallel, parallel.context(cell.seq_len, "causal", cell.documents))


def _inputs(cell: LatentCell, context: SequenceContext) -> list[Tensor]:
    """q, c, k_rope, weight, dout of this rank; random, of the scale that trained models have."""
    rows, heads = context.local_len, cell.num_heads
    shapes = [(1, rows, heads, cell.nope_dim + cell.rope_dim), (1, rows, cell.rank), (1, rows, cell.rope_dim)]
    shapes += [(heads * (cell.nope_dim + cell.v_dim), cell.rank), (1, rows, heads, cell.v_dim)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    q, c, rope, weight, dout = (torch.randn(shape, generator=generator) for shape in shapes)
    return [q, c, rope, weight / cell.rank**0.5, dout]


def _timed(contestant: _Contestant, inputs: list[Tensor]) -> tuple[list[float], list[int]]:
    """Seconds of forward and backward of the slowest rank, and bytes that this one sent in each. Collective."""
    parallel = contestant.parallel
    *operands, dout = inputs
    q, c, rope, weight = leaves = [x.detach().requires_grad_() for x in operands]
    parallel.reset_traffic()
    dist.barrier()
    start = time.perf_counter()
    out = latent_attention(q, c, rope, weight, contestant.context)
    middle, forward = time.perf_counter(), parallel.traffic().total
    torch.autograd.grad(out, leaves, dout)
    end = time.perf_counter()
    seconds = slowest_rank([middle - start, end - middle])
    return seconds, [forward, parallel.traffic().total - forward]


if __name__ == "__main__":
    sys.exit(run_rank(LatentCell, sys.argv[1:], measure))
