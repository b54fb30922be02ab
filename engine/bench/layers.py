"""The one place where benchmarks meet the attention engine: building a layer, silencing it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention.library import ContextParallel, open_channels
from engine.attention.transport import SilentTransport, Transport
from engine.bench.spec import AttentionCell, HeadShape
from engine.parallel.mesh import Mesh, build_mesh


def own_inputs(attention: ContextParallel, shape: HeadShape, device: torch.device) -> list[Tensor]:
    """q, k, v, dout of this rank, [1, T, heads, D]; slices of the same global tensors for every variant."""
    positions = torch.from_numpy(attention.layout.positions(attention.rank))
    return [x[positions][None].to(device) for x in global_inputs(shape, attention.padded_seq_len)]


def silent(attention: ContextParallel) -> ContextParallel:
    """The same plans without communication."""
    return attention.with_runtimes(lambda runtime: replace(runtime, transport=SilentTransport()))


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

    def attention(self, cell: AttentionCell, variant: str) -> ContextParallel:
        """A variant's attention on this rank. Raises ConfigError, on every rank alike, for what is not legal."""
        return ContextParallel.of_run(cell.run_config(variant), self.mesh, self.transport)


def global_inputs(shape: HeadShape, rows: int) -> list[Tensor]:
    """q, k, v, dout of the whole sequence, [rows, heads, D]; equal on every rank."""
    generator = torch.Generator().manual_seed(0)
    counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return [torch.randn(rows, count, shape.head_dim, generator=generator).to(dtype) for count in counts]
