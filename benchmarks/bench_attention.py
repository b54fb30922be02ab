"""Attention forward and backward of every preset on several local ranks, in one run, with bytes sent.

    python -m benchmarks.bench_attention --json benchmarks/results/attention_HARDWARE_YYYYMM.json

Ranks are processes over gloo (one thread each by default); variants take turns in every round. The time of a variant is
the slowest rank's, measured between two barriers. `exposed` is that time minus the time of the same plans without a
transport (the numbers are then wrong; only the clock counts).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.common import DTYPES, make_parser, prepare, write_results
from engine.attention.api import ParallelAttention, build_parallel_attention
from engine.attention.transport import Parcel
from engine.config import AttentionConfig, ClusterConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from engine.parallel.mesh import build_mesh


@dataclass(frozen=True)
class Variant:
    """A preset with overrides, on so many (pretended) nodes."""

    name: str
    attention: dict[str, Any]
    nodes: int = 1


VARIANTS = (
    Variant("ring", {"preset": "ring"}),
    Variant("striped", {"preset": "striped"}),
    Variant("burst flat, kv", {"preset": "burst", "backward_circulates": "kv"}),
    Variant("burst flat, q", {"preset": "burst", "backward_circulates": "q"}),
    Variant("burst 2 nodes, kv", {"preset": "burst", "backward_circulates": "kv"}, 2),
    Variant("burst 2 nodes, q", {"preset": "burst", "backward_circulates": "q"}, 2),
)


class SilentTransport:
    """Moves nothing: the time without communication."""

    def post(self, parcels: Sequence[Parcel]) -> None:
        """Nothing starts."""

    def wait(self, messages: Sequence[int]) -> None:
        """Nothing is waited for."""


def run_config(variant: Variant, args: argparse.Namespace) -> RunConfig:
    """The configuration that makes this variant."""
    model = ModelConfig(num_heads=args.heads, num_kv_heads=args.kv_heads, head_dim=args.head_dim)
    return RunConfig(
        model=model,
        attention=AttentionConfig(**variant.attention),
        parallel=ParallelConfig(),
        train=TrainConfig(seq_len=args.seq_len, compute_dtype=args.dtype),
        cluster=ClusterConfig(topology_nodes=variant.nodes, backend="gloo"),
    )


def local_inputs(layer: ParallelAttention, args: argparse.Namespace) -> list[Tensor]:
    """q, k, v, dout of this rank, [1, T, heads, D]; the same global tensors for every variant."""
    generator = torch.Generator().manual_seed(0)
    index = torch.from_numpy(layer.layout.positions(layer.cp_rank))
    tensors = []
    for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads):
        whole = torch.randn(layer.padded_seq_len, heads, args.head_dim, generator=generator)
        tensors.append(whole[index][None].to(DTYPES[args.dtype]))
    return tensors


def forward_backward(layer: ParallelAttention, inputs: list[Tensor]) -> None:
    """One forward and backward pass; gradients are dropped."""
    q, k, v, dout = inputs
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(layer(*leaves), leaves, dout)


def timed(call: Callable[[], None]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    call()
    elapsed = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank: builds all variants, measures them in turn; rank 0 writes the rows."""
    torch.set_num_threads(args.threads or 1)
    store = dist.FileStore(f"{folder}/store", args.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    layers, silent = {}, {}
    for variant in VARIANTS:
        config = run_config(variant, args)
        layer = build_parallel_attention(config, build_mesh(config.parallel, config.cluster))
        layers[variant.name] = layer
        quiet = replace(layer.runtime, transport=SilentTransport())
        silent[variant.name] = ParallelAttention(quiet, layer.layout, layer.method, layer.place)
    rows = measure(layers, silent, args)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def measure(
    layers: dict[str, ParallelAttention], silent: dict[str, ParallelAttention], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Seconds and bytes of every variant, rounds interleaved."""
    inputs = {name: local_inputs(layer, args) for name, layer in layers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    alone: dict[str, list[float]] = {name: [] for name in layers}
    sent = {}
    for number in range(args.warmup + args.repeats):
        for name, layer in layers.items():
            layer.reset_traffic()
            elapsed = timed(lambda layer=layer, name=name: forward_backward(layer, inputs[name]))  # type: ignore[misc]
            sent[name] = layer.traffic().total
            quiet = timed(lambda name=name: forward_backward(silent[name], inputs[name]))  # type: ignore[misc]
            if number >= args.warmup:
                seconds[name].append(elapsed)
                alone[name].append(quiet)
    base = statistics.median(seconds["ring"])
    rows = []
    for name, layer in layers.items():
        total = torch.tensor(sent[name])
        dist.all_reduce(total)
        median, compute = statistics.median(seconds[name]), statistics.median(alone[name])
        rows.append(
            {
                "variant": name,
                "backward_circulates": layer.method.backward_circulates,
                "median_s": median,
                "min_s": min(seconds[name]),
                "max_s": max(seconds[name]),
                "without_communication_s": compute,
                "exposed_s": median - compute,
                "time_over_ring": median / base,
                "mib_sent_all_ranks": int(total) / 2**20,
            }
        )
    return rows


def main() -> None:
    """Starts the ranks, prints a line per variant, writes the file."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    args = parser.parse_args()
    _, facts = prepare(args)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(args, folder), nprocs=args.ranks)
        rows = json.loads(Path(folder, "rows.json").read_text())
    shape = {name: getattr(args, name) for name in ("ranks", "seq_len", "heads", "kv_heads", "head_dim", "dtype")}
    print(shape)
    for row in rows:
        print(
            f"{row['variant']:>20}  {row['median_s']:.3f} s ({row['min_s']:.3f}..{row['max_s']:.3f})  "
            f"x{row['time_over_ring']:.2f} of ring  without communication {row['without_communication_s']:.3f} s  "
            f"sent {row['mib_sent_all_ranks']:.1f} MiB"
        )
    write_results(args.json, facts, [{**shape, **row} for row in rows])


if __name__ == "__main__":
    main()
