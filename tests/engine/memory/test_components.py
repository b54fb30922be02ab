"""Allocations are told apart by the functions that lead to them; what layers leave behind are checkpoints."""

from __future__ import annotations

import torch
from testkit.ranks import Pools
from testkit.tiny_training import own_part, random_batches, start_run, tiny_config

from engine.config.settings import LossConfig
from engine.loss.fused import linear_cross_entropy
from engine.memory.components import FrameClassifier, StepObserver, by_component
from engine.memory.tracker import LiveTensorTracker
from engine.model.elementwise import swiglu
from engine.training.train_step import rank_batch

FLOAT = 4


def test_the_innermost_function_that_is_listed_decides() -> None:
    with LiveTensorTracker(FrameClassifier()) as tracker:
        gate = torch.zeros(1000)
        result = swiglu(gate, gate)
        hidden, weight = torch.zeros(10, 4), torch.zeros(8, 4)
        linear_cross_entropy(hidden, weight, torch.zeros(10, dtype=torch.int64), options=LossConfig(chunk_tokens=5))
        found = tracker.device.peak.components
    assert found["mlp"] == result.nbytes
    assert found["loss"] > 0
    assert "attention" not in found


def bytes_of_a_step(policy: str) -> tuple[int, int, int]:
    """(bytes of checkpoints when the loss begins, of gradients and of weights when backward is over)."""
    run = start_run(tiny_config(memory={"activation_checkpoint": policy}))
    (own,) = own_part(random_batches(0, sequences=1), run.mesh)
    batch = rank_batch(own, run.model, run.attention, run.mesh)
    classifier = FrameClassifier()
    with LiveTensorTracker(classifier) as tracker:
        StepObserver(tracker, classifier).attach(run.model, run.model.layers, run.model.head)
        hidden = run.model(batch.rows.tokens, batch.rows.positions, batch.attention)
        tracker.reset_peak()
        checkpoints = by_component(tracker.device.peak.components)["checkpoints"]
        del hidden
        run.train_step.accumulate([batch], label_tokens=30)
        tracker.reset_peak()
    found = by_component(tracker.device.peak.components)
    return checkpoints, found["gradients"], found["parameters"]


def test_what_layers_leave_behind_are_checkpoints_and_gradients_are_known_as_such(ranks: Pools) -> None:
    residual = 30 * 32 * FLOAT
    layers = 2
    (full, *of_full), (attn_out, *others) = (ranks(1).run(bytes_of_a_step, name)[0] for name in ("full", "attn_out"))
    assert full == (layers + 1) * residual  # inputs of both layers and the output of the last
    assert attn_out == full + layers * (residual + 30 * 4 * FLOAT)  # out, and lse of 4 heads
    assert of_full == others
    assert others[0] == others[1] > 0
