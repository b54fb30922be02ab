"""What a kernel is: one tile of attention, forward and backward, with declared capabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class BandSpec(NamedTuple):
    """Row i sees key j iff low <= i - j <= high; None means unbounded."""

    low: int | None = None
    high: int | None = None

    @property
    def is_full(self) -> bool:
        """Every query sees every key."""
        return self.low is None and self.high is None

    @property
    def is_causal(self) -> bool:
        """Row i sees keys 0..i (planners make such tiles square)."""
        return self.low == 0 and self.high is None


@dataclass(frozen=True)
class Capabilities:
    """What a kernel can be given."""

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    max_head_dim: int


class TileKernel(Protocol):
    """Attention of one tile, softmax scale 1/sqrt(head_dim), grouped kv heads native.

    Shapes: q, out, dout [num_queries, num_heads, head_dim]; k, v [num_keys, num_kv_heads, head_dim] with query head h
    using kv head h // (num_heads // num_kv_heads); lse [num_queries, num_heads], natural logarithm, fp32 (float64 for
    float64 inputs). Inputs may be strided views. Every query sees at least one key: planners guarantee it.
    """

    name: str
    capabilities: Capabilities

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        """(out in q's dtype, lse) of this tile alone."""

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        """(dq, dk, dv) of this tile, given the lse over ALL keys and an `out` with the right rowsum(dout * out)."""


class TileGradients(NamedTuple):
    """What backward needs of the whole row: dout, out (or the surrogate) and the global lse."""

    dout: Tensor
    out: Tensor
    lse: Tensor


class TileResult(NamedTuple):
    """Gradients of one tile, in the inputs' shapes."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
