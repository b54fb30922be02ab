"""Attention and a layer in chunks on one process: what the device holds at growing length, and what chunking costs.

    memory   the same chunk at several lengths: bytes that live at once while the plans run, beyond the tensors that lie
             in host memory (named one by one before the run: on a CPU both memories are the same); and the plans' own
             device buffers, which is arithmetic
    time     forward and backward in chunks against whole at equal length, called in turn in one process

Run it on a quiet machine:

    python -m benchmarks.bench_chunks --output benchmarks/results/chunks_HARDWARE_YYYYMM.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.turns import measure_in_turn
from engine.attention.arithmetic import AttentionShape
from engine.attention.context import AttentionGroup, SequenceContext, build_context
from engine.attention.executor import Execution
from engine.attention.kernels import settle_kernel
from engine.attention.runtime import SavedAttention
from engine.attention.transport import LocalTransport
from engine.bench.environment import environment
from engine.bench.measure import Timing
from engine.bench.spec import Rounds
from engine.config.settings import ModelConfig
from engine.memory.store import DeviceStore
from engine.memory.tracker import LiveTensorTracker
from engine.model.checkpointed import apply_policies
from engine.model.layer_call import LayerManner
from engine.model.llama import LlamaModel
from engine.planning.memory.policy import LayerPolicy
from engine.planning.methods.presets import AttentionMethod
from engine.planning.methods.topology import Topology
from engine.planning.schedule.plan import RankPlan
from engine.planning.sequence.layers import LayerAttention
from engine.planning.sequence.mask import Mask

CPU = torch.device("cpu")
WHOLE = AttentionMethod("single", "contiguous", 1, 1, "kv", "float32", "benchmark")
CHUNKED = replace(WHOLE, preset="fpdt", layout="chunk_cyclic", chunk_store="host")


@dataclass(frozen=True)
class Case:
    """What is computed."""

    model: ModelConfig
    dtype: torch.dtype
    chunk_tokens: int
    prefetch_chunks: int

    def context(self, tokens: int, *, chunked: bool) -> SequenceContext:
        """Causal attention of one rank over the whole sequence."""
        chunks = replace(CHUNKED, chunk_tokens=self.chunk_tokens, prefetch_chunks=self.prefetch_chunks)
        kernel = settle_kernel("auto", CPU, self.dtype, self.model.head_dim).kernel
        group = AttentionGroup(0, Topology(1, 1), LocalTransport(), kernel)
        return build_context(group, [LayerAttention(Mask(tokens), chunks if chunked else WHOLE)], tokens)

    def inputs(self, tokens: int) -> list[Tensor]:
        """q, k, v [1, tokens, heads, D] that require gradients."""
        heads = (self.model.num_heads, self.model.num_kv_heads, self.model.num_kv_heads)
        shapes = [(1, tokens, count, self.model.head_dim) for count in heads]
        return [torch.randn(*shape, dtype=self.dtype).requires_grad_() for shape in shapes]


@dataclass(frozen=True)
class WorkingSet:
    """Bytes of one pass: the device's buffers by the plan, the most that lived at once, the host's."""

    slot_bytes: int
    peak_bytes: int
    host_bytes: int


def working_set(execution: Execution, plan: RankPlan, shape: AttentionShape) -> WorkingSet:
    """Runs the pass and counts."""
    token_bytes = shape.token_bytes()
    slots = list(zip(plan.slots, execution.slots, strict=True))
    device = sum(slot.rows * token_bytes.of(slot.kind, slot.heads) for slot, _ in slots if slot.where == "device")
    host = [tensor for slot, fields in slots if slot.where == "host" for tensor in fields.values()]
    with LiveTensorTracker() as tracker:
        tracker.watch(host)  # they live longer than the run
        before = tracker.live_bytes
        execution.run()
    return WorkingSet(device, tracker.peak_bytes - before, sum(tensor.nbytes for tensor in host))


def memory(case: Case, tokens: int, *, chunked: bool) -> dict[str, WorkingSet]:
    """Working sets of both passes."""
    runtime = case.context(tokens, chunked=chunked).runtime
    q, k, v = (x.detach()[0] for x in case.inputs(tokens))
    shape = runtime.arithmetic(q, k.shape[1]).shape
    forward = runtime.forward_execution(q, k, v)
    found = {"forward": working_set(forward, runtime.forward, shape)}
    out, saved = runtime.collect(forward, q, k, v)
    backward = runtime.backward_execution(SavedAttention(*vars(saved).values()), torch.randn_like(out))
    found["backward"] = working_set(backward, runtime.backward, shape)
    return found


def attention_step(case: Case, tokens: int, *, chunked: bool) -> Callable[[], object]:
    """Forward and backward of attention."""
    attention = case.context(tokens, chunked=chunked).functions(1)[0]
    inputs = case.inputs(tokens)
    dout = torch.randn_like(inputs[0])
    return lambda: torch.autograd.grad(attention(*inputs), inputs, dout)


def layer_step(case: Case, tokens: int, variant: str) -> Callable[[], object]:
    """Forward and backward of one layer: whole, checkpointed (attention computed twice) or in chunks."""
    torch.manual_seed(0)
    model = LlamaModel(case.model).to(case.dtype)
    if variant == "chunked":
        apply_policies(model, [LayerManner(LayerPolicy("none"), DeviceStore(), case.chunk_tokens)])
    elif variant == "checkpointed":
        apply_policies(model, [LayerManner(LayerPolicy("full"), DeviceStore())])
    attention = case.context(tokens, chunked=variant == "chunked").functions(1)[0]
    hidden = torch.randn(1, tokens, case.model.hidden_size, dtype=case.dtype, requires_grad=True)
    angles = torch.zeros(tokens, case.model.head_dim // 2)
    layer: nn.Module = model.layers[0]
    wanted = [hidden, *layer.parameters()]
    dout = torch.randn_like(hidden)
    return lambda: torch.autograd.grad(layer(hidden, angles, angles, attention), wanted, dout)


def measure(case: Case, lengths: list[int], rounds: Rounds) -> dict[str, Any]:
    """All figures."""
    longest = lengths[-1]
    attention = measure_in_turn(
        {name: attention_step(case, longest, chunked=name == "chunked") for name in ("whole", "chunked")}, CPU, rounds
    )
    layer = measure_in_turn(
        {name: layer_step(case, longest, name) for name in ("whole", "checkpointed", "chunked")}, CPU, rounds
    )
    return {
        "memory": {
            tokens: {
                name: {key: asdict(value) for key, value in memory(case, tokens, chunked=name == "chunked").items()}
                for name in ("whole", "chunked")
            }
            for tokens in lengths
        },
        "attention_s": {name: asdict(timing) for name, timing in attention.items()},
        "layer_s": {name: asdict(timing) for name, timing in layer.items()},
    }


def show(figures: dict[str, Any], case: Case) -> None:
    """Prints two tables."""
    print(f"chunks of {case.chunk_tokens} tokens, {case.prefetch_chunks} ahead; MiB beyond host memory, by pass")
    print(f"{'tokens':>8} {'':>8} {'slots f':>9} {'peak f':>9} {'slots b':>9} {'peak b':>9} {'host b':>9}")
    for tokens, both in figures["memory"].items():
        for name, passes in both.items():
            columns = [passes[p][key] for p in ("forward", "backward") for key in ("slot_bytes", "peak_bytes")]
            columns.append(passes["backward"]["host_bytes"])
            print(f"{tokens:>8} {name:>8} " + " ".join(f"{value / 2**20:9.2f}" for value in columns))
    for what in ("attention_s", "layer_s"):
        for name, timing in figures[what].items():
            found = Timing(**timing)
            ratio = found.median_s / figures[what]["whole"]["median_s"]
            print(f"{what:>12} {name:>13}: median {found.median_s:.3f} s, fastest {found.min_s:.3f}, x {ratio:.3f}")


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--prefetch-chunks", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    width = args.heads * args.head_dim
    model = ModelConfig(
        vocab_size=64,
        hidden_size=width,
        ffn_hidden_size=3 * width,
        num_layers=1,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
    )
    case = Case(model, getattr(torch, args.dtype), args.chunk_tokens, args.prefetch_chunks)
    figures = measure(case, sorted(args.lengths), Rounds(warmup=1, repeats=args.repeats))
    show(figures, case)
    if args.output:
        command = shlex.join(["python", "-m", "benchmarks.bench_chunks", *sys.argv[1:]])
        args.output.write_text(json.dumps({"command": command, "environment": environment(CPU), **figures}, indent=1))


if __name__ == "__main__":
    main()
