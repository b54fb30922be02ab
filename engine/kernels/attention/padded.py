"""Narrow heads of v in kernels that take equal widths only: v, out and dout get zeros up to the width of q and k.

Exact: a column of zeros in v gives one in out, and one in dout adds nothing to dout v^T or rowsum(dout * out). Tiles
are padded, not messages; it costs the products of the added columns (latent attention of DeepSeek: 128 of 192).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from engine.kernels.attention.base import KernelRequest, TileGradients, TileKernel, TileResult
from engine.planning.visibility.mask import Band


class PaddedValues:
    """A TileKernel whose heads of v may be narrower than those of q and k, made of one that takes equal widths."""

    def __init__(self, kernel: TileKernel) -> None:
        self.name = kernel.name
        self.capabilities = replace(kernel.capabilities, unequal_head_dims=True)
        self._kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        """(out, lse) of the tile."""
        out, lse = self._kernel.forward(q, k, _widened(v, q), band)
        return out[..., : v.shape[2]], lse

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        """(dq, dk, dv) of the tile."""
        wide = TileGradients(_widened(grads.dout, q), _widened(grads.out, q), grads.lse)
        dq, dk, dv = self._kernel.backward(wide, q, k, _widened(v, q), band)
        return TileResult(dq, dk, dv[..., : v.shape[2]])


def build_kernel(kind: type[TileKernel], request: KernelRequest) -> TileKernel:
    """Make a kernel of a kind for a request that it can meet, padding v where it needs that."""
    kernel, (qk_dim, v_dim) = kind(), request.head_dims
    return PaddedValues(kernel) if v_dim < qk_dim and not kernel.capabilities.unequal_head_dims else kernel


def _widened(x: Tensor, q: Tensor) -> Tensor:
    """[n, heads, v_dim] -> [n, heads, qk_dim]."""
    return pad(x, (0, q.shape[2] - x.shape[2]))
