"""Rotary position embedding for positions given one by one, so that a rank may hold any part of the sequence.

Convention of Hugging Face's Llama ("rotate half"): dimension i is paired with i + head_dim / 2, so its weights need no
permutation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.row_blocks import accumulate_dtype, row_blocks


def rope_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """(cos, sin), each fp32 [T, head_dim / 2], for global `positions` [T] int64.

    Angles are formed in float64: at position 4M an fp32 angle is off by up to 0.25 rad in the fastest pair.
    """
    device = positions.device
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    frequencies = torch.pow(torch.tensor(theta, dtype=torch.float64, device=device), -exponents)
    shape = (positions.shape[0], head_dim // 2)
    cos = torch.empty(shape, dtype=torch.float32, device=device)
    sin = torch.empty(shape, dtype=torch.float32, device=device)
    for rows in row_blocks(shape[0], shape[1], device):
        angles = torch.outer(positions[rows].to(torch.float64), frequencies)
        cos[rows] = angles.cos().float()
        sin[rows] = angles.sin().float()
    return cos, sin


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, values: bool = True) -> Tensor:
    """x [B, T, H, D] rotated by the angles of its rows, same shape and dtype, contiguous; cos and sin [T, D / 2].

    Computed in fp32 block by block. The backward pass is the rotation by the opposite angle and saves nothing of x.
    `values` False: for the gradient only; the result is x as it is.
    """
    out: Tensor = _RoPE.apply(x, cos, sin, values)  # type: ignore[no-untyped-call]
    return out


class _RoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, values: bool) -> Tensor:
        """x rotated by +angle, or x."""
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, direction=1) if values else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        """dout rotated by -angle: a rotation's transpose is its inverse."""
        cos, sin = ctx.saved_tensors
        return _rotate(dout, cos, sin, direction=-1), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, direction: int) -> Tensor:
    """(x1, x2) -> (x1 cos - s x2 sin, x2 cos + s x1 sin) for the halves of the last dimension, s = `direction`."""
    batch, tokens, heads, head_dim = x.shape
    half = head_dim // 2
    wide = accumulate_dtype(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for rows in row_blocks(tokens, batch * heads * head_dim, x.device):
        block = x[:, rows].to(wide)
        block_cos, block_sin = cos[rows].to(wide).unsqueeze(1), sin[rows].to(wide).unsqueeze(1)
        first, second = block[..., :half], block[..., half:]
        out[:, rows, :, :half].copy_((first * block_cos).addcmul_(second, block_sin, value=-direction))
        out[:, rows, :, half:].copy_((second * block_cos).addcmul_(first, block_sin, value=direction))
    return out
