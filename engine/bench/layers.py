"""The one place where benchmarks meet the attention engine: building a layer, silencing it, emptying its plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.attention.api import ParallelAttention, build_parallel_attention, open_channels
from engine.attention.runtime import AttentionRuntime
from engine.attention.transport import SilentTransport, Transport
from engine.bench.spec import AttentionCell, HeadShape
from engine.config.schema import to_plain
from engine.parallel.mesh import Mesh, build_mesh
from engine.planning.schedule.plan import LinkBytes, RankPlan


@dataclass(frozen=True)
class BenchLayer:
    """One variant's attention on this rank."""

    variant: str
    attention: ParallelAttention

    def inputs(self, shape: HeadShape, device: torch.device) -> list[Tensor]:
        """q, k, v, dout of this rank, [1, T, heads, D]; slices of the same global tensors for every variant."""
        positions = torch.from_numpy(self.attention.layout.positions(self.attention.cp_rank))
        whole = global_inputs(shape, self.attention.padded_seq_len)
        return [x[positions][None].to(device) for x in whole]

    def silent(self) -> BenchLayer:
        """The same plans without communication."""
        return self._changed(lambda runtime: replace(runtime, transport=SilentTransport()))

    def exchange_only(self) -> BenchLayer:
        """The same transfers without tiles and local ops."""
        return self._changed(
            lambda runtime: replace(
                runtime, forward=without_compute(runtime.forward), backward=without_compute(runtime.backward)
            )
        )

    def method(self) -> dict[str, Any]:
        """The resolved method as plain values."""
        plain: dict[str, Any] = to_plain(self.attention.method)
        return plain

    def reset_traffic(self) -> None:
        """Start counting from zero."""
        self.attention.reset_traffic()

    def traffic(self) -> LinkBytes:
        """Bytes sent by this rank since `reset_traffic`."""
        return self.attention.traffic()

    def _changed(self, change: Callable[[AttentionRuntime], AttentionRuntime]) -> BenchLayer:
        return BenchLayer(self.variant, self.attention.with_runtimes(change))


@dataclass(frozen=True)
class BenchRanks:
    """The ranks of a cell and one set of channels, which all variants share.

    Channels of their own would be threads that wake all the time, and slow down whatever is measured.
    """

    mesh: Mesh
    transport: Transport

    @classmethod
    def open(cls, cell: AttentionCell) -> BenchRanks:
        """Collective over all ranks."""
        config = cell.run_config(cell.variants[0])
        mesh = build_mesh(config.parallel, config.cluster)
        return cls(mesh, open_channels(config, mesh))

    def layer(self, cell: AttentionCell, variant: str) -> BenchLayer:
        """A variant's attention on this rank. Raises ConfigError, on every rank alike, for what is not legal."""
        return BenchLayer(variant, build_parallel_attention(cell.run_config(variant), self.mesh, self.transport))


def without_compute(plan: RankPlan) -> RankPlan:
    """The plan's transfers at the steps where they were, and nothing else."""
    return replace(plan, steps=tuple(replace(step, pre=(), tiles=(), after=()) for step in plan.steps))


def global_inputs(shape: HeadShape, rows: int) -> list[Tensor]:
    """q, k, v, dout of the whole sequence, [rows, heads, D]; equal on every rank."""
    generator = torch.Generator().manual_seed(0)
    counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return [torch.randn(rows, count, shape.head_dim, generator=generator).to(dtype) for count in counts]
