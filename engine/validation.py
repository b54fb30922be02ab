"""What a validation measures, as figures for a row of metrics: loss on the validation split, needles, both by place."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from engine.data import PreparedData, sequential_batches
from engine.evaluate import evaluate
from engine.metrics import PeakMemory
from engine.needle.evaluate import evaluate_needles
from engine.needle.tasks import NeedleTasks
from engine.parallel.mesh import Mesh
from engine.parallel.reduce import max_over_ranks
from engine.train_step import TrainStep


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
