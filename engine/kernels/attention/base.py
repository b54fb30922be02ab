"""What a kernel is: one tile of attention, forward and backward, with declared capabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.device.row_blocks import accumulate_dtype, ends
from engine.kernels.attention.heads import CUDA_CALL_ELEMENTS
from engine.planning.visibility.mask import Band

ComputeCapability = tuple[int, int]  # of a GPU, such as (9, 0)


@dataclass(frozen=True)
class KernelRequest:
    """What a run asks of a kernel.

    compute_capability   of the GPU; None: not a GPU, or one that cannot be asked
    windows              tiles may be bands other than full and causal ones
    deterministic        equal inputs must give equal bits
    documents            packed sequences: every batch brings tiles of new shapes
    v_dim                width of a head of v and out; None: head_dim, that of q and k
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    compute_capability: ComputeCapability | None = None
    windows: bool = False
    deterministic: bool = False
    documents: bool = False
    v_dim: int | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        """Widths of a head of q and k, and of v and out."""
        return self.head_dim, self.head_dim if self.v_dim is None else self.v_dim


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
                           heads (`engine.kernels.attention.heads`); None: any number
    unequal_head_dims      heads of v may have another width than those of q and k; without it narrower ones are padded
                           (`engine.kernels.attention.padded`), and wider ones refused
    plans_shapes           it builds and keeps a plan for every new shape of a tile, for tens of milliseconds or more
    problem                what else is wrong with a request here, in words; None: nothing
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    max_head_dim: int
    max_call_elements: int | None = None
    head_dim_multiple: int = 1
    unequal_head_dims: bool = False
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
    """Attention of one tile, softmax scale 1/sqrt(qk_dim), grouped kv heads native; bands count from row and key 0.

    Shapes: q [num_queries, num_heads, qk_dim]; out, dout [num_queries, num_heads, v_dim]; k [num_keys, num_kv_heads,
    qk_dim]; v [num_keys, num_kv_heads, v_dim], with query head h using kv head h // (num_heads // num_kv_heads); lse
    [num_queries, num_heads], natural logarithm, fp32 (float64 for float64 inputs). Only kernels that declare
    `unequal_head_dims` are given a v_dim other than qk_dim. Inputs may be strided views. Every query sees at least one
    key: planners guarantee it.
    """

    name: str
    capabilities: Capabilities

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        """(out in q's dtype, lse) of this tile alone."""

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
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


class LibraryKernel(ABC):
    """A TileKernel that computes a tile with one call of a library, or several."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        """(out, lse) of the tile."""
        parts = [self._forward(q[c.queries], k[c.keys], v[c.keys], c) for c in self._calls(band)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        """(dq, dk, dv); dk and dv in the dtype of the lse if several calls are summed."""
        calls = self._backward_calls(band, q.dtype)
        if len(calls) == 1:
            return self._backward(grads, q, k, v, calls[0])
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk, dv = (torch.zeros(x.shape, dtype=accumulate_dtype(x.dtype), device=x.device) for x in (k, v))
        written = 0  # rows of dq that hold something
        # The one before the last ends where it does: of one result the next call still finds the memory taken.
        for part in (*ends(calls[:-1]), calls[-1]):
            rows, keys = part.queries, part.keys
            result = self._backward(TileGradients(*(x[rows] for x in grads)), q[rows], k[keys], v[keys], part)
            dk[keys] += result.dk
            dv[keys] += result.dv
            dq[rows] = result.dq if rows.start >= written else dq[rows] + result.dq
            written = rows.stop
        return TileResult(dq, dk, dv)

    def _calls(self, band: Band) -> Sequence[Band]:
        """The calls of a forward tile: all rows, each once, in order."""
        return [band]

    def _backward_calls(self, band: Band, dtype: torch.dtype) -> Sequence[Band]:
        """The calls of a backward tile; several of the same rows come after each other."""
        return self._calls(band)

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        """One call of the library: (out, lse) of a tile that it can take whole."""

    @abstractmethod
    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        """One call of the library: (dq, dk, dv)."""
