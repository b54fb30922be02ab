"""RMSNorm and SwiGLU as autograd functions that save only their inputs and keep no fp32 copy of an activation.

On a GPU each direction is one pass of a Triton kernel (`engine.kernels`); on a CPU torch works on blocks of rows.
torch.compile makes kernels of its own out of the same torch operations.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.device.row_blocks import accumulate_dtype, is_fake_accelerator, temporary_blocks
from engine.kernels.dispatch import uses_triton
from engine.kernels.tiles import RowTiles


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, same shape and dtype as `x`; statistics in fp32.

    x [..., d], weight [d]. Saves x and one fp32 number per row.
    """
    if _is_left_to_torch(x):
        return F.rms_norm(x, weight.shape, weight, eps)
    out: Tensor = _RMSNorm.apply(x, None, weight, eps)  # type: ignore[no-untyped-call]
    return out


def add_rms_norm(branch: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(branch + residual, which is written over `branch`; its `rms_norm`), each of branch's shape and dtype.

    branch and residual [..., d]; no backward pass may need what branch held. Saves the sum and one fp32 number per row.
    """
    if torch.compiler.is_compiling() or _is_left_to_torch(branch):
        total = branch.add_(residual)
        return total, rms_norm(total, weight, eps)
    total, normed = _RMSNorm.apply(branch, residual, weight, eps)  # type: ignore[no-untyped-call]
    return total, normed


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, same shape; saves gate and up only."""
    if torch.compiler.is_compiling():  # torch 2.11 compiles our backward pass to wrong numbers, without a word
        return F.silu(gate) * up
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def _is_left_to_torch(x: Tensor) -> bool:
    """On a GPU without Triton, or under torch.compile there, torch's own norm is one kernel and saves the same."""
    return x.is_cuda and not uses_triton(x)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Any:
        """Normalised rows [..., d]; with a residual (the sum, in x's memory; its normalised rows)."""
        out, rstd = _normed(x, residual, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        if residual is None:
            return out
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        return x, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        """The sum's gradient, on both its ways, is that of x and of the residual."""
        dtotal, dnormed = douts if len(douts) == 2 else (None, douts[0])
        if dnormed is None:
            return dtotal, dtotal, None, None
        dx, dweight = _norm_backward(dnormed, dtotal, *ctx.saved_tensors)
        return dx, dx if len(douts) == 2 else None, dweight, None


def _normed(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normalised rows of x's shape and dtype, rstd [rows] fp32); a residual is added to x in place before."""
    if residual is not None and not (uses_triton(x) and x.is_contiguous()):
        x.add_(residual)
        residual = None
    if uses_triton(x):
        from engine.kernels import rms_norm as kernels

        return kernels.forward(x, residual, weight, eps)
    rows = x.reshape(-1, x.shape[-1])
    wide = accumulate_dtype(x.dtype)
    # Not a view of `out_rows`: FSDP2 warns of units that return views.
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_rows = out.view(rows.shape)
    rstd = torch.empty(rows.shape[0], dtype=wide, device=x.device)
    wide_weight = weight.to(wide)
    for block in temporary_blocks(rows):
        values = rows[block].to(wide)
        block_rstd = (values * values).mean(dim=-1).add_(eps).rsqrt_()
        rstd[block] = block_rstd
        # `values * rstd` is a new tensor: for fp32 input `values` is the input itself.
        out_rows[block].copy_((values * block_rstd.unsqueeze(1)).mul_(wide_weight))
    return out, rstd


def _norm_backward(
    dout: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """With n = x * rstd and g = dout * weight: dx = rstd * (g - n * mean(n * g)) + dtotal, dweight = sum(dout * n).

    dtotal: the gradient that reaches x on another way, if there is one.
    """
    if uses_triton(x):
        from engine.kernels import rms_norm as kernels

        return kernels.backward(dout, dtotal, x, weight, rstd)
    rows, drows = x.reshape(-1, x.shape[-1]), dout.reshape(-1, x.shape[-1])
    others = None if dtotal is None else dtotal.reshape(rows.shape)
    dx = torch.empty_like(rows)
    wide_weight = weight.to(rstd.dtype)
    # A kernel leaves partial sums, added up; as many of them in a rehearsal of it.
    sums = RowTiles(*rows.shape).partial_sums if is_fake_accelerator() else 1
    dweight = torch.zeros(sums, rows.shape[1], dtype=rstd.dtype, device=rows.device).sum(0)
    for block in temporary_blocks(rows):
        scale = rstd[block].unsqueeze(1)
        normed = rows[block].to(rstd.dtype) * scale
        product = drows[block].to(rstd.dtype) * normed
        dweight += product.sum(dim=0)
        mean = torch.mv(product, wide_weight).div_(-x.shape[-1]).unsqueeze_(1)
        block_dx = (drows[block].to(rstd.dtype) * wide_weight).addcmul_(normed, mean).mul_(scale)
        if others is not None:
            block_dx += others[block]
        dx[block].copy_(block_dx)
    return dx.view(x.shape), dweight.to(weight.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up in one new buffer."""
        ctx.save_for_backward(gate, up)
        if uses_triton(gate):
            from engine.kernels import elementwise as kernels

            return kernels.swiglu(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        """dup = dout * silu(gate), dgate = dout * up * silu'(gate); the two results are the only allocations."""
        gate, up = ctx.saved_tensors
        if uses_triton(gate):
            from engine.kernels import elementwise as kernels

            return kernels.swiglu_backward(dout, gate, up)
        dup = F.silu(gate).mul_(dout)
        dgate = dout * up
        torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
        return dgate, dup
