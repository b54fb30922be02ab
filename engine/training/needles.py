"""Needle tasks asked of a model over all ranks: teacher-forced, with the logits of the answers' rows alone.

Accuracy: the answer is right if each of its tokens has the largest logit after the right ones before it, which is so
exactly when greedy decoding writes it. Small models write none; for them there is the gain: how many nats per token of
the answer the needle saves, against the same question where there is none. Above 0 the model uses what it read there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.data.needles import NeedleTask, NeedleTasks
from engine.data.sampler import IGNORE_INDEX, Batch
from engine.parallel.collectives import sum_over_ranks
from engine.parallel.fsdp import evaluating
from engine.training.train_step import TrainStep, rank_batch

Table = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DepthFigures:
    """Means over the samples of one depth.

    depth: share of the haystack before the needle, 0 to 1; position: token at which the first sample's needle begins.
    accuracy: share of answers that are right; loss: nats per token of the answer; gain: loss without the needle minus
    loss with it.
    """

    depth: float
    position: int
    accuracy: float
    loss: float
    gain: float


@dataclass(frozen=True)
class NeedleFigures:
    """Means over all depths, and those of each; samples: texts per depth."""

    accuracy: float
    gain: float
    samples: int
    by_depth: tuple[DepthFigures, ...]


class Tasks(Protocol):
    """What is asked: `NeedleTasks`, or others of the same form."""

    def __len__(self) -> int: ...

    def task(self, number: int) -> NeedleTask:
        """Task `number` of len(self)."""


def evaluate_needles(train_step: TrainStep, tasks: NeedleTasks) -> NeedleFigures:
    """What the model of `train_step` makes of `tasks`; alike on all ranks, all of which must call."""
    return needle_figures(score_tasks(train_step, tasks), tasks)


@torch.no_grad()
def score_tasks(train_step: TrainStep, tasks: Tasks) -> Table:
    """[len(tasks), 3]: sums over the labels of each task of nats, wrong tokens and tokens; alike on all ranks.

    The data-parallel ranks divide the tasks; all ranks must call. Parameters, gradients, optimizer and mode of the
    model are as before.
    """
    mesh, size = train_step.mesh, train_step.config.train.micro_batch_size
    table = torch.zeros(len(tasks), 3, dtype=torch.float64, device=mesh.device)
    with evaluating(train_step.model):
        for first in range(mesh.dp_rank * size, _rounded_up(len(tasks), mesh.dp_size * size), mesh.dp_size * size):
            train_step.status.advance()
            numbers = range(first, min(first + size, len(tasks)))
            rows, scores = _scored(train_step, [tasks.task(number) for number in numbers], size)
            table.index_add_(0, rows + first, scores)
    return sum_over_ranks(table).cpu().numpy()


def needle_figures(table: Table, tasks: NeedleTasks) -> NeedleFigures:
    """The figures of a `table` that `score_tasks` gave."""
    by_sample = table.reshape(tasks.samples, tasks.depths + 1, 3)
    losses = by_sample[:, :, 0] / by_sample[:, :, 2]
    right = by_sample[:, :-1, 1] == 0
    gains = losses[:, -1:] - losses[:, :-1]
    by_depth = tuple(
        DepthFigures(
            tasks.share(depth),
            tasks.position(0, depth),
            float(right[:, depth].mean()),
            float(losses[:, depth].mean()),
            float(gains[:, depth].mean()),
        )
        for depth in range(tasks.depths)
    )
    return NeedleFigures(float(right.mean()), float(gains.mean()), tasks.samples, by_depth)


def _scored(train_step: TrainStep, tasks: Sequence[NeedleTask], size: int) -> tuple[Tensor, Tensor]:
    """(which of `tasks` each of this rank's answer rows belongs to [n], their nats, wrong tokens and tokens [n, 3]).

    A batch of `size` rows is run in any case: every rank gathers weights as often as the others.
    """
    model, mesh = train_step.model, train_step.mesh
    batch = _batch(tasks, size, train_step.config.train.seq_len)
    local = rank_batch(batch, model, train_step.attention, mesh)
    hidden = model(local.rows.tokens, local.rows.positions, local.attention)
    row, place = (local.rows.labels != IGNORE_INDEX).nonzero(as_tuple=True)
    # As many rows on every rank as the whole batch has answers: those that slice the vocabulary score each other's.
    bound = max(1, int((batch.labels != IGNORE_INDEX).sum()))
    rows = hidden.new_zeros(bound, hidden.shape[-1])
    labels = local.rows.labels.new_full((bound,), IGNORE_INDEX)
    rows[: row.numel()], labels[: row.numel()] = hidden[row, place], local.rows.labels[row, place]
    scores = model.head(rows, labels, by_row=True)[: row.numel()].double()
    return row, torch.stack([scores[:, 0], 1.0 - scores[:, 1], torch.ones_like(scores[:, 0])], dim=1)


def _batch(tasks: Sequence[NeedleTask], size: int, seq_len: int) -> Batch:
    """`tasks` as the first rows of a batch, each a document of its own; the others are empty."""
    tokens = np.zeros((size, seq_len), dtype=np.int64)
    labels = np.full((size, seq_len), IGNORE_INDEX, dtype=np.int64)
    for row, task in enumerate(tasks):
        tokens[row], labels[row] = task.tokens, task.labels
    return Batch(tokens, labels, (np.zeros(1, dtype=np.int64),) * size)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
