"""The LM head as a module that gives the loss, so that its weight is gathered, used and freed as one FSDP unit."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.config.settings import LossConfig
from engine.loss.fused import ALONE, VocabularyRanks, linear_cross_entropy
from engine.loss.scores import row_scores


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

        `by_row`: instead what `engine.loss.scores.row_scores` gives, [rows, 2] and without a gradient; for a few rows.
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
