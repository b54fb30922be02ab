"""Triton RMSNorm, with or without a residual addition before it: every row is read once and written once.

    forward     sum = x + residual (written over x); normed = sum * rstd * weight;  rstd = 1 / sqrt(mean(sum^2) + eps)
    backward    with n = sum * rstd, g = dnormed * weight:  dx = rstd * (g - n * mean(n * g)) + dsum
                dweight = sum over rows of dnormed * n: each program sums its rows, torch the programs

Statistics and sums in fp32 (float64 for float64). Sums are made in the same order in every run and on every GPU. Rows
too wide for registers are walked in blocks: all but the last block are read once more, from cache.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from engine.device.row_blocks import accumulate_dtype
from engine.kernels.launch import as_rows, kernel, launch
from engine.kernels.tiles import REDUCTION_PROGRAMS, RowTiles


def forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, of x's shape and dtype; rstd [rows] fp32); with `residual` of x's shape, it is added to x in place.

    x [..., d]; to be added to, x must be contiguous.
    """
    assert residual is None or x.is_contiguous(), x.stride()
    rows = as_rows(x)
    added = rows if residual is None else as_rows(residual)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows.shape[0], dtype=accumulate_dtype(x.dtype), device=x.device)
    tiles = RowTiles(*rows.shape)
    tensors, numbers = (rows, added, weight, normed, rstd), (rows.stride(0), added.stride(0), tiles.rows)
    constants = {**tiles.constants, "eps": eps, "adds": residual is not None}
    launch(forward_kernel, tiles.programs, *tensors, *numbers, cells=tiles.cells, **constants)
    return normed, rstd


