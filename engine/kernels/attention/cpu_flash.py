"""torch's blocked CPU attention (`aten::_scaled_dot_product_flash_attention_for_cpu`), tile by tile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.kernels.attention.base import (
    Capabilities,
    LibraryKernel,
    TileGradients,
    TileResult,
)
from engine.kernels.attention.reference import band_bias
from engine.planning.visibility.mask import Band, row_strips

STRIP_ROWS = 512
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuFlashKernel(LibraryKernel):
    """Online-softmax CPU kernel over views [1, heads, rows, D]; grouped heads native."""

    name = "cpu_flash"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        max_head_dim=1 << 16,
    )

    def _calls(self, band: Band) -> list[Band]:
        return row_strips(band, STRIP_ROWS)

    def _backward_calls(self, band: Band, dtype: torch.dtype) -> list[Band]:
        """For 16-bit inputs a few blocks of queries each: the op sums dk and dv over blocks in the inputs' dtype, so
        long tiles are summed here (half the error at 2K rows, a third at 8K).
        """
        if band.kind == "band" or dtype in (torch.float32, torch.float64):
            return self._calls(band)
        return [call for rows in _query_calls(band.num_queries) for call in _visible_keys(*rows, band)]

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        views = [_heads_first(x) for x in (q, k, v)]
        out, lse = _FORWARD(*views, 0.0, band.is_causal, attn_mask=_bias(q, band))
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        views = [_heads_first(x) for x in (grads.dout, q, k, v, grads.out)]
        lse = grads.lse.transpose(0, 1)[None]
        results = _BACKWARD(*views, lse, 0.0, band.is_causal, attn_mask=_bias(q, band))
        return TileResult(*(grad[0].transpose(0, 1) for grad in results))


def _query_calls(rows: int) -> Iterator[tuple[int, int]]:
    """Row ranges of at most four of the op's query blocks (256 rows from 768 rows on, 64 below).

    Eight small ones would be a tenth faster at 512 rows, and 1.4 times as inexact as one kernel over a long sequence.
    """
    start = 0
    while start < rows:
        stop = min(rows, start + (1024 if rows - start >= 768 else 256))
        yield start, stop
        start = stop


def _visible_keys(start: int, stop: int, band: Band) -> list[Band]:
    """What query rows [start, stop) of a full or causal tile see: the causal square first, then all keys before it."""
    if band.is_full:
        return [Band(start, stop, 0, band.num_keys)]
    square = Band(start, stop, start, stop, low=0)
    return [square, Band(start, stop, 0, start)] if start else [square]


def _heads_first(x: Tensor) -> Tensor:
    """[rows, heads, D] -> [1, heads, rows, D] as a view."""
    return x.transpose(0, 1)[None]


def _bias(q: Tensor, band: Band) -> Tensor | None:
    return band_bias(band, q.dtype, q.device)[None, None] if band.kind == "band" else None
