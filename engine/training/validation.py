"""Validation: loss on the validation split and needle-in-a-haystack scores, both by position, as a row of metrics.

Means are over the tokens of all ranks. Training continues as if no validation had happened.

Needles are scored teacher-forced, from the logits of the answers' rows alone. Accuracy: an answer is correct if each of
its tokens is the argmax given the correct tokens before it, which is equivalent to greedy decoding. Small models decode
no correct answer; for them there is the gain, the nats per answer token that the needle saves compared to the same
question without a needle. Above 0 the model uses the needle.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.data.needles import NeedleTask, NeedleTasks
from engine.data.prepare import PreparedData
from engine.data.sampler import IGNORE_INDEX, Batch
from engine.data.view import validation_batches
from engine.distributed.collectives import max_over_ranks, sum_over_ranks
from engine.distributed.mesh import Mesh
from engine.parallel.fsdp import evaluating
from engine.training.metrics import PeakMemory
from engine.training.train_step import TrainStep

Table = npt.NDArray[np.float64]
Row = dict[str, Any]  # of metrics.jsonl


def validate(train_step: TrainStep, data: PreparedData, needles: NeedleTasks | None) -> Row:
    """Return {validation_loss, ...} and, with `needles`, {needle_accuracy, ...}. Collective over all ranks.

    The model's state is restored. Raises `Stopped` if a rank was asked to stop.
    """
    config, mesh = train_step.config, train_step.mesh
    batches = validation_batches(data, config, (mesh.dp_rank, mesh.dp_size))
    token_bytes = None if data.token_bytes is None else data.token_bytes * data.validation.byte_ratio
    losses = evaluate(train_step, batches, token_bytes, config.train.eval_position_buckets)
    return losses if needles is None else losses | needle_figures(score_tasks(train_step, needles), needles)


class Stopped(KeyboardInterrupt):
    """A validation was interrupted between two samples, on all ranks, because one was asked to stop."""


def pause(train_step: TrainStep) -> None:
    """Raise `Stopped` on all ranks if any was asked to stop. Collective over all ranks."""
    train_step.status.advance()
    if any(max_over_ranks([train_step.status.stop.requested], train_step.mesh.device)):
        raise Stopped


def measured(mesh: Mesh, work: Callable[[], Row]) -> Row:
    """Return the row of `work` with its duration and peak memory, each the maximum over ranks. Collective."""
    memory = PeakMemory(mesh.device)
    memory.reset()
    started = time.perf_counter()
    row = work()
    local = {"evaluation_s": time.perf_counter() - started, **memory.read()}
    names = ("evaluation_s", "peak_memory_bytes", "peak_memory_reserved_bytes")
    seconds, *peaks = max_over_ranks([local[name] for name in names], mesh.device)
    return {**row, **dict(zip(names, (seconds, *(peak and int(peak) for peak in peaks)), strict=True))}


def position_edges(seq_len: int, buckets: int) -> tuple[int, ...]:
    """Return the edges of position buckets: the last bucket is half of the sequence, each before it half as long.

    A short sequence has fewer than `buckets`.
    """
    edges = {seq_len >> bucket for bucket in range(buckets)} - {0}
    return (0, *sorted(edges))


@torch.no_grad()
def evaluate(
    train_step: TrainStep,
    batches: Iterable[Batch],
    token_bytes: npt.NDArray[np.integer] | npt.NDArray[np.floating] | None,
    position_buckets: int = 1,
) -> Row:
    """Return the mean loss per label over the batches of all ranks. Collective over all ranks.

    Parameters, gradients, optimizer and mode of the model are unchanged.

    Args:
        train_step: Owns the model.
        batches: Of this rank; equally many on every rank.
        token_bytes: Bytes of text per token id, [vocab]; None if unknown.
        position_buckets: Report the loss by position in this many buckets, at the cost of one LM head each. A model
            that uses its context has a lower loss at later positions.

    Returns:
        validation_loss in nats, validation_bits_per_byte, and with several buckets validation_loss_by_position. None
        where there is no label or, for bits per byte, no byte count.
    """
    model, mesh = train_step.model, train_step.mesh
    edges = position_edges(train_step.config.train.seq_len, position_buckets)
    buckets = len(edges) - 1
    totals = torch.zeros(2 * buckets + 1, dtype=torch.float64, device=mesh.device)  # nats, labels of each; bytes
    with evaluating(model):
        for batch in batches:
            pause(train_step)
            losses, labels = _losses_of(train_step, batch, edges)
            totals[:buckets] += losses
            for bucket, counted in enumerate(labels):
                totals[buckets + bucket] += counted.numel()
                if token_bytes is not None:
                    totals[-1] += float(token_bytes[counted.cpu().numpy()].sum())
    figures = sum_over_ranks(totals).tolist()
    nats, counts, text_bytes = figures[:buckets], figures[buckets:-1], figures[-1]
    # Per byte of text, so comparable between tokenizers.
    bits_per_byte = sum(nats) / (math.log(2.0) * text_bytes) if text_bytes > 0 else None
    loss = sum(nats) / sum(counts) if sum(counts) else None
    row: Row = {"validation_loss": loss, "validation_bits_per_byte": bits_per_byte}
    if buckets == 1:
        return row
    by_position = [
        {"first": first, "last": after - 1, "loss": loss / count if count else None}
        for (first, after), loss, count in zip(pairwise(edges), nats, counts, strict=True)
    ]
    return row | {"validation_loss_by_position": by_position}


def _losses_of(train_step: TrainStep, batch: Batch, edges: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Return the loss sum of this rank's rows per bucket, [buckets] float64, and the counted labels of each."""
    local = train_step.prepare(batch)
    hidden = train_step.model(local.rows.tokens, local.rows.positions, local.attention)
    losses, labels = [], []
    for first, after in pairwise(edges):
        rows = local.rows
        if len(edges) > 2:
            masked = np.full_like(batch.labels, IGNORE_INDEX)
            masked[:, first:after] = batch.labels[:, first:after]
            rows = train_step.prepare(replace(batch, labels=masked)).rows
        losses.append(train_step.model.head(hidden, rows.labels).double())
        labels.append(rows.labels[rows.labels != IGNORE_INDEX])
    return torch.stack(losses), labels


