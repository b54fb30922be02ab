"""What a validation measures, as figures for a row of metrics: loss on the validation split, needles, both by place.

Weighted by tokens over all ranks, and without a trace in the training that goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.data import PreparedData, sequential_batches
from engine.data.needles import NeedleTasks
from engine.data.sampler import IGNORE_INDEX, Batch
from engine.parallel.collectives import max_over_ranks, sum_over_ranks
from engine.parallel.fsdp import evaluating
from engine.parallel.mesh import Mesh
from engine.training.metrics import PeakMemory
from engine.training.needles import evaluate_needles
from engine.training.train_step import TrainStep, rank_batch


def validate(train_step: TrainStep, data: PreparedData, needles: NeedleTasks | None) -> dict[str, Any]:
    """{validation_loss, ...} and, with `needles`, {needle_accuracy, ...}; what could not be measured is left out.

    All ranks must call; the model is afterwards as before.
    """
    return _losses(train_step, data) | ({} if needles is None else _needles(train_step, needles))


def measured(mesh: Mesh, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` gives, with the seconds that the slowest rank took for it and the peak memory of the largest one."""
    memory = PeakMemory(mesh.device)
    memory.reset()
    started = time.perf_counter()
    row = work()
    own = [time.perf_counter() - started, *memory.read()]
    seconds, allocated, reserved = max_over_ranks(own, mesh.device)
    return {
        **row,
        "evaluation_s": seconds,
        "peak_memory_bytes": None if allocated is None else int(allocated),
        "peak_memory_reserved_bytes": None if reserved is None else int(reserved),
    }


def _losses(train_step: TrainStep, data: PreparedData) -> dict[str, Any]:
    train, mesh = train_step.config.train, train_step.mesh
    batches = sequential_batches(
        data.validation,
        train.seq_len,
        batch_size=train.micro_batch_size,
        dp=(mesh.dp_rank, mesh.dp_size),
        max_samples=train.eval_samples,
        documents_apart=train_step.config.attention.documents,
    )
    figures = evaluate(train_step, batches, data.token_bytes, train.eval_position_buckets)
    if figures is None:
        return {}
    row = {"validation_loss": figures.loss, "validation_bits_per_byte": figures.bits_per_byte}
    if not figures.by_position:
        return row
    return row | {"validation_loss_by_position": [asdict(bucket) for bucket in figures.by_position]}


def _needles(train_step: TrainStep, needles: NeedleTasks) -> dict[str, Any]:
    figures = evaluate_needles(train_step, needles)
    return {
        "needle_accuracy": figures.accuracy,
        "needle_gain": figures.gain,
        "needle_by_depth": [asdict(depth) for depth in figures.by_depth],
    }


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
            losses, labels = _losses_of(train_step, batch, edges)
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


def _losses_of(train_step: TrainStep, batch: Batch, edges: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
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
