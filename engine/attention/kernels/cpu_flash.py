"""torch's blocked CPU attention (`aten::_scaled_dot_product_flash_attention_for_cpu`), tile by tile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.attention.kernels.base import BandSpec, Capabilities, TileGradients, TileResult
from engine.attention.kernels.reference import band_bias

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuFlashKernel:
    """Online-softmax CPU kernel; takes the global lse and a surrogate out in backward, grouped heads native."""

    name = "cpu_flash"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        any_band=True,
        max_head_dim=1 << 16,
    )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        """(out, lse) of the tile; the op works on [1, heads, rows, D] views without a copy."""
        out, lse = _FORWARD(
            _heads_first(q), _heads_first(k), _heads_first(v), 0.0, band.is_causal, attn_mask=_bias(q, k, band)
        )
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        """(dq, dk, dv) of the tile; the op forms rowsum(dout * out) itself, so `out` may be a surrogate.

        For 16-bit inputs dk and dv come back in fp32: the op sums them over blocks of queries in the inputs' dtype, so
        long tiles are cut into calls of a few blocks whose results are summed here (half the error at 2K rows, a third
        at 8K).
        """
        if q.dtype in (torch.float32, torch.float64) or not (band.is_full or band.is_causal):
            return _backward(grads, q, k, v, band)
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (k, v))
        for start, stop in _query_calls(q.shape[0]):
            rows = slice(start, stop)
            part = TileGradients(grads.dout[rows], grads.out[rows], grads.lse[rows])
            for keys, kind in _visible_keys(start, stop, band):
                result = _backward(part, q[rows], k[keys], v[keys], kind)
                dk[keys] += result.dk
                dv[keys] += result.dv
                dq[rows] = result.dq if keys.start == (start if band.is_causal else 0) else dq[rows] + result.dq
        return TileResult(dq, dk, dv)


def _query_calls(rows: int) -> Iterator[tuple[int, int]]:
    """Row ranges of at most four of the op's query blocks (256 rows from 768 rows on, 64 below)."""
    start = 0
    while start < rows:
        stop = min(rows, start + (1024 if rows - start >= 768 else 256))
        yield start, stop
        start = stop


def _visible_keys(start: int, stop: int, band: BandSpec) -> list[tuple[slice, BandSpec]]:
    """Keys that query rows [start, stop) of a full or causal tile see: the causal square first, then all before it."""
    if band.is_full:
        return [(slice(0, None), band)]
    square = (slice(start, stop), band)
    return [square, (slice(0, start), BandSpec())] if start else [square]


def _backward(grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
    results = _BACKWARD(
        _heads_first(grads.dout),
        _heads_first(q),
        _heads_first(k),
        _heads_first(v),
        _heads_first(grads.out),
        grads.lse.transpose(0, 1)[None],
        0.0,
        band.is_causal,
        attn_mask=_bias(q, k, band),
    )
    return TileResult(*(grad[0].transpose(0, 1) for grad in results))


def _heads_first(x: Tensor) -> Tensor:
    """[rows, heads, D] -> [1, heads, rows, D] as a view."""
    return x.transpose(0, 1)[None]


def _bias(q: Tensor, k: Tensor, band: BandSpec) -> Tensor | None:
    if band.is_full or band.is_causal:
        return None
    return band_bias(q.shape[0], k.shape[0], band, q.dtype, q.device)[None, None]
