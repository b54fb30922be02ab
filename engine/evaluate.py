"""Validation loss per token and in bits per byte, over all ranks; leaves no state behind for the next step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from engine.data.sampler import Batch
from engine.loss.options import IGNORE_INDEX
from engine.parallel.fsdp import release_gathered_weights
from engine.parallel.reduce import sum_over_ranks
from engine.train_step import TrainStep, rank_batch


@dataclass(frozen=True)
class PositionLoss:
    """Mean loss in nats of the labels at positions first .. last of their sequences; None: none of them counts."""

    first: int
    last: int
    loss: float | None


@dataclass(frozen=True)
class Evaluation:
    """Mean loss per label in nats, the same in bits per byte of text (null when no byte counts are known)."""

    loss: float
    bits_per_byte: float | None
    label_tokens: int
    by_position: tuple[PositionLoss, ...] = ()


def bits_per_byte(loss_sum_nats: float, text_bytes: float) -> float | None:
    """Bits that the model needs per byte of text: nats / (ln 2 * bytes); comparable between tokenizers."""
    return loss_sum_nats / (math.log(2.0) * text_bytes) if text_bytes > 0 else None


def position_edges(seq_len: int, buckets: int) -> tuple[int, ...]:
    """Where buckets of positions begin, and seq_len: the last one is half of the sequence, each before it half as long.

    Fewer than `buckets` where a sequence has no room for them.
    """
    edges = {seq_len >> bucket for bucket in range(buckets)} - {0}
    return (0, *sorted(edges))


@torch.no_grad()
def evaluate(
    train_step: TrainStep,
    batches: Iterable[Batch],
    token_bytes: npt.NDArray[np.integer] | None,
    position_buckets: int = 1,
) -> Evaluation | None:
    """Figures over `batches` of all ranks, or None when they hold no label; `token_bytes` [vocab] is text bytes per id.

    With more than one of `position_buckets`, the loss by position, too, at the price of one LM head per bucket: a
    model that uses its context loses less the more of it it has seen. All ranks must call with as many batches.
    Parameters, gradients, optimizer and mode of the model are as before.
    """
    model, mesh = train_step.model, train_step.mesh
    edges = position_edges(train_step.config.train.seq_len, position_buckets)
    buckets = len(edges) - 1
    totals = torch.zeros(2 * buckets + 1, dtype=torch.float64, device=mesh.device)  # nats, labels of each; bytes
    with evaluating(model):
        for batch in batches:
            train_step.status.advance()
            losses, labels = _losses(train_step, batch, edges)
            totals[:buckets] += losses
            for bucket, own in enumerate(labels):
                totals[buckets + bucket] += own.numel()
                if token_bytes is not None:
                    totals[-1] += float(token_bytes[own.cpu().numpy()].sum())
    figures = sum_over_ranks(totals).tolist()
    nats, counts, text_bytes = figures[:buckets], figures[buckets:-1], figures[-1]
    if sum(counts) == 0:
        return None
    by_position = tuple(
        PositionLoss(first, after - 1, loss / count if count else None)
        for first, after, loss, count in zip(edges, edges[1:], nats, counts, strict=False)
    )
    return Evaluation(
        sum(nats) / sum(counts),
        bits_per_byte(sum(nats), text_bytes),
        int(sum(counts)),
        by_position if buckets > 1 else (),
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Around forward passes without a backward: evaluation mode, and no gathered weights afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        release_gathered_weights(model)
        model.train(was_training)


def _losses(train_step: TrainStep, batch: Batch, edges: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """(loss sums [buckets] of this rank's rows, labels of each that count)."""
    model, mesh, attention = train_step.model, train_step.mesh, train_step.attention
    local = rank_batch(batch, model, attention, mesh)
    hidden = model(local.rows.tokens, local.rows.positions, local.attention)
    losses, labels = [], []
    for first, after in pairwise(edges):
        rows = local.rows if len(edges) == 2 else rank_batch(_only(batch, first, after), model, attention, mesh).rows
        losses.append(model.head(hidden, rows.labels).double())
        labels.append(rows.labels[rows.labels != IGNORE_INDEX])
    return torch.stack(losses), labels


def _only(batch: Batch, first: int, after: int) -> Batch:
    """`batch` with labels at positions first .. after - 1 alone."""
    labels = np.full_like(batch.labels, IGNORE_INDEX)
    labels[:, first:after] = batch.labels[:, first:after]
    return replace(batch, labels=labels)
