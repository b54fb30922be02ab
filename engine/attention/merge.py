"""Merging the partial result of a tile into running accumulators, and the surrogate of `out` for backward."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_PER_PASS = 1024  # bounds the fp32 temporary and keeps it in cache on CPU


def merge_tile(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a tile into (out, lse) in place: the softmax over both sets of keys.

    out [n, H, D] and lse [n, H] are accumulators (fp32 or float64; lse = -inf where nothing was merged yet); block_out
    may be narrower. out += sigmoid(block_lse - lse) * (block_out - out); lse = logaddexp(lse, block_lse).
    Tiles have no empty rows, so block_lse is finite.
    """
    for start in range(0, out.shape[0], ROWS_PER_PASS):
        rows = slice(start, start + ROWS_PER_PASS)
        weight = torch.sigmoid(block_lse[rows] - lse[rows]).unsqueeze(-1)
        out[rows].lerp_(block_out[rows].to(out.dtype), weight)
        torch.logaddexp(lse[rows], block_lse[rows], out=lse[rows])


def backward_stats(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """[n, H, 2]: (lse, scale) with scale = rowsum(dout * out) / rowsum(dout * dout), 0 where dout is 0.

    `dout * scale` has the same rowsum with dout as `out` itself, so it stands in for `out` in a library kernel's
    backward and `out` need not travel.
    """
    stats = torch.empty(*lse.shape, 2, dtype=lse.dtype, device=lse.device)
    stats[..., 0] = lse
    for start in range(0, dout.shape[0], ROWS_PER_PASS):
        rows = slice(start, start + ROWS_PER_PASS)
        wide = dout[rows].to(lse.dtype)
        norm = (wide * wide).sum(-1)
        delta = (wide * out[rows].to(lse.dtype)).sum(-1)
        stats[rows, :, 1] = torch.where(norm > 0, delta / norm.clamp_min(torch.finfo(lse.dtype).tiny), 0.0)
    return stats


def surrogate_out(dout: Tensor, stats: Tensor) -> Tensor:
    """[n, H, D] in dout's dtype: dout * scale, the stand-in for `out` (see `backward_stats`)."""
    return (dout * stats[..., 1:]).to(dout.dtype)
