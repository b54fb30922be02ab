"""Merging partial results, finishing them, and the surrogate of `out` for backward.

On a GPU each is one pass of a Triton kernel (`engine.kernels.merge`; torch's CUDA builds bring Triton along, and
torch.compile would need it as well). On a CPU torch ops work on a few rows at a time: a compiled pass takes half
their time, but they are less than a hundredth of a tile's kernel and compiling costs seconds per process.
dk and dv go to their sums in one pass, with what arrived of them; for dq `add_` of a narrower tensor is one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.device.row_blocks import is_fake_accelerator, spans
from engine.kernels.dispatch import uses_triton

ROWS_PER_PASS = 1024  # bounds the fp32 temporary and keeps it in cache on CPU


def merge_tile(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a tile into (out, lse) in place: the softmax over both sets of keys.

    out [n, H, D] and lse [n, H] are accumulators (fp32 or float64; lse = -inf where nothing was merged yet); block_out
    may be narrower. out += sigmoid(block_lse - lse) * (block_out - out); lse = logaddexp(lse, block_lse).
    A row of the tile without keys has block_lse -inf and changes nothing; its block_out is finite.
    """
    if uses_triton(out):
        from engine.kernels import merge as kernels

        kernels.merge_tile(out, lse, block_out, block_lse)
        return
    if is_fake_accelerator():  # a rehearsal of that kernel, which allocates nothing
        return
    if out.shape[0] <= ROWS_PER_PASS:
        _merge_rows(out, lse, block_out, block_lse)
        return
    for rows in spans(out.shape[0], ROWS_PER_PASS):
        _merge_rows(out[rows], lse[rows], block_out[rows], block_lse[rows])


def _merge_rows(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    weight = torch.sigmoid(block_lse - lse).masked_fill_(block_lse == -torch.inf, 0.0)
    out.lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)


def finish(out: Tensor, lse: Tensor, partial_out: Tensor, partial_lse: Tensor, sinks: Tensor | None = None) -> None:
    """Write (out, lse) of rows whose keys are all merged: the only place where a partial result becomes one.

    A learnable sink is a logit per query head, one more term of the softmax's denominator without a value (GPT-OSS):
    lse' = logaddexp(lse, sink) and out' = out * sigmoid(lse - sink). It has nothing to do with `Mask.sink`, the first
    tokens that every window sees. Backward plans need no change if out' and lse' are saved: p = exp(scores - lse') and
    rowsum(dout * out') are those of the softmax with the sink; the sink's own gradient is in `engine.attention.sinks`.
    Rows that see no key have out' = 0, and a sink of -inf is none.

    Args:
        out: [n, H, D], written in its dtype; may be `partial_out` itself.
        lse: [n, H], written; may be `partial_lse` itself.
        partial_out: [n, H, D] fp32 or float64; holds nothing of use afterwards.
        partial_lse: [n, H], -inf where a row sees no key.
        sinks: [H] in the dtype of `lse`; None: there are none.
    """
    if sinks is not None:
        # Both may be -inf, in a row without keys: the difference is then NaN.
        weight = torch.sigmoid(partial_lse - sinks).masked_fill_(partial_lse == -torch.inf, 0.0)
        partial_out.mul_(weight.unsqueeze(-1))
        partial_lse = torch.logaddexp(partial_lse, sinks)
    out.copy_(partial_out)
    lse.copy_(partial_lse)


def add_kv(
    sums: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    arrived: Mapping[str, Tensor] | None = None,
    *,
    stores: bool = False,
) -> None:
    """Add the dk and dv of a tile to their sums, and those that `arrived` for the same rows.

    Args:
        sums: dk [n, K, qk_dim] and dv [n, K, v_dim], fp32 or float64.
        gradients: of the same shapes, perhaps narrower dtypes.
        arrived: likewise; None: nothing did.
        stores: sums hold nothing yet, and become gradients + arrived.
    """
    total, found = [sums["dk"], sums["dv"]], [gradients["dk"], gradients["dv"]]
    others = None if arrived is None else [arrived["dk"], arrived["dv"]]
    if uses_triton(total[0]):
        from engine.kernels import merge as kernels

        kernels.add_kv(total, found, others, stores=stores)
        return
    if stores:
        torch._foreach_copy_(total, found)
    else:
        torch._foreach_add_(total, found)
    if others is not None:
        torch._foreach_add_(total, others)


def backward_stats(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """[n, H, 2]: (lse, scale) with scale = rowsum(dout * out) / rowsum(dout * dout), 0 where dout is 0.

    `dout * scale` has the same rowsum with dout as `out` itself, so it stands in for `out` in a library kernel's
    backward and `out` need not travel.
    """
    if uses_triton(dout):
        from engine.kernels import merge as kernels

        return kernels.backward_stats(dout, out, lse)
    stats = torch.empty(*lse.shape, 2, dtype=lse.dtype, device=lse.device)
    if is_fake_accelerator():
        return stats
    stats[..., 0] = lse
    for rows in spans(dout.shape[0], ROWS_PER_PASS):
        wide = dout[rows].to(lse.dtype)
        norm = (wide * wide).sum(-1)
        delta = (wide * out[rows].to(lse.dtype)).sum(-1)
        stats[rows, :, 1] = torch.where(norm > 0, delta / norm.clamp_min(torch.finfo(lse.dtype).tiny), 0.0)
    return stats


def surrogate_out(dout: Tensor, stats: Tensor) -> Tensor:
    """[n, H, D] in dout's dtype: dout * scale, the stand-in for `out` (see `backward_stats`)."""
    if uses_triton(dout):
        from engine.kernels import merge as kernels

        return kernels.surrogate_out(dout, stats)
    if is_fake_accelerator():
        return torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    if dout.dtype == stats.dtype:
        return dout * stats[..., 1:]
    result = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    for rows in spans(dout.shape[0], ROWS_PER_PASS):
        result[rows] = dout[rows] * stats[rows, :, 1:]
    return result
