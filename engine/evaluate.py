"""Validation loss per token and in bits per byte, over all ranks; leaves no state behind for the next step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.data.sampler import Batch
from engine.loss.options import IGNORE_INDEX
from engine.parallel.fsdp import release_gathered_weights
from engine.parallel.reduce import sum_over_ranks
from engine.train_step import TrainStep, rank_batch, sequence_loss


@dataclass(frozen=True)
class Evaluation:
    """Mean loss per label in nats, the same in bits per byte of text (null when no byte counts are known)."""

    loss: float
    bits_per_byte: float | None
    label_tokens: int


def bits_per_byte(loss_sum_nats: float, text_bytes: float) -> float | None:
    """Bits that the model needs per byte of text: nats / (ln 2 * bytes); comparable between tokenizers."""
    return loss_sum_nats / (math.log(2.0) * text_bytes) if text_bytes > 0 else None


@torch.no_grad()
def evaluate(
    train_step: TrainStep, batches: Iterable[Batch], token_bytes: npt.NDArray[np.integer] | None
) -> Evaluation | None:
    """Figures over `batches` of all ranks, or None when they hold no label; `token_bytes` [vocab] is text bytes per id.

    All ranks must call with as many batches. Parameters, gradients, optimizer and mode of the model are as before.
    """
    model, mesh, attention = train_step.model, train_step.mesh, train_step.attention
    totals = torch.zeros(3, dtype=torch.float64, device=mesh.device)  # nats, labels, bytes
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            local = rank_batch(batch, model, attention, mesh)
            labels = local.rows.labels[local.rows.labels != IGNORE_INDEX]
            totals[0] += sequence_loss(model, local.rows, local.attention)
            totals[1] += labels.numel()
            if token_bytes is not None:
                totals[2] += float(token_bytes[labels.cpu().numpy()].sum())
    finally:
        release_gathered_weights(model)
        model.train(was_training)
    nats, labels_total, text_bytes = sum_over_ranks(totals).tolist()
    if labels_total == 0:
        return None
    return Evaluation(nats / labels_total, bits_per_byte(nats, text_bytes), int(labels_total))
