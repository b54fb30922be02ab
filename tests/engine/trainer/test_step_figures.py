"""Figures of a measured step against counts that share nothing with them: dense masks, torch's counter of FLOPs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from testkit.ranks import Pools
from testkit.tiny_training import TINY_MODEL, own_part, random_batches, start_run, tiny_config

from engine.config import ParallelConfig, RunConfig
from engine.data import Batch
from engine.flops import count_parameters
from engine.metrics import StepMeter
from engine.peak_table import Peak
from engine.trainer import step_cost

SEQ_LEN = 30
# Of the four sequences of a step: one document, many, one that starts late, one of single tokens.
DOCUMENTS = ((0,), (0, 1, 6, 7, 20), (0, 29), tuple(range(SEQ_LEN)))
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"mask": "window", "window_tokens": 5},
    "layers that differ": {"mask_layers": ("window", "causal"), "window_tokens": 7},
}


def dense_pairs(settings: dict[str, Any], layer: int, starts: tuple[int, ...], *, before: int = SEQ_LEN) -> int:
    """Visible pairs of one sequence in one layer whose query is `before` a position, one by one."""
    position = torch.arange(SEQ_LEN)
    query, key = position[:, None], position[None, :]
    document = torch.bucketize(position, torch.tensor(starts), right=True)
    visible = (key <= query) & (document[:, None] == document[None, :]) & (query < before)
    kinds = settings.get("mask_layers", (settings.get("mask", "causal"),))
    if kinds[layer % len(kinds)] == "window":
        visible &= query - key < settings["window_tokens"]
    return int(visible.sum())


def measured_row(config: RunConfig) -> dict[str, Any]:
    """The row of one step over the sequences of DOCUMENTS, one in every micro-batch."""
    run = start_run(config)
    cost = step_cost(config, run.mesh.dp_size, Peak(1e9, "test"), run.attention.method)
    meter = StepMeter(run.mesh, run.attention, cost)
    batch = random_batches(0, sequences=len(DOCUMENTS))
    packed = Batch(batch.tokens, batch.labels, tuple(map(np.array, DOCUMENTS)), batch.samples)
    meter.start()
    row, _ = meter.finish(1, run.train_step(0, own_part(packed, run.mesh, micro_steps=config.train.grad_accum_steps)))
    return row


@pytest.mark.parametrize(("mask", "documents"), [("causal", True), ("layers that differ", True), ("window", False)])
def test_a_step_counts_the_pairs_of_the_documents_that_it_computed(ranks: Pools, mask: str, documents: bool) -> None:
    config = tiny_config(
        attention={"preset": "ring", "documents": documents, **MASKS[mask]},
        parallel=ParallelConfig(dp_shard_size=2, cp_size=2),
        memory={"activation_checkpoint": "full"},
        train={"grad_accum_steps": 2},
    )
    row = ranks(4).run(measured_row, config)[0]
    starts = DOCUMENTS if documents else ((0,),) * len(DOCUMENTS)
    pairs = sum(dense_pairs(MASKS[mask], layer, one) for layer in range(TINY_MODEL.num_layers) for one in starts)
    assert (row["visible_pairs"], row["recomputed_pairs"]) == (pairs, pairs)
    model = TINY_MODEL
    flops = 6 * count_parameters(model).matmul * 4 * SEQ_LEN + 12 * model.num_heads * model.head_dim * pairs
    assert row["mfu"] == pytest.approx(flops / row["step_time_s"] / 4 / 1e9)
    assert row["model_tflops_per_device"] == pytest.approx(flops / row["step_time_s"] / 4 / 1e12)
    assert row["hfu"] > row["mfu"]


def test_pairs_attended_again_are_those_of_the_first_part_of_the_sequence(ranks: Pools) -> None:
    config = tiny_config(
        attention={"preset": "single", "documents": True},
        memory={"activation_checkpoint": "seq_fraction", "kept_fraction": 0.5},
        train={"grad_accum_steps": 4},
    )
    (row,) = ranks(1).run(measured_row, config)
    halves = sum(dense_pairs({}, 0, starts, before=SEQ_LEN // 2) for starts in DOCUMENTS)
    assert row["recomputed_pairs"] == TINY_MODEL.num_layers * halves
