"""RMSNorm and SwiGLU as autograd functions that save only their inputs, never an fp32 copy of an activation.

On a GPU each direction is one pass of a Triton kernel (`engine.kernels`); on a CPU torch works on blocks of rows. Under
torch.compile the same torch operations are traced and fused by the compiler.
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
    """Return x / rms(x) * weight over the last dimension, [..., d] in the dtype of `x`; statistics in fp32.

    Saves x and one fp32 number per row for backward.

    Args:
        x: [..., d].
        weight: Gain, [d].
        eps: Added to the mean of squares.
    """
    if _is_left_to_torch(x):
        return F.rms_norm(x, weight.shape, weight, eps)
    out: Tensor = _RMSNorm.apply(x, None, weight, eps)  # type: ignore[no-untyped-call]
    return out


def add_rms_norm(branch: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return branch + residual, written over `branch`, and its `rms_norm`, both [..., d] in the dtype of `branch`.

    No backward pass may need the old values of `branch`. Saves the sum and one fp32 number per row.
    """
    if torch.compiler.is_compiling() or _is_left_to_torch(branch):
        total = branch.add_(residual)
        return total, rms_norm(total, weight, eps)
    total, normed = _RMSNorm.apply(branch, residual, weight, eps)  # type: ignore[no-untyped-call]
    return total, normed


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, all [..., ffn]; saves gate and up only."""
    if torch.compiler.is_compiling():  # torch 2.11 silently compiles the custom backward to wrong gradients
        return F.silu(gate) * up
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def _is_left_to_torch(x: Tensor) -> bool:
    """Return whether to use F.rms_norm: on a GPU without Triton or under torch.compile it is one kernel as well."""
    return x.is_cuda and not uses_triton(x)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Any:
        """Return the normed rows [..., d]; with a residual also the sum, written over x: (sum, normed)."""
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
        """Return dx, dresidual, dweight. The sum feeds the norm and the residual stream, so its gradient has two parts.

        x and the residual get the same gradient, since both are summands.
        """
        dtotal, dnormed = douts if len(douts) == 2 else (None, douts[0])
        if dnormed is None:
            return dtotal, dtotal, None, None
        dx, dweight = _norm_backward(dnormed, dtotal, *ctx.saved_tensors)
        return dx, dx if len(douts) == 2 else None, dweight, None


def _normed(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normed rows, in x's shape and dtype, and 1 / rms, [rows] fp32; adds a residual to x in place first."""
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
    """Return dx [..., d] and dweight [d].

    With n = x * rstd and g = dout * weight: dx = rstd * (g - n * mean(n * g)) + dtotal, dweight = sum(dout * n).
    `dtotal` is the gradient that reaches x through the residual stream, if any.
    """
    if uses_triton(x):
        from engine.kernels import rms_norm as kernels

        return kernels.backward(dout, dtotal, x, weight, rstd)
    rows, drows = x.reshape(-1, x.shape[-1]), dout.reshape(-1, x.shape[-1])
    others = None if dtotal is None else dtotal.reshape(rows.shape)
    dx = torch.empty_like(rows)
    wide_weight = weight.to(rstd.dtype)
    # The Triton kernel writes partial sums that are added up; a fake run of it allocates as many.
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
        """Return silu(gate) * up in one new buffer."""
        ctx.save_for_backward(gate, up)
        if uses_triton(gate):
            from engine.kernels import elementwise as kernels

            return kernels.swiglu(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        """Return dgate = dout * up * silu'(gate) and dup = dout * silu(gate), the only two allocations."""
        gate, up = ctx.saved_tensors
        if uses_triton(gate):
            from engine.kernels import elementwise as kernels

            return kernels.swiglu_backward(dout, gate, up)
        dup = F.silu(gate).mul_(dout)
        dgate = dout * up
        torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
        return dgate, dup
