"""RMSNorm and SwiGLU as autograd functions that save only their inputs and keep no fp32 copy of an activation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.row_blocks import accumulate_dtype, rehearses_accelerator, row_blocks


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, same shape and dtype as `x`; statistics in fp32.

    x [..., d], weight [d]. Saves x and one fp32 number per row.
    """
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)  # one kernel per direction there, saving the same
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, same shape; saves gate and up only."""
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., d]: normalised rows."""
        rows = x.reshape(-1, x.shape[-1])
        wide = accumulate_dtype(x.dtype)
        # Not a view of `out_rows`: FSDP2 warns of units that return views.
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out_rows = out.view(rows.shape)
        rstd = torch.empty(rows.shape[0], 1, dtype=wide, device=x.device)
        wide_weight = weight.to(wide)
        for block in _norm_blocks(rows):
            values = rows[block].to(wide)
            block_rstd = (values * values).mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
            rstd[block] = block_rstd
            # `values * rstd` is a new tensor: for fp32 input `values` is the input itself.
            out_rows[block].copy_((values * block_rstd).mul_(wide_weight))
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x * rstd and g = dout * weight: dx = rstd * (g - n * mean(n * g)), dweight = sum(dout * n)."""
        x, weight, rstd = ctx.saved_tensors
        rows, drows = x.reshape(-1, x.shape[-1]), dout.reshape(-1, x.shape[-1])
        wide = rstd.dtype
        dx = torch.empty_like(rows)
        wide_weight = weight.to(wide)
        dweight = torch.zeros_like(wide_weight)
        for block in _norm_blocks(rows):
            normed = rows[block].to(wide) * rstd[block]
            product = drows[block].to(wide) * normed
            dweight += product.sum(dim=0)
            mean = torch.mv(product, wide_weight).div_(-x.shape[-1]).unsqueeze_(1)
            block_dx = (drows[block].to(wide) * wide_weight).addcmul_(normed, mean).mul_(rstd[block])
            dx[block].copy_(block_dx)
        return dx.view(x.shape), dweight.to(weight.dtype), None


def _norm_blocks(rows: Tensor) -> Iterator[slice]:
    """Blocks of rows; none in a rehearsal of an accelerator, whose kernel has no temporaries."""
    return iter(()) if rehearses_accelerator() else row_blocks(rows.shape[0], rows.shape[1], rows.device)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up in one new buffer."""
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        """dup = dout * silu(gate), dgate = dout * up * silu'(gate); the two results are the only allocations."""
        gate, up = ctx.saved_tensors
        dup = F.silu(gate).mul_(dout)
        dgate = dout * up
        torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
        return dgate, dup
