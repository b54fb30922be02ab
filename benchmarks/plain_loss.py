"""The loss with all logits at once: what the fused one is tested against and measured beside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config.settings import LossConfig
from engine.data.sampler import IGNORE_INDEX
from engine.device.row_blocks import accumulate_dtype


def cross_entropy_plain(hidden: Tensor, weight: Tensor, labels: Tensor, *, options: LossConfig) -> Tensor:
    """Sum over counted rows of -log softmax(hidden @ weight.T)[label] + z_loss * lse**2; fp32 scalar.

    hidden [T, d], weight [V, d], labels [T] int64. Holds several fp32 (float64 for float64) tensors of T * V elements.
    """
    logits = F.linear(hidden, weight.to(hidden.dtype)).to(accumulate_dtype(hidden.dtype))
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    if options.z_loss:
        squares = torch.logsumexp(logits, dim=-1).square()
        loss = loss + options.z_loss * squares.masked_fill(labels == IGNORE_INDEX, 0.0).sum()
    return loss
