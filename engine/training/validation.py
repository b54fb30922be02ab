"""What a validation measures, as figures for a row of metrics: loss on the validation split, needles, both by place.

Weighted by tokens over all ranks, and without a trace in the training that goes on.

Needles are asked teacher-forced, with the logits of the answers' rows alone. Accuracy: the answer is right if each of
its tokens has the largest logit after the right ones before it, which is so exactly when greedy decoding writes it.
Small models write none; for them there is the gain: how many nats per token of the answer the needle saves, against
the same question where there is none. Above 0 the model uses what it read there.
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
    """{validation_loss, ...} and, with `needles`, {needle_accuracy, ...}; what could not be measured is left out.

    All ranks must call; the model is afterwards as before. Raises Stopped.
    """
    config, mesh = train_step.config, train_step.mesh
    batches = validation_batches(data, config, (mesh.dp_rank, mesh.dp_size))
    token_bytes = None if data.token_bytes is None else data.token_bytes * data.validation.byte_ratio
    losses = evaluate(train_step, batches, token_bytes, config.train.eval_position_buckets)
    return losses if needles is None else losses | needle_figures(score_tasks(train_step, needles), needles)


class Stopped(KeyboardInterrupt):
    """A validation has ended between two samples, on all ranks alike, as one of them was asked to stop."""


def pause(train_step: TrainStep) -> None:
    """Between two samples: raises Stopped on all ranks if any was asked to stop. All ranks must call."""
    train_step.status.advance()
    if any(max_over_ranks([train_step.status.stop.requested], train_step.mesh.device)):
        raise Stopped


def measured(mesh: Mesh, work: Callable[[], Row]) -> Row:
    """What `work` gives, with the seconds that the slowest rank took for it and the peak memory of the largest one."""
    memory = PeakMemory(mesh.device)
    memory.reset()
    started = time.perf_counter()
    row = work()
    own = {"evaluation_s": time.perf_counter() - started, **memory.read()}
    names = ("evaluation_s", "peak_memory_bytes", "peak_memory_reserved_bytes")
    seconds, *peaks = max_over_ranks([own[name] for name in names], mesh.device)
    return {**row, **dict(zip(names, (seconds, *(peak and int(peak) for peak in peaks)), strict=True))}


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
    token_bytes: npt.NDArray[np.integer] | npt.NDArray[np.floating] | None,
    position_buckets: int = 1,
) -> Row:
    """Mean loss per label of `batches` of all ranks in nats, and in bits per byte of text (None where no byte counts
    are known: `token_bytes` [vocab]); both None when they hold no label.

    With more than one of `position_buckets`, the loss of the labels at positions first .. last, too (None: no label),
    at the price of one LM head per bucket: a model that uses its context loses less the more of it it has seen. All
    ranks must call with as many batches. Parameters, gradients, optimizer and mode of the model are as before.
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
            for bucket, own in enumerate(labels):
                totals[buckets + bucket] += own.numel()
                if token_bytes is not None:
                    totals[-1] += float(token_bytes[own.cpu().numpy()].sum())
    figures = sum_over_ranks(totals).tolist()
    nats, counts, text_bytes = figures[:buckets], figures[buckets:-1], figures[-1]
    # Of text, comparable between tokenizers.
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
    """(loss sums [buckets] of this rank's rows, labels of each that count)."""
    local = train_step.prepare(batch)
    hidden = train_step.model(local.rows.tokens, local.rows.positions, local.attention)
    losses, labels = [], []
    for first, after in pairwise(edges):
        rows = local.rows
        if len(edges) > 2:
            here = np.full_like(batch.labels, IGNORE_INDEX)
            here[:, first:after] = batch.labels[:, first:after]
            rows = train_step.prepare(replace(batch, labels=here)).rows
        losses.append(train_step.model.head(hidden, rows.labels).double())
        labels.append(rows.labels[rows.labels != IGNORE_INDEX])
    return torch.stack(losses), labels


@torch.no_grad()
def score_tasks(train_step: TrainStep, tasks: NeedleTasks) -> Table:
    """[len(tasks), 3]: sums over the labels of each task of nats, wrong tokens and tokens; alike on all ranks.

    The data-parallel ranks divide the tasks; all ranks must call. Parameters, gradients, optimizer and mode of the
    model are as before.
    """
    mesh, size = train_step.mesh, train_step.config.train.micro_batch_size
    table = torch.zeros(len(tasks), 3, dtype=torch.float64, device=mesh.device)
    with evaluating(train_step.model):
        stride = mesh.dp_size * size
        for first in range(mesh.dp_rank * size, -(-len(tasks) // stride) * stride, stride):  # alike often on all ranks
            pause(train_step)
            numbers = range(first, min(first + size, len(tasks)))
            rows, scores = _scored(train_step, [tasks.task(number) for number in numbers], size)
            table.index_add_(0, rows + first, scores)
    return sum_over_ranks(table).cpu().numpy()


def needle_figures(table: Table, tasks: NeedleTasks) -> Row:
    """Means over all samples of a `table` that `score_tasks` gave, and those of every depth.

    depth: share of the haystack before the needle, 0 to 1; position: token at which the first sample's needle begins.
    accuracy: share of answers that are right; loss: nats per token of the answer; gain: loss without the needle minus
    loss with it.
    """
    by_sample = table.reshape(tasks.samples, tasks.depths + 1, 3)
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
    """(which of `tasks` each of this rank's answer rows belongs to [n], their nats, wrong tokens and tokens [n, 3]).

    Tasks are documents of their own. A batch of `size` rows is run in any case, the others empty: every rank gathers
    weights as often as the others.
    """
    tokens = np.zeros((size, train_step.config.train.seq_len), dtype=np.int64)
    answers = np.full_like(tokens, IGNORE_INDEX)
    for number, task in enumerate(tasks):
        tokens[number], answers[number] = task.tokens, task.labels
    local = train_step.prepare(Batch(tokens, answers, (np.zeros(1, dtype=np.int64),) * size))
    hidden = train_step.model(local.rows.tokens, local.rows.positions, local.attention)
    row, place = (local.rows.labels != IGNORE_INDEX).nonzero(as_tuple=True)
    # As many rows on every rank as the whole batch has answers: those that slice the vocabulary score each other's.
    bound = max(1, int((answers != IGNORE_INDEX).sum()))
    rows = hidden.new_zeros(bound, hidden.shape[-1])
    labels = local.rows.labels.new_full((bound,), IGNORE_INDEX)
    rows[: row.numel()], labels[: row.numel()] = hidden[row, place], local.rows.labels[row, place]
    scores = train_step.model.head(rows, labels, by_row=True)[: row.numel()].double()
    return row, torch.stack([scores[:, 0], 1.0 - scores[:, 1], torch.ones_like(scores[:, 0])], dim=1)