@torch.no_grad()
def score_tasks(train_step: TrainStep, tasks: NeedleTasks) -> Table:
    """Return nats, wrong tokens and tokens of each task's answer, [len(tasks), 3], equal on all ranks. Collective.

    The data-parallel ranks divide the tasks. Parameters, gradients, optimizer and mode of the model are unchanged.
    """
    mesh, size = train_step.mesh, train_step.config.train.micro_batch_size
    table = torch.zeros(len(tasks), 3, dtype=torch.float64, device=mesh.device)
    with evaluating(train_step.model):
        stride = mesh.dp_size * size
        # Rounded up to whole strides: every rank must run the same number of batches, if necessary empty ones.
        for first in range(mesh.dp_rank * size, -(-len(tasks) // stride) * stride, stride):
            pause(train_step)
            numbers = range(first, min(first + size, len(tasks)))
            rows, scores = _scored(train_step, [tasks.task(number) for number in numbers], size)
            table.index_add_(0, rows + first, scores)
    return sum_over_ranks(table).cpu().numpy()


def needle_figures(table: Table, tasks: NeedleTasks) -> Row:
    """Return the means over all samples of `table` (`score_tasks`), in total and by depth.

    depth: fraction of the haystack before the needle, 0 to 1; position: first token of the first sample's needle;
    accuracy: fraction of correct answers; loss: nats per answer token; gain: loss without the needle minus with it.
    """
    by_sample = table.reshape(tasks.samples, tasks.depths + 1, 3)  # the last task of a sample has no needle
    losses = by_sample[:, :, 0] / by_sample[:, :, 2]
    right = by_sample[:, :-1, 1] == 0
    gains = losses[:, -1:] - losses[:, :-1]
    by_depth = [
        {
            "depth": tasks.share(depth),
            "position": tasks.position(0, depth),
            "accuracy": float(right[:, depth].mean()),
            "loss": float(losses[:, depth].mean()),
            "gain": float(gains[:, depth].mean()),
        }
        for depth in range(tasks.depths)
    ]
    return {"needle_accuracy": float(right.mean()), "needle_gain": float(gains.mean()), "needle_by_depth": by_depth}


def _scored(train_step: TrainStep, tasks: Sequence[NeedleTask], size: int) -> tuple[Tensor, Tensor]:
    """Score this rank's answer rows; return their index in `tasks`, [n], and nats, wrong tokens and tokens, [n, 3].

    Each task is one document. The batch always has `size` sequences, if necessary empty ones, because every rank must
    gather weights equally often. Collective.
    """
    tokens = np.zeros((size, train_step.config.train.seq_len), dtype=np.int64)
    answers = np.full_like(tokens, IGNORE_INDEX)
    for number, task in enumerate(tasks):
        tokens[number], answers[number] = task.tokens, task.labels
    local = train_step.prepare(Batch(tokens, answers, (np.zeros(1, dtype=np.int64),) * size))
    hidden = train_step.model(local.rows.tokens, local.rows.positions, local.attention)
    row, column = (local.rows.labels != IGNORE_INDEX).nonzero(as_tuple=True)
    # Padded to the number of answer tokens in the whole batch: ranks that share the vocabulary must have equally many.
    bound = max(1, int((answers != IGNORE_INDEX).sum()))
    rows = hidden.new_zeros(bound, hidden.shape[-1])
    labels = local.rows.labels.new_full((bound,), IGNORE_INDEX)
    rows[: row.numel()], labels[: row.numel()] = hidden[row, column], local.rows.labels[row, column]
    scores = train_step.model.head(rows, labels, by_row=True)[: row.numel()].double()
    return row, torch.stack([scores[:, 0], 1.0 - scores[:, 1], torch.ones_like(scores[:, 0])], dim=1)
