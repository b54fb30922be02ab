"""torch's blocked CPU attention (`aten::_scaled_dot_product_flash_attention_for_cpu`), tile by tile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.attention.kernels.base import (
    BandSpec,
    Call,
    Capabilities,
    LibraryKernel,
    TileGradients,
    TileResult,
    strips,
)
from engine.attention.kernels.reference import band_bias

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

    def _calls(self, q: Tensor, k: Tensor, band: BandSpec) -> list[Call]:
        return strips(q.shape[0], k.shape[0], band, STRIP_ROWS)

    def _backward_calls(self, q: Tensor, k: Tensor, band: BandSpec) -> list[Call]:
        """For 16-bit inputs a few blocks of queries each: the op sums dk and dv over blocks in the inputs' dtype, so
        long tiles are summed here (half the error at 2K rows, a third at 8K).
        """
        if not (band.is_full or band.is_causal) or q.dtype in (torch.float32, torch.float64):
            return self._calls(q, k, band)
        return [
            Call(slice(start, stop), keys, kind)
            for start, stop in _query_calls(q.shape[0])
            for keys, kind in _visible_keys(start, stop, band, k.shape[0])
        ]

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        views = [_heads_first(x) for x in (q, k, v)]
        out, lse = _FORWARD(*views, 0.0, band.is_causal, attn_mask=_bias(q, k, band))
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        views = [_heads_first(x) for x in (grads.dout, q, k, v, grads.out)]
        lse = grads.lse.transpose(0, 1)[None]
        results = _BACKWARD(*views, lse, 0.0, band.is_causal, attn_mask=_bias(q, k, band))
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


def _visible_keys(start: int, stop: int, band: BandSpec, num_keys: int) -> list[tuple[slice, BandSpec]]:
    """Keys that query rows [start, stop) of a full or causal tile see: the causal square first, then all before it."""
    if band.is_full:
        return [(slice(0, num_keys), band)]
    square = (slice(start, stop), band)
    return [square, (slice(0, start), BandSpec())] if start else [square]


def _heads_first(x: Tensor) -> Tensor:
    """[rows, heads, D] -> [1, heads, rows, D] as a view."""
    return x.transpose(0, 1)[None]


def _bias(q: Tensor, k: Tensor, band: BandSpec) -> Tensor | None:
    if band.is_full or band.is_causal:
        return None
    return band_bias(q.shape[0], k.shape[0], band, q.dtype, q.device)[None, None]
