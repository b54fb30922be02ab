"""Triton cross entropy of a chunk of logits, one program per row: a read for statistics, a read and write for dlogits.

The vocabulary may be a slice, `first` .. `first + V`, of one that ranks share: then statistics are exchanged between
the two halves. Maxima and sums are formed block by block in fp32 (float64 for float64): with m' = max(m, block),
s' = s exp(m - m') + sum(exp(block - m')).
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from engine.data.sampler import IGNORE_INDEX
from engine.device.row_blocks import accumulate_dtype
from engine.kernels.launch import kernel, launch
from engine.kernels.tiles import block_width


def statistics(logits: Tensor, labels: Tensor, first: int) -> Tensor:
    """Return maximum, sum of exp(logit - maximum), and logit of the label (-inf if it is not local), [3, C] fp32."""
    stats = torch.empty(3, logits.shape[0], dtype=accumulate_dtype(logits.dtype), device=logits.device)
    _launch(statistics_kernel, logits, labels, stats, first)
    return stats


def overwrite_with_gradient(logits: Tensor, labels: Tensor, lse: Tensor, first: int, z_loss: float) -> None:
    """Replace logits [C, V] by the gradient of the summed loss; lse [C] is over the whole vocabulary."""
    _launch(gradient_kernel, logits, labels, lse.contiguous(), first, z_loss=z_loss)


def _launch(function: Any, logits: Tensor, labels: Tensor, *others: Any, **constants: Any) -> None:
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    width = block_width(vocab)
    sizes = {"vocab": vocab, "width": width, "blocks": -(-vocab // width)}
    # Half as many threads as rows in registers have: more rows at once hide the waits of each other.
    arguments = (logits, labels.contiguous(), *others, logits.stride(0))
    launch(function, rows, *arguments, cells=width // 2, ignore_index=IGNORE_INDEX, **sizes, **constants)


@kernel
def statistics_kernel(
    logits: tl.tensor, labels: tl.tensor, stats: tl.tensor, first: tl.tensor, logits_row: tl.tensor,
    vocab: tl.constexpr, width: tl.constexpr, blocks: tl.constexpr, ignore_index: tl.constexpr,
) -> None:  # fmt: skip
    wide: tl.constexpr = stats.dtype.element_ty
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = logits + row * logits_row
    label = tl.load(labels + row)
    index = label - first
    is_here = (label != ignore_index) & (index >= 0) & (index < vocab)
    picked = tl.load(at + tl.where(is_here, index, 0)).to(wide)
    top = tl.full([], float("-inf"), wide)
    total = tl.full([], 0.0, wide)
    for block in range(blocks):
        column = block * width + tl.arange(0, width)
        value = tl.load(at + column, mask=column < vocab, other=float("-inf")).to(wide)
        higher = tl.maximum(top, tl.max(value, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a block of nothing but -inf adds nothing
        total = total * tl.exp(top - base) + tl.sum(tl.exp(value - base), 0)
        top = higher
    tl.store(stats + row, top)
    tl.store(stats + rows + row, total)
    tl.store(stats + 2 * rows + row, tl.where(is_here, picked, float("-inf")))


@kernel
def gradient_kernel(
    logits: tl.tensor, labels: tl.tensor, lse: tl.tensor, first: tl.tensor, logits_row: tl.tensor,
    vocab: tl.constexpr, width: tl.constexpr, blocks: tl.constexpr, z_loss: tl.constexpr, ignore_index: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    counts = label != ignore_index
    index = tl.where(counts, label - first, -1)
    at = logits + row * logits_row
    of_row = tl.load(lse + row)
    factor = 1.0 + 2.0 * z_loss * of_row  # d/dlogits of lse is the softmax, of z * lse**2 it is 2 z lse * softmax
    for block in range(blocks):
        column = block * width + tl.arange(0, width)
        value = tl.load(at + column, mask=column < vocab, other=0.0)
        gradient = tl.exp(value.to(of_row.dtype) - of_row) * factor - tl.where(column == index, 1.0, 0.0)
        gradient = tl.where(counts, gradient, 0.0)
        tl.store(at + column, gradient.to(value.dtype), mask=column < vocab)
