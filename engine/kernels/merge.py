"""The one-pass kernels of `engine.attention.merge`.

Tensors are [n, H, D] with D contiguous and any strides over rows and heads (kernels return transposed views). Offsets
are 64-bit: n * H * D may exceed 2^31. Sums are formed in the accumulators' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import kernel, launch
from engine.kernels.tiles import RowTiles


def merge_tile(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """See `engine.attention.merge.merge_tile`; reads and writes `out` once."""
    assert out.stride(2) == 1, out.stride()
    _launch(merge_kernel, (out, _dense_columns(block_out)), (lse, block_lse))


def add_kv(
    sums: Sequence[Tensor], gradients: Sequence[Tensor], arrived: Sequence[Tensor] | None, *, stores: bool
) -> None:
    """See `engine.attention.merge.add_kv`; each is (of k, of v), read or written once by one kernel."""
    rows, heads, qk_dim = sums[0].shape
    v_dim = sums[1].shape[2]
    tensors = [*sums, *map(_dense_columns, gradients), *(sums if arrived is None else arrived)]
    assert all(x.stride(2) == 1 for x in tensors), [x.stride() for x in tensors]
    tiles = RowTiles(rows * heads, max(qk_dim, v_dim))
    assert tiles.blocks == 1, f"heads of {qk_dim} and {v_dim}"
    strides = [stride for x in tensors for stride in x.stride()[:2]]
    sizes = {"qk_dim": qk_dim, "v_dim": v_dim, "per_program": tiles.per_program, "width": tiles.width}
    flags = {"stores": stores, "arrives": arrived is not None}
    arguments = (*tensors, *strides, rows * heads, heads)
    launch(add_kv_kernel, tiles.programs, *arguments, cells=tiles.cells, **sizes, **flags)


def backward_stats(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """See `engine.attention.merge.backward_stats`; reads dout and out once."""
    stats = torch.empty(*lse.shape, 2, dtype=lse.dtype, device=lse.device)
    _launch(stats_kernel, (_dense_columns(dout), _dense_columns(out)), (lse, stats))
    return stats


def surrogate_out(dout: Tensor, stats: Tensor) -> Tensor:
    """See `engine.attention.merge.surrogate_out`; reads dout and writes the result once."""
    result = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    _launch(surrogate_kernel, (_dense_columns(dout), result), (stats[..., 1],))
    return result


def _dense_columns(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _launch(function: Any, cells: tuple[Tensor, Tensor], pairs: tuple[Tensor, ...]) -> None:
    """Run a kernel over [rows, heads, D] tensors `cells` and [rows, heads] tensors `pairs`, with their strides."""
    rows, heads, head_dim = cells[0].shape
    tiles = RowTiles(rows * heads, head_dim)
    assert tiles.blocks == 1, f"head_dim {head_dim}"
    strides = [stride for tensor in (*cells, *pairs) for stride in tensor.stride()[:2]]
    sizes = {"head_dim": head_dim, "per_program": tiles.per_program, "width": tiles.width}
    launch(function, tiles.programs, *cells, *pairs, *strides, rows * heads, heads, cells=tiles.cells, **sizes)


@kernel
def merge_kernel(
    out: tl.tensor, block_out: tl.tensor, lse: tl.tensor, block_lse: tl.tensor, out_row: tl.tensor,
    out_head: tl.tensor, block_row: tl.tensor, block_head: tl.tensor, lse_row: tl.tensor, lse_head: tl.tensor,
    block_lse_row: tl.tensor, block_lse_head: tl.tensor, pairs: tl.tensor, heads: tl.tensor,
    head_dim: tl.constexpr, per_program: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * per_program + tl.arange(0, per_program)
    row, head = pair // heads, pair % heads
    column = tl.arange(0, width)
    live = pair < pairs
    cell = live[:, None] & (column < head_dim)[None, :]
    lse_at = lse + row * lse_row + head * lse_head
    old = tl.load(lse_at, mask=live, other=0.0)
    new = tl.load(block_lse + row * block_lse_row + head * block_lse_head, mask=live, other=0.0).to(old.dtype)
    top = tl.maximum(old, new)
    top = tl.where(top == float("-inf"), 0.0, top)  # neither has a key: the sum of no exponentials is 0
    total = top + tl.log(tl.exp(old - top) + tl.exp(new - top))
    # 1 where nothing was merged yet (old is -inf), 0 where the tile has no key either.
    weight = tl.where(new == float("-inf"), 0.0, 1.0 / (1.0 + tl.exp(old - new)))
    out_at = out + (row * out_row + head * out_head)[:, None] + column[None, :]
    block_at = block_out + (row * block_row + head * block_head)[:, None] + column[None, :]
    merged = tl.load(out_at, mask=cell, other=0.0)
    block = tl.load(block_at, mask=cell, other=0.0).to(merged.dtype)
    tl.store(out_at, merged + weight[:, None] * (block - merged), mask=cell)
    tl.debug_barrier()  # several threads have read each lse: none of them may find the new one
    tl.store(lse_at, total, mask=live)


@kernel
def add_kv_kernel(
    k_sums: tl.tensor, v_sums: tl.tensor, dk: tl.tensor, dv: tl.tensor, k_arrived: tl.tensor, v_arrived: tl.tensor,
    k_sums_row: tl.tensor, k_sums_head: tl.tensor, v_sums_row: tl.tensor, v_sums_head: tl.tensor,
    dk_row: tl.tensor, dk_head: tl.tensor, dv_row: tl.tensor, dv_head: tl.tensor,
    k_arrived_row: tl.tensor, k_arrived_head: tl.tensor, v_arrived_row: tl.tensor, v_arrived_head: tl.tensor,
    pairs: tl.tensor, heads: tl.tensor,
    qk_dim: tl.constexpr, v_dim: tl.constexpr, per_program: tl.constexpr, width: tl.constexpr,
    stores: tl.constexpr, arrives: tl.constexpr,
) -> None:  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * per_program + tl.arange(0, per_program)
    row, head = pair // heads, pair % heads
    column = tl.arange(0, width)
    live = (pair < pairs)[:, None]
    sums_at = k_sums + (row * k_sums_row + head * k_sums_head)[:, None] + column[None, :]
    arrived_at = k_arrived + (row * k_arrived_row + head * k_arrived_head)[:, None] + column[None, :]
    dk_at = dk + (row * dk_row + head * dk_head)[:, None] + column[None, :]
    _add_part(sums_at, dk_at, arrived_at, live & (column < qk_dim)[None, :], stores, arrives)
    sums_at = v_sums + (row * v_sums_row + head * v_sums_head)[:, None] + column[None, :]
    arrived_at = v_arrived + (row * v_arrived_row + head * v_arrived_head)[:, None] + column[None, :]
    dv_at = dv + (row * dv_row + head * dv_head)[:, None] + column[None, :]
    _add_part(sums_at, dv_at, arrived_at, live & (column < v_dim)[None, :], stores, arrives)


@kernel
def _add_part(
    sums_at: tl.tensor, found_at: tl.tensor, arrived_at: tl.tensor, cell: tl.tensor,
    stores: tl.constexpr, arrives: tl.constexpr,
) -> None:  # fmt: skip
    wide: tl.constexpr = sums_at.dtype.scalar.element_ty
    total = tl.load(found_at, mask=cell, other=0.0).to(wide)
    if not stores:
        total += tl.load(sums_at, mask=cell, other=0.0)
    if arrives:
        total += tl.load(arrived_at, mask=cell, other=0.0).to(wide)
    tl.store(sums_at, total, mask=cell)


@kernel
def stats_kernel(
    dout: tl.tensor, out: tl.tensor, lse: tl.tensor, stats: tl.tensor, dout_row: tl.tensor, dout_head: tl.tensor,
    out_row: tl.tensor, out_head: tl.tensor, lse_row: tl.tensor, lse_head: tl.tensor, stats_row: tl.tensor,
    stats_head: tl.tensor, pairs: tl.tensor, heads: tl.tensor,
    head_dim: tl.constexpr, per_program: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * per_program + tl.arange(0, per_program)
    row, head = pair // heads, pair % heads
    column = tl.arange(0, width)
    live = pair < pairs
    cell = live[:, None] & (column < head_dim)[None, :]
    total = tl.load(lse + row * lse_row + head * lse_head, mask=live, other=0.0)
    dout_at = dout + (row * dout_row + head * dout_head)[:, None] + column[None, :]
    out_at = out + (row * out_row + head * out_head)[:, None] + column[None, :]
    gradient = tl.load(dout_at, mask=cell, other=0.0).to(total.dtype)
    value = tl.load(out_at, mask=cell, other=0.0).to(total.dtype)
    norm, delta = tl.sum(gradient * gradient, 1), tl.sum(gradient * value, 1)
    scale = tl.where(norm > 0, delta / tl.where(norm > 0, norm, 1.0), 0.0)
    stats_at = stats + row * stats_row + head * stats_head
    tl.store(stats_at, total, mask=live)
    tl.store(stats_at + 1, scale, mask=live)


@kernel
def surrogate_kernel(
    dout: tl.tensor, result: tl.tensor, scale: tl.tensor, dout_row: tl.tensor, dout_head: tl.tensor,
    result_row: tl.tensor, result_head: tl.tensor, scale_row: tl.tensor, scale_head: tl.tensor, pairs: tl.tensor,
    heads: tl.tensor,
    head_dim: tl.constexpr, per_program: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * per_program + tl.arange(0, per_program)
    row, head = pair // heads, pair % heads
    column = tl.arange(0, width)
    live = pair < pairs
    cell = live[:, None] & (column < head_dim)[None, :]
    factor = tl.load(scale + row * scale_row + head * scale_head, mask=live, other=0.0)
    dout_at = dout + (row * dout_row + head * dout_head)[:, None] + column[None, :]
    result_at = result + (row * result_row + head * result_head)[:, None] + column[None, :]
    gradient = tl.load(dout_at, mask=cell, other=0.0)
    tl.store(result_at, (gradient.to(factor.dtype) * factor[:, None]).to(gradient.dtype), mask=cell)
