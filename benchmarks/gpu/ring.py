"""Ranks of a ring on one device: real plans, run by the real executor, with messages that copy or move nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.context import AttentionGroup, build_context
from engine.attention.executor import Execution
from engine.attention.runtime import AttentionRuntime, SavedAttention
from engine.attention.transport import P2POp, SilentTransport, Transport
from engine.bench.spec import HeadShape
from engine.config.settings import AttentionConfig, MemoryConfig, ModelConfig, PresetName, RunConfig, TrainConfig
from engine.kernels.attention.base import TileKernel
from engine.planning.methods.layers import attention_layers
from engine.planning.topology import Topology
from engine.planning.visibility.layout import Layout
from engine.predict.machine import machine_of
from engine.resolve.attention import resolve_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from testkit.hub import Hub, lockstep


class NoiseTransport(SilentTransport):
    """Fills what would be received with random numbers: a GPU's clock, and so its speed, depends on the values."""

    def post(self, ops: Sequence[P2POp]) -> None:
        """Nothing travels."""
        for op in ops:
            for tensor in op.tensors if op.op == "recv" else ():
                tensor.normal_()


class Inputs(NamedTuple):
    """q, dout [rows, H, D] and k, v [rows, K, D] of some rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def rows(self, index: Tensor) -> Inputs:
        """Copies of some rows."""
        return Inputs(*(x[index] for x in self))


class Gradients(NamedTuple):
    """What a backward pass leaves."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class RingCase:
    """A preset on `ranks` ranks of `nodes` nodes that hold `block_tokens` tokens each; causal."""

    preset: PresetName
    ranks: int
    nodes: int
    block_tokens: int
    shape: HeadShape

    @property
    def seq_len(self) -> int:
        """Of the whole sequence."""
        return self.ranks * self.block_tokens

    def rank(self, rank: int, kernel: TileKernel, device: torch.device) -> RingRank:
        """One rank, silent. Raises ConfigError for a preset that so many ranks cannot run."""
        shape, topology = self.shape, Topology(self.nodes, self.ranks // self.nodes)
        config = RunConfig(
            model=ModelConfig(num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim),
            attention=AttentionConfig(preset=self.preset),
            memory=MemoryConfig(activation_checkpoint="none"),
            train=TrainConfig(seq_len=self.seq_len, compute_dtype=shape.dtype),
        )
        method = resolve_attention(config, topology, machine_of(config))
        group = AttentionGroup(rank, topology, SilentTransport(), kernel)
        context = build_context(group, attention_layers(config, method), self.seq_len)
        index = torch.from_numpy(context.layout.positions(rank)).to(device)
        return RingRank(context.runtime, context.layout, index, method.backward_circulates)


@dataclass(frozen=True)
class RingRank:
    """One rank's plans; `index` are the positions that it holds."""

    runtime: AttentionRuntime
    layout: Layout
    index: Tensor
    circulates: str

    def over(self, transport: Transport) -> RingRank:
        """The same plans with other messages, in the same buffers."""
        return replace(self, runtime=replace(self.runtime, transport=transport))

    @property
    def pairs(self) -> int:
        """Visible pairs of its forward plan, per head."""
        return sum(tile.band.area() for tile in self.runtime.forward.tiles())

    def forward(self, x: Inputs) -> tuple[Tensor, SavedAttention]:
        """(out, what backward needs), as a layer calls it."""
        execution = self.runtime.forward_execution(x.q, x.k, x.v)
        execution.run()
        return self.runtime.collect(execution, x.q, x.k, x.v)

    def backward(self, x: Inputs, saved: SavedAttention) -> Gradients:
        """Gradients in the inputs' dtype."""
        execution = self.runtime.backward_execution(saved, x.dout, x.k.shape[1])
        execution.run()
        return gradients_of(execution, x.q.dtype)


def gradients_of(execution: Execution, dtype: torch.dtype) -> Gradients:
    """What a finished backward pass left, cast once."""
    found = {**execution.argument("dq"), **execution.argument("dkv")}
    return Gradients(*(found[name].to(dtype) for name in ("dq", "dk", "dv")))


def run_together(ranks: Sequence[RingRank], parts: Sequence[Inputs]) -> list[tuple[Tensor, Gradients]]:
    """(out, gradients) of every rank, with all messages delivered: values are right, the time says nothing."""
    hub = Hub(len(ranks), late=False)
    runtimes = [rank.over(hub.transport(number)).runtime for number, rank in enumerate(ranks)]
    forwards = [r.forward_execution(x.q, x.k, x.v) for r, x in zip(runtimes, parts, strict=True)]
    lockstep(forwards, hub)
    finished = [r.collect(e, x.q, x.k, x.v) for r, e, x in zip(runtimes, forwards, parts, strict=True)]
    hub = Hub(len(ranks), late=False)
    runtimes = [rank.over(hub.transport(number)).runtime for number, rank in enumerate(ranks)]
    backwards = [
        r.backward_execution(saved, x.dout, x.k.shape[1])
        for r, x, (_, saved) in zip(runtimes, parts, finished, strict=True)
    ]
    lockstep(backwards, hub)
    return [(out, gradients_of(e, x.q.dtype)) for (out, _), e, x in zip(finished, backwards, parts, strict=True)]