def backward(
    dnormed: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    most_sums: int = REDUCTION_PROGRAMS,
) -> tuple[Tensor, Tensor]:
    """(dx, of total's shape and dtype; dweight [d] in weight's dtype).

    total [..., d] is what was normed, dtotal the gradient that reaches it on its other way, if there is one; most_sums
    as in `RowTiles`.
    """
    rows, drows = as_rows(total), as_rows(dnormed)
    others = drows if dtotal is None else as_rows(dtotal)
    dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    tiles = RowTiles(rows.shape[0], rows.shape[1], most_sums)
    empty = torch.empty if tiles.blocks == 1 else torch.zeros  # sums of narrow rows stay in registers until the end
    partial = empty(tiles.partial_sums, tiles.columns, dtype=rstd.dtype, device=total.device)
    tensors = (drows, others, rows, weight, rstd, dx, partial)
    numbers = (drows.stride(0), others.stride(0), rows.stride(0), tiles.rows)
    constants = {**tiles.constants, "steps": tiles.steps, "adds": dtotal is not None}
    # Half as many threads as forward: 3.5 in place of 3.1 TB/s on an H200.
    launch(backward_kernel, tiles.partial_sums, *tensors, *numbers, cells=tiles.cells // 2, **constants)
    return dx, partial.sum(0).to(weight.dtype)


@kernel
def forward_kernel(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, normed: tl.tensor, rstd: tl.tensor, x_row: tl.tensor,
    residual_row: tl.tensor, rows: tl.tensor,
    columns: tl.constexpr, width: tl.constexpr, blocks: tl.constexpr, per_program: tl.constexpr, eps: tl.constexpr,
    adds: tl.constexpr,
) -> None:  # fmt: skip
    wide: tl.constexpr = rstd.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * per_program + tl.arange(0, per_program)
    live = row < rows
    squares = tl.zeros([per_program, width], wide)
    for block in range(blocks - 1):
        at = block * width + tl.arange(0, width)
        value = _summed(x, residual, row * x_row, row * residual_row, at, live, columns, adds).to(wide)
        squares += value * value
    last = (blocks - 1) * width + tl.arange(0, width)
    kept = _summed(x, residual, row * x_row, row * residual_row, last, live, columns, adds).to(wide)
    scale = 1.0 / tl.sqrt(tl.sum(squares + kept * kept, 1) / columns + eps)
    tl.store(rstd + row, scale, mask=live)
    if blocks > 1:
        tl.debug_barrier()  # the sums that are read again were written by other threads
    for block in range(blocks - 1):
        at = block * width + tl.arange(0, width)
        cell = live[:, None] & (at < columns)[None, :]
        value = tl.load(x + (row * x_row)[:, None] + at[None, :], mask=cell, other=0.0).to(wide)
        gain = tl.load(weight + at, mask=at < columns, other=0.0).to(wide)
        result = value * scale[:, None] * gain[None, :]
        tl.store(normed + (row * columns)[:, None] + at[None, :], result.to(normed.dtype.element_ty), mask=cell)
    cell = live[:, None] & (last < columns)[None, :]
    gain = tl.load(weight + last, mask=last < columns, other=0.0).to(wide)
    result = kept * scale[:, None] * gain[None, :]
    tl.store(normed + (row * columns)[:, None] + last[None, :], result.to(normed.dtype.element_ty), mask=cell)


@kernel
def _summed(
    x: tl.tensor, residual: tl.tensor, x_start: tl.tensor, residual_start: tl.tensor, at: tl.tensor, live: tl.tensor,
    columns: tl.constexpr, adds: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load columns `at` of x, or of x + residual, which is written over x and rounded to its dtype."""
    cell = live[:, None] & (at < columns)[None, :]
    x_at = x + x_start[:, None] + at[None, :]
    value = tl.load(x_at, mask=cell, other=0.0)
    if adds:
        # In fp32 bf16 sums are exact enough to be rounded once, as torch rounds them.
        other = tl.load(residual + residual_start[:, None] + at[None, :], mask=cell, other=0.0)
        if value.dtype == tl.float64:
            value = value + other
        else:
            value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(x_at, value, mask=cell)
    return value


@kernel
def backward_kernel(
    dnormed: tl.tensor, dtotal: tl.tensor, total: tl.tensor, weight: tl.tensor, rstd: tl.tensor, dx: tl.tensor,
    partial: tl.tensor, dnormed_row: tl.tensor, dtotal_row: tl.tensor, total_row: tl.tensor, rows: tl.tensor,
    columns: tl.constexpr, width: tl.constexpr, blocks: tl.constexpr, per_program: tl.constexpr, steps: tl.constexpr,
    adds: tl.constexpr,
) -> None:  # fmt: skip
    wide: tl.constexpr = rstd.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    partial_at = partial + program * columns
    last = (blocks - 1) * width + tl.arange(0, width)
    gain = tl.load(weight + last, mask=last < columns, other=0.0).to(wide)
    of_gain = tl.zeros([per_program, width], wide)
    for step in range(steps):
        row = (program * steps + step) * per_program + tl.arange(0, per_program)
        live = row < rows
        scale = tl.load(rstd + row, mask=live, other=0.0)[:, None]
        products = tl.zeros([per_program, width], wide)
        for block in range(blocks - 1):
            at = block * width + tl.arange(0, width)
            cell = live[:, None] & (at < columns)[None, :]
            value = tl.load(total + (row * total_row)[:, None] + at[None, :], mask=cell, other=0.0).to(wide) * scale
            flow = tl.load(dnormed + (row * dnormed_row)[:, None] + at[None, :], mask=cell, other=0.0).to(wide)
            block_gain = tl.load(weight + at, mask=at < columns, other=0.0).to(wide)
            products += flow * value * block_gain[None, :]
            summed = tl.load(partial_at + at, mask=at < columns, other=0.0) + tl.sum(flow * value, 0)
            tl.store(partial_at + at, summed, mask=at < columns)
        cell = live[:, None] & (last < columns)[None, :]
        kept = tl.load(total + (row * total_row)[:, None] + last[None, :], mask=cell, other=0.0).to(wide) * scale
        kept_flow = tl.load(dnormed + (row * dnormed_row)[:, None] + last[None, :], mask=cell, other=0.0).to(wide)
        of_gain += kept_flow * kept
        products += kept_flow * kept * gain[None, :]
        mean = (tl.sum(products, 1) / columns)[:, None]
        for block in range(blocks - 1):
            at = block * width + tl.arange(0, width)
            cell = live[:, None] & (at < columns)[None, :]
            value = tl.load(total + (row * total_row)[:, None] + at[None, :], mask=cell, other=0.0).to(wide) * scale
            flow = tl.load(dnormed + (row * dnormed_row)[:, None] + at[None, :], mask=cell, other=0.0).to(wide)
            block_gain = tl.load(weight + at, mask=at < columns, other=0.0).to(wide)
            result = scale * (flow * block_gain[None, :] - value * mean)
            _store_gradient(dx, dtotal, result, row * columns, row * dtotal_row, at, live, columns, adds)
        result = scale * (kept_flow * gain[None, :] - kept * mean)
        _store_gradient(dx, dtotal, result, row * columns, row * dtotal_row, last, live, columns, adds)
        if blocks > 1:
            tl.debug_barrier()  # partial sums are read again in the next step
    tl.store(partial_at + last, tl.sum(of_gain, 0), mask=last < columns)


@kernel
def _store_gradient(
    dx: tl.tensor, dtotal: tl.tensor, result: tl.tensor, dx_start: tl.tensor, dtotal_start: tl.tensor, at: tl.tensor,
    live: tl.tensor,
    columns: tl.constexpr, adds: tl.constexpr,
) -> None:  # fmt: skip
    """Store columns `at` of dx: `result` plus those of dtotal."""
    cell = live[:, None] & (at < columns)[None, :]
    if adds:
        result += tl.load(dtotal + dtotal_start[:, None] + at[None, :], mask=cell, other=0.0).to(result.dtype)
    tl.store(dx + dx_start[:, None] + at[None, :], result.to(dx.dtype.element_ty), mask=cell)
