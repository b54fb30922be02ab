"""torch's blocked CPU attention (`aten::_scaled_dot_product_flash_attention_for_cpu`), tile by tile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.attention.kernels.base import BandSpec, Capabilities, TileGradients, TileResult
from engine.attention.kernels.reference import band_bias
from engine.planning.sequence.mask import Band, row_strips
from engine.row_blocks import ends

STRIP_ROWS = 512
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuFlashKernel:
    """Online-softmax CPU kernel; takes the global lse and a surrogate out in backward, grouped heads native."""

    name = "cpu_flash"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        max_head_dim=1 << 16,
    )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        """(out, lse) of the tile; the op works on [1, heads, rows, D] views without a copy."""
        if band.is_full or band.is_causal:
            return _forward(q, k, v, band)
        parts = [_forward(q[rows], k[keys], v[keys], part) for rows, keys, part in _strips(q, k, band)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        """(dq, dk, dv) of the tile; the op forms rowsum(dout * out) itself, so `out` may be a surrogate.

        For 16-bit inputs dk and dv of long tiles come back in fp32: the op sums them over blocks of queries in the
        inputs' dtype, so such tiles are cut into calls of a few blocks whose results are summed here (half the error
        at 2K rows, a third at 8K).
        """
        wide = q.dtype in (torch.float32, torch.float64)
        if wide and (band.is_full or band.is_causal):
            return _backward(grads, q, k, v, band)
        calls = list(_calls(q, k, band))
        if len(calls) == 1:
            return _backward(grads, q, k, v, calls[0][2])
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=x.dtype if wide else torch.float32) for x in (k, v))
        written = 0  # rows of dq that hold something
        # The one before the last ends where it does: of one result the next call still finds the memory taken.
        for rows, keys, kind in (*ends(calls[:-1]), calls[-1]):
            part = TileGradients(grads.dout[rows], grads.out[rows], grads.lse[rows])
            result = _backward(part, q[rows], k[keys], v[keys], kind)
            dk[keys] += result.dk
            dv[keys] += result.dv
            dq[rows] = result.dq if rows.start >= written else dq[rows] + result.dq
            written = rows.stop
        return TileResult(dq, dk, dv)


Call = tuple[slice, slice, BandSpec]  # query rows, keys, what they see of each other


def _calls(q: Tensor, k: Tensor, band: BandSpec) -> Iterator[Call]:
    """The calls of a backward tile, those of the same rows after each other."""
    if not (band.is_full or band.is_causal):
        yield from _strips(q, k, band)
        return
    for start, stop in _query_calls(q.shape[0]):
        for keys, kind in _visible_keys(start, stop, band, k.shape[0]):
            yield slice(start, stop), keys, kind


def _strips(q: Tensor, k: Tensor, band: BandSpec) -> list[Call]:
    """A general band in strips of queries with the keys that these see: its bias stays small, and hidden keys free."""
    strips = row_strips(Band(0, q.shape[0], 0, k.shape[0], band.low, band.high), STRIP_ROWS)
    return [(slice(s.q_start, s.q_stop), slice(s.k_start, s.k_stop), BandSpec(s.low, s.high)) for s in strips]


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


def _forward(q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
    out, lse = _FORWARD(
        _heads_first(q), _heads_first(k), _heads_first(v), 0.0, band.is_causal, attn_mask=_bias(q, k, band)
    )
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


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
