"""One-pass Triton kernels of `engine.attention.merge` for GPUs.

Tensors are [n, H, D] with D contiguous and any strides over rows and heads (kernels return transposed views). Offsets
are 64-bit: n * H * D may exceed 2^31. Sums are formed in the accumulators' dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CELLS = 4096  # elements per program


def merge_tile(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """See `engine.attention.merge.merge_tile`; reads and writes `out` once."""
    block_out = _dense_columns(block_out)
    assert out.stride(2) == 1, out.stride()
    _launch(_MERGE, out.shape, out, (out, block_out), (lse, block_lse))


def backward_stats(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """See `engine.attention.merge.backward_stats`; reads dout and out once."""
    stats = torch.empty(*lse.shape, 2, dtype=lse.dtype, device=lse.device)
    _launch(_STATS, dout.shape, dout, (_dense_columns(dout), _dense_columns(out)), (lse, stats))
    return stats


def surrogate_out(dout: Tensor, stats: Tensor) -> Tensor:
    """See `engine.attention.merge.surrogate_out`; reads dout and writes the result once."""
    result = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    _launch(_SURROGATE, dout.shape, dout, (_dense_columns(dout), result), (stats[..., 1],))
    return result


def _dense_columns(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _launch(kernel: Any, shape: torch.Size, on: Tensor, cells: tuple[Tensor, ...], pairs: tuple[Tensor, ...]) -> None:
    """Run `kernel` over [rows, heads, D] tensors `cells` and [rows, heads] tensors `pairs`, with their strides."""
    rows, heads, head_dim = shape
    if rows == 0:
        return
    width = triton.next_power_of_2(head_dim)
    per_program = max(1, CELLS // width)
    strides = [stride for tensor in (*cells, *pairs) for stride in tensor.stride()[:2]]
    programs = triton.cdiv(rows * heads, per_program)
    with torch.cuda.device_of(on):  # type: ignore[no-untyped-call]
        kernel[(programs,)](
            *cells, *pairs, *strides, rows * heads, heads, head_dim, per_program=per_program, width=width
        )


def _merge(
    out: Any, block_out: Any, lse: Any, block_lse: Any,
    out_row: Any, out_head: Any, block_row: Any, block_head: Any,
    lse_row: Any, lse_head: Any, block_lse_row: Any, block_lse_head: Any,
    pairs: Any, heads: Any, head_dim: Any,
    per_program: tl.constexpr, width: tl.constexpr,
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
    tl.store(lse_at, top + tl.log(tl.exp(old - top) + tl.exp(new - top)), mask=live)
    weight = 1.0 / (1.0 + tl.exp(old - new))  # 1 where nothing was merged yet: old is -inf
    out_at = out + (row * out_row + head * out_head)[:, None] + column[None, :]
    block_at = block_out + (row * block_row + head * block_head)[:, None] + column[None, :]
    merged = tl.load(out_at, mask=cell, other=0.0)
    block = tl.load(block_at, mask=cell, other=0.0).to(merged.dtype)
    tl.store(out_at, merged + weight[:, None] * (block - merged), mask=cell)


def _stats(
    dout: Any, out: Any, lse: Any, stats: Any,
    dout_row: Any, dout_head: Any, out_row: Any, out_head: Any,
    lse_row: Any, lse_head: Any, stats_row: Any, stats_head: Any,
    pairs: Any, heads: Any, head_dim: Any,
    per_program: tl.constexpr, width: tl.constexpr,
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


def _surrogate(
    dout: Any, result: Any, scale: Any,
    dout_row: Any, dout_head: Any, result_row: Any, result_head: Any, scale_row: Any, scale_head: Any,
    pairs: Any, heads: Any, head_dim: Any,
    per_program: tl.constexpr, width: tl.constexpr,
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


_MERGE, _STATS, _SURROGATE = triton.jit(_merge), triton.jit(_stats), triton.jit(_surrogate)
