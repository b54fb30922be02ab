"""Allocations are told apart by the functions that lead to them; what layers leave behind are checkpoints."""

from __future__ import annotations

import pytest
import torch
from testkit.ranks import Pools
from testkit.tiny_training import own_part, random_batches, start_run, tiny_config

from engine.loss.fused import linear_cross_entropy
from engine.loss.options import LossOptions
from engine.memory.components import COMPONENTS, FrameClassifier, StepObserver, by_component, component_of
from engine.memory.host import host_empty
from engine.memory.tracker import LiveTensorTracker
from engine.model.elementwise import swiglu
from engine.training.train_step import rank_batch

FLOAT = 4


@pytest.mark.parametrize(
    ("path", "function", "component"),
    [
        ("/x/engine/attention/buffers.py", "allocate_bytes", "attention pool"),
        ("/x/engine/attention/buffers.py", "allocate_tensor", "attention"),
        ("/x/engine/attention/kernels/cpu_flash.py", "_forward", "attention"),
        ("C:\\x\\engine\\loss\\fused.py", "_walk_chunks", "loss"),
        ("/x/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_reduce", "communication"),
        ("/x/engine/model/rope.py", "rope_table", "other"),
        ("/x/engine/model/rope.py", "_rotate", "mlp"),
        ("/x/engine/row_blocks.py", "scaled", None),
    ],
)
def test_a_function_has_a_component_or_leaves_it_to_its_caller(path: str, function: str, component: str | None) -> None:
    assert component_of(path, function) == component


def test_the_innermost_function_that_is_listed_decides() -> None:
    with LiveTensorTracker(FrameClassifier()) as tracker:
        gate = torch.zeros(1000)
        result = swiglu(gate, gate)
        hidden, weight = torch.zeros(10, 4), torch.zeros(8, 4)
        linear_cross_entropy(hidden, weight, torch.zeros(10, dtype=torch.int64), options=LossOptions(chunk_tokens=5))
        found = tracker.peak.components
    assert found["mlp"] == result.nbytes
    assert found["loss"] > 0
    assert "attention" not in found


def test_host_memory_has_the_component_of_whoever_asked_for_it() -> None:
    with LiveTensorTracker(FrameClassifier()) as tracker:
        buffer = host_empty((100,), torch.float32, pinned=False)
    assert tracker.host_peak.components == {"other": buffer.nbytes}
    assert tracker.peak_bytes == 0


def test_components_can_be_said_to_lie_on_the_host() -> None:
    classifier = FrameClassifier(host_components=["parameters"])
    with LiveTensorTracker(classifier) as tracker:
        weight = torch.zeros(100)
        tracker.watch([weight], classifier.label("parameters"))
        tracker.reset_peak()
    assert tracker.host_peak.components == {"parameters": weight.nbytes}
    assert tracker.peak_bytes == 0


def test_pooled_memory_of_attention_counts_as_attention() -> None:
    found = by_component({"attention": 3, "attention pool": 4, "mlp": 5})
    assert list(found) == list(COMPONENTS)
    assert (found["attention"], found["mlp"], sum(found.values())) == (7, 5, 12)


def gradient_and_weight_bytes() -> tuple[int, int]:
    """(bytes of gradients when backward is over, bytes of weights)."""
    run = start_run(tiny_config())
    batches = own_part(random_batches(0, sequences=1), run.mesh)
    local = [rank_batch(batch, run.model, run.attention, run.mesh) for batch in batches]
    classifier = FrameClassifier()
    with LiveTensorTracker(classifier) as tracker:
        StepObserver(tracker, classifier).attach(run.model, run.model.layers, run.model.head)
        run.train_step.accumulate(local, label_tokens=30)
        tracker.reset_peak()
    found = by_component(tracker.peak.components)
    return found["gradients"], found["parameters"]


def test_gradients_of_a_step_are_known_as_such(ranks: Pools) -> None:
    gradients, weights = ranks(1).run(gradient_and_weight_bytes)[0]
    assert gradients == weights > 0


def checkpoint_bytes(policy: str) -> int:
    """Bytes of checkpoints when the loss begins."""
    run = start_run(tiny_config(memory={"activation_checkpoint": policy}))
    (own,) = own_part(random_batches(0, sequences=1), run.mesh)
    batch = rank_batch(own, run.model, run.attention, run.mesh)
    classifier = FrameClassifier()
    with LiveTensorTracker(classifier) as tracker:
        StepObserver(tracker, classifier).attach(run.model, run.model.layers, run.model.head)
        hidden = run.model(batch.rows.tokens, batch.rows.positions, batch.attention)
        tracker.reset_peak()
        del hidden
    return by_component(tracker.peak.components)["checkpoints"]


def test_what_layers_leave_behind_are_checkpoints(ranks: Pools) -> None:
    residual = 30 * 32 * FLOAT
    layers = 2
    full, attn_out = (ranks(1).run(checkpoint_bytes, policy)[0] for policy in ("full", "attn_out"))
    assert full == (layers + 1) * residual  # inputs of both layers and the output of the last
    assert attn_out == full + layers * (residual + 30 * 4 * FLOAT)  # out, and lse of 4 heads
