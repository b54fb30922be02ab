"""The LM head as a module that returns the loss, so that FSDP gathers, uses and frees its weight as one unit."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.config.settings import LossConfig
from engine.device.row_blocks import accumulate_dtype
from engine.loss.fused import ALONE, VocabularyRanks, linear_cross_entropy, losses_of_logits

_BLOCK_IDS = 8192  # rows of the weight that are cast to fp32 together


class LMHead(nn.Module):
    """Projection to the vocabulary and its loss."""

    def __init__(self, hidden_size: int, vocab_size: int, loss: LossConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.ranks: VocabularyRanks = ALONE  # until tensor parallelism slices the weight
        self.options = loss

    def forward(self, hidden: Tensor, labels: Tensor, *, by_row: bool = False) -> Tensor:
        """Return the loss summed (not averaged) over the rows whose label is not -100, an fp32 scalar.

        In evaluation mode the z-loss is left out, so that the reported loss is the cross entropy.

        Args:
            hidden: [B, T, d] or [T, d].
            labels: [B, T] or [T] int64, already shifted: row t holds the token that follows it in the sequence.
            by_row: Return `row_scores`, [rows, 2] without a gradient, instead; for a few rows.

        Raises:
            ValueError: `labels` does not have the shape of `hidden` without its last dimension.
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
    """Return cross entropy and correctness of every row, [T, 2] fp32; the second is 1 where the label is the argmax.

    Logits are computed in fp32 whatever the dtype of the weights: rounded to bf16, the two largest are often equal and
    the argmax would be arbitrary. The logits of all rows are materialized, [T, V].

    Args:
        hidden: [T, d].
        weight: [V, d], or this rank's slice, [V / t, d].
        labels: [T] int64; both results are 0 for rows with -100. Of equal logits the smallest id wins.
        ranks: As in `linear_cross_entropy`; collective over them.
    """
    rows, targets = ranks.gather(hidden), ranks.gather(labels)
    rows = rows.to(accumulate_dtype(rows.dtype))
    logits = torch.cat([rows @ block.to(rows.dtype).t() for block in torch.split(weight, _BLOCK_IDS)], dim=1)
    losses = losses_of_logits(logits, targets, LossConfig(), overwrite=False, ranks=ranks)
    local = torch.stack([part.to(rows.dtype) for part in logits.max(dim=-1)])  # [2, t * T]: largest logit, its id
    local[1] += ranks.rank * weight.shape[0]  # local column -> global id
    largest, best = ranks.gather(local).view(ranks.count, *local.shape).unbind(1)
    first = largest.max(dim=0, keepdim=True).indices  # the first of the ranks that have the largest logit
    is_best = best.gather(0, first)[0] == targets
    return torch.stack([losses, is_best.to(losses.dtype)], dim=1)[ranks.rank * len(hidden) :][: len(hidden)]
