"""What a kernel is: one tile of attention, forward and backward, with declared capabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.attention.kernels.heads import CUDA_CALL_ELEMENTS
from engine.planning.sequence.mask import Band, row_strips
from engine.row_blocks import accumulate_dtype, ends


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


ComputeCapability = tuple[int, int]  # of a GPU, such as (9, 0)


@dataclass(frozen=True)
class KernelRequest:
    """What a run asks of a kernel.

    compute_capability   of the GPU; None: not a GPU, or one that cannot be asked
    windows              tiles may be bands other than full and causal ones
    deterministic        equal inputs must give equal bits
    documents            packed sequences: every batch brings tiles of new shapes
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    compute_capability: ComputeCapability | None = None
    windows: bool = False
    deterministic: bool = False
    documents: bool = False


def no_problem(request: KernelRequest) -> str | None:
    """For kernels that need nothing beyond what their other capabilities say."""
    return None


@dataclass(frozen=True)
class Capabilities:
    """What a kernel can be given, and how it does what others do by themselves.

    Every kernel takes the lse over all keys and a surrogate `out` in backward: see `TileKernel`.

    compute_capabilities   lowest and highest of a GPU that it runs on; None: no bound
    bfloat16_from          lowest compute capability that it takes bfloat16 on
    deterministic          backward gives equal bits: `always`; after the `flag` torch.use_deterministic_algorithms;
                           `never`
    max_call_elements      of q, out, or k and v with the heads of q, in one call; larger tiles come in parts of their
                           heads (`engine.attention.kernels.heads`); None: any number
    plans_shapes           it builds and keeps a plan for every new shape of a tile, for tens of milliseconds or more
    problem                what else is wrong with a request here, in words; None: nothing
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    max_head_dim: int
    max_call_elements: int | None = None
    head_dim_multiple: int = 1
    compute_capabilities: tuple[ComputeCapability | None, ComputeCapability | None] = (None, None)
    bfloat16_from: ComputeCapability | None = None
    deterministic: Literal["always", "flag", "never"] = "always"
    plans_shapes: bool = False
    problem: Callable[[KernelRequest], str | None] = no_problem


ON_CUDA = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    max_head_dim=256,
    max_call_elements=CUDA_CALL_ELEMENTS,
    head_dim_multiple=8,
    compute_capabilities=((8, 0), None),
    deterministic="flag",
)  # what kernels of GPUs have in common


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


class Call(NamedTuple):
    """A part of a tile for one call of a library: rows of queries, keys, and what these see of each other."""

    rows: slice
    keys: slice
    band: BandSpec


def strips(num_queries: int, num_keys: int, band: BandSpec, rows: int) -> list[Call]:
    """A tile in strips of so many queries, each with the keys that they see: a bias stays small, hidden keys are free.

    A full or a causal tile, which needs no bias, stays whole.
    """
    if band.is_full or band.is_causal:
        return [Call(slice(0, num_queries), slice(0, num_keys), band)]
    parts = row_strips(Band(0, num_queries, 0, num_keys, band.low, band.high), rows)
    return [Call(slice(s.q_start, s.q_stop), slice(s.k_start, s.k_stop), BandSpec(s.low, s.high)) for s in parts]


class LibraryKernel(ABC):
    """A TileKernel that computes a tile with one call of a library, or several."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        """(out, lse) of the tile."""
        parts = [self._forward(q[c.rows], k[c.keys], v[c.keys], c.band) for c in self._calls(q, k, band)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        """(dq, dk, dv); dk and dv in the dtype of the lse if several calls are summed."""
        calls = self._backward_calls(q, k, band)
        if len(calls) == 1:
            return self._backward(grads, q, k, v, calls[0].band)
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk, dv = (torch.zeros(x.shape, dtype=accumulate_dtype(x.dtype), device=x.device) for x in (k, v))
        written = 0  # rows of dq that hold something
        # The one before the last ends where it does: of one result the next call still finds the memory taken.
        for rows, keys, part in (*ends(calls[:-1]), calls[-1]):
            result = self._backward(TileGradients(*(x[rows] for x in grads)), q[rows], k[keys], v[keys], part)
            dk[keys] += result.dk
            dv[keys] += result.dv
            dq[rows] = result.dq if rows.start >= written else dq[rows] + result.dq
            written = rows.stop
        return TileResult(dq, dk, dv)

    def _calls(self, q: Tensor, k: Tensor, band: BandSpec) -> Sequence[Call]:
        """The calls of a forward tile: all rows, each once, in order."""
        return [Call(slice(0, q.shape[0]), slice(0, k.shape[0]), band)]

    def _backward_calls(self, q: Tensor, k: Tensor, band: BandSpec) -> Sequence[Call]:
        """The calls of a backward tile; several of the same rows come after each other."""
        return self._calls(q, k, band)

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        """One call of the library: (out, lse) of a tile that it can take whole."""

    @abstractmethod
    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        """One call of the library: (dq, dk, dv)."""
