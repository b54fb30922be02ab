"""What a model thinks of a few labels: the loss of each, and whether greedy decoding would write it. Evaluation only.

Logits are fp32 whatever the dtype of the weights, a block of the vocabulary at a time: rounded to bf16 the two largest
are often equal, and which of them wins would be chance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.data.sampler import IGNORE_INDEX
from engine.loss.fused import ALONE, VocabularyRanks
from engine.row_blocks import accumulate_dtype

_BLOCK_IDS = 8192  # rows of the weight that are widened at once


def row_scores(hidden: Tensor, weight: Tensor, labels: Tensor, *, ranks: VocabularyRanks = ALONE) -> Tensor:
    """[T, 2] fp32: -log softmax(hidden @ weight.T)[label], and 1 where the label has the largest logit, else 0.

    hidden [T, d], weight [V, d], labels [T] int64; of equal logits the smallest id wins. Zeros where the label is -100.
    `ranks`: as in `linear_cross_entropy`.
    """
    rows, targets, own = ranks.gather(hidden), ranks.gather(labels), hidden.shape[0]
    part = slice_scores(rows, weight, targets, first_id=ranks.rank * weight.shape[0])
    return join_scores(ranks.gather(part.unsqueeze(0)), targets)[ranks.rank * own :][:own]


def slice_scores(hidden: Tensor, weight: Tensor, labels: Tensor, *, first_id: int) -> Tensor:
    """[4, T] of the ids first_id .. first_id + V' - 1: largest logit, its id, sum of exp(logit - largest), logit of
    the label (0 where it is no such id). hidden [T, d], weight [V', d].
    """
    rows, wide = hidden.shape[0], accumulate_dtype(hidden.dtype)
    values = hidden.to(wide)
    largest = torch.full((rows,), float("-inf"), dtype=wide, device=hidden.device)
    best, total, picked = (torch.zeros(rows, dtype=wide, device=hidden.device) for _ in range(3))
    for start in range(0, weight.shape[0], _BLOCK_IDS):
        block = weight[start : start + _BLOCK_IDS].to(wide)
        logits = values @ block.t()
        top, index = logits.max(dim=-1)
        best = torch.where(top > largest, index.to(wide) + (first_id + start), best)
        new = torch.maximum(top, largest)
        total = total * (largest - new).exp() + (logits - new.unsqueeze(1)).exp().sum(dim=-1)
        largest = new
        own = labels - (first_id + start)
        is_here = (own >= 0) & (own < block.shape[0])
        found = logits.gather(1, own.masked_fill(~is_here, 0).unsqueeze(1)).squeeze(1)
        picked = torch.where(is_here, found, picked)
    return torch.stack([largest, best, total, picked])


def join_scores(slices: Tensor, labels: Tensor) -> Tensor:
    """[T, 2], as `row_scores`, from `slice_scores` [t, 4, T] of t slices of the vocabulary in ascending order."""
    largest, best, total, picked = slices.unbind(1)
    top, owner = largest.max(dim=0)
    lse = top + (total * (largest - top).exp()).sum(dim=0).log()
    is_best = best.gather(0, owner.unsqueeze(0)).squeeze(0) == labels
    scores = torch.stack([lse - picked.sum(dim=0), is_best.to(lse.dtype)], dim=1)
    return scores.masked_fill((labels == IGNORE_INDEX).unsqueeze(1), 0.0)
