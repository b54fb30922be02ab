"""Triton SwiGLU and RoPE in one pass each: every element is read once and written once; arithmetic in fp32.

Inputs of more than 2^31 elements are addressed with 64-bit offsets.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import kernel, launch
from engine.kernels.tiles import CELLS, RowTiles


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, contiguous, rounded once."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch_flat(swiglu_kernel, gate, up, out)
    return out


def swiglu_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return dgate and dup, contiguous, in one pass over the three inputs."""
    dout, gate, up = dout.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = (torch.empty(gate.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    _launch_flat(swiglu_backward_kernel, dout, gate, up, dgate, dup)
    return dgate, dup


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, direction: int) -> Tensor:
    """Rotate the pairs of x [B, T, H, D] by the angles of its rows (direction -1: back); the result is contiguous.

    cos and sin [T, D / 2] are read for every head, but from cache, since heads of a row are adjacent.
    """
    batch, tokens, heads, head_dim = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = head_dim // 2
    tiles = RowTiles(batch * tokens * heads, half)
    assert tiles.blocks == 1, f"head_dim {head_dim}"
    constants = {"half": half, "width": tiles.width, "per_program": tiles.per_program, "direction": direction}
    sizes = (*x.stride()[:3], tiles.rows, tokens, heads)
    launch(rotate_kernel, tiles.programs, x, cos, sin, out, *sizes, cells=2 * tiles.cells, **constants)
    return out


def _launch_flat(function: Any, *tensors: Tensor) -> None:
    """Run a kernel over the elements of contiguous tensors, as many as the first has."""
    count = tensors[0].numel()
    launch(function, -(-count // CELLS), *tensors, count, cells=CELLS, width=CELLS)


@kernel
def swiglu_kernel(gate: tl.tensor, up: tl.tensor, out: tl.tensor, count: tl.tensor, width: tl.constexpr) -> None:
    wide: tl.constexpr = tl.float64 if gate.dtype.element_ty == tl.float64 else tl.float32
    at = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    live = at < count
    x = tl.load(gate + at, mask=live, other=0.0).to(wide)
    result = x / (1.0 + tl.exp(-x)) * tl.load(up + at, mask=live, other=0.0).to(wide)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=live)


@kernel
def swiglu_backward_kernel(
    dout: tl.tensor, gate: tl.tensor, up: tl.tensor, dgate: tl.tensor, dup: tl.tensor, count: tl.tensor,
    width: tl.constexpr,
) -> None:  # fmt: skip
    wide: tl.constexpr = tl.float64 if gate.dtype.element_ty == tl.float64 else tl.float32
    at = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    live = at < count
    x = tl.load(gate + at, mask=live, other=0.0).to(wide)
    flow = tl.load(dout + at, mask=live, other=0.0).to(wide)
    other = tl.load(up + at, mask=live, other=0.0).to(wide)
    share = 1.0 / (1.0 + tl.exp(-x))
    tl.store(dup + at, (flow * x * share).to(dup.dtype.element_ty), mask=live)
    slope = share * (1.0 + x * (1.0 - share))  # of silu
    tl.store(dgate + at, (flow * other * slope).to(dgate.dtype.element_ty), mask=live)


@kernel
def rotate_kernel(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, out: tl.tensor, x_batch: tl.tensor, x_token: tl.tensor,
    x_head: tl.tensor, rows: tl.tensor, tokens: tl.tensor, heads: tl.tensor,
    half: tl.constexpr, width: tl.constexpr, per_program: tl.constexpr, direction: tl.constexpr,
) -> None:  # fmt: skip
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64) * per_program + tl.arange(0, per_program)
    head, token = row % heads, (row // heads) % tokens
    start = (row // heads // tokens) * x_batch + token * x_token + head * x_head
    column = tl.arange(0, width)
    cell = (row < rows)[:, None] & (column < half)[None, :]
    x_at = x + start[:, None] + column[None, :]
    first = tl.load(x_at, mask=cell, other=0.0).to(wide)
    second = tl.load(x_at + half, mask=cell, other=0.0).to(wide)
    angle_at = (token * half)[:, None] + column[None, :]
    of_cos = tl.load(cos + angle_at, mask=cell, other=0.0).to(wide)
    of_sin = tl.load(sin + angle_at, mask=cell, other=0.0).to(wide) * direction
    out_at = out + (row * (2 * half))[:, None] + column[None, :]
    tl.store(out_at, (first * of_cos - second * of_sin).to(out.dtype.element_ty), mask=cell)
    tl.store(out_at + half, (second * of_cos + first * of_sin).to(out.dtype.element_ty), mask=cell)
