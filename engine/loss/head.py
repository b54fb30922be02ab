"""The LM head as a module that gives the loss, so that its weight is gathered, used and freed as one FSDP unit."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.config.settings import LossConfig
from engine.device.row_blocks import accumulate_dtype
from engine.loss.fused import ALONE, VocabularyRanks, linear_cross_entropy, losses_of_logits

_BLOCK_IDS = 8192  # rows of the weight that are widened at once


class LMHead(nn.Module):
    """Projection to the vocabulary and its loss."""

    def __init__(self, hidden_size: int, vocab_size: int, loss: LossConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.ranks: VocabularyRanks = ALONE  # until tensor parallelism slices the weight
        self.options = loss

    def forward(self, hidden: Tensor, labels: Tensor, *, by_row: bool = False) -> Tensor:
        """Loss SUM over the rows whose label is not -100, fp32 scalar; hidden [B, T, d] or [T, d], labels alike.

        Labels are already shifted: row t holds the token that follows it in the sequence. In evaluation mode the
        z-loss is left out: what is reported is the cross entropy.

        `by_row`: instead what `row_scores` gives, [rows, 2] and without a gradient; for a few rows.
        Raises ValueError for labels of another shape.
        """
        if hidden.shape[:-1] != labels.shape:
            raise ValueError(f"the loss got hidden {tuple(hidden.shape)} and labels {tuple(labels.shape)}")
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        if by_row:
            return row_scores(rows, weight, targets, ranks=self.ranks)
        options = self.options if self.training else replace(self.options, z_loss=0.0)
        return linear_cross_entropy(rows, weight, targets, options=options, ranks=self.ranks)


@torch.no_grad()
def row_scores(hidden: Tensor, weight: Tensor, labels: Tensor, *, ranks: VocabularyRanks = ALONE) -> Tensor:
    """[T, 2] fp32: -log softmax(hidden @ weight.T)[label], and 1 where the label has the largest logit, else 0.

    hidden [T, d], weight [V, d], labels [T] int64; of equal logits the smallest id wins. Zeros where the label is -100.
    Logits are fp32 whatever the dtype of the weights: rounded to bf16 the two largest are often equal, and which of
    them wins would be chance. Those of all rows exist. `ranks`: as in `linear_cross_entropy`.
    """
    rows, targets = ranks.gather(hidden), ranks.gather(labels)
    rows = rows.to(accumulate_dtype(rows.dtype))
    logits = torch.cat([rows @ block.to(rows.dtype).t() for block in torch.split(weight, _BLOCK_IDS)], dim=1)
    losses = losses_of_logits(logits, targets, LossConfig(), overwrite=False, ranks=ranks)
    own = torch.stack([part.to(rows.dtype) for part in logits.max(dim=-1)])
    own[1] += ranks.rank * weight.shape[0]
    largest, best = ranks.gather(own).view(ranks.count, *own.shape).unbind(1)
    first = largest.max(dim=0, keepdim=True).indices  # of the ranks that have the largest logit
    is_best = best.gather(0, first)[0] == targets
    return torch.stack([losses, is_best.to(losses.dtype)], dim=1)[ranks.rank * len(hidden) :][: len(hidden)]
