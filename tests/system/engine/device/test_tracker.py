"""Live bytes are those of storages, each once until it is freed, told apart by the functions that led to them."""

from __future__ import annotations

from typing import Any

import torch
from testkit.ranks import Pools
from testkit.tiny_training import own_part, random_batches, start_run, tiny_config
from torch import Tensor
from torchao.optim.subclass_8bit import OptimState8bit

from engine.config.settings import LossConfig
from engine.device.host_memory import host_empty
from engine.device.live_tensors import Label, LiveTensorTracker
from engine.loss.fused import linear_cross_entropy
from engine.model.elementwise import swiglu
from engine.training.fake_run.components import FrameClassifier, StepObserver, by_component
from engine.training.train_step import rank_batch

FLOAT = 4


def test_storage_counts_once_whatever_views_it_has() -> None:
    with LiveTensorTracker() as tracker:
        x = torch.zeros(100)
        views = [x[10:], x.view(10, 10), x.detach(), x.t()]
        assert tracker.live_bytes == 100 * FLOAT
        assert len(views) == 4


def test_resized_storage_counts_at_its_new_size() -> None:
    with LiveTensorTracker() as tracker:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)  # as FSDP frees gathered weights
        y = torch.zeros(80)
        assert tracker.live_bytes == y.nbytes
        assert tracker.peak_bytes == 100 * FLOAT


def test_freed_storages_count_in_the_peak_alone() -> None:
    with LiveTensorTracker() as tracker:
        y = torch.zeros(80)
        z = y + 1
        del y, z
        assert tracker.live_bytes == 0
        assert tracker.peak_bytes == 160 * FLOAT
        tracker.reset_peak()
        assert tracker.peak_bytes == 0


def test_wrapper_subclass_counts_what_it_wraps() -> None:
    moment = OptimState8bit.zeros((4096,), signed=True)
    with LiveTensorTracker() as tracker:
        tracker.watch([moment])
    assert tracker.peak_bytes == moment.codes.nbytes + moment.scale.nbytes + moment.qmap.nbytes


def test_host_memory_has_a_separate_peak() -> None:
    with LiveTensorTracker() as tracker:
        on_host = host_empty((100,), torch.float32, pinned=False)
        assert tracker.live_bytes == 0
        assert tracker.peak_host_bytes == 100 * FLOAT
        on_device = on_host[:30].clone()
        del on_host
        assert tracker.peak_bytes == on_device.nbytes
        assert tracker.peak_host_bytes == 100 * FLOAT
        tracker.reset_peak()
        assert tracker.peak_bytes == 30 * FLOAT
        assert tracker.peak_host_bytes == 0


def test_every_phase_has_a_peak() -> None:
    with LiveTensorTracker() as tracker:
        kept = torch.zeros(10)
        for phase, size in (("forward", 100), ("backward", 200), ("loss", 5), ("backward", 50), ("", 20)):
            tracker.enter(phase)
            torch.zeros(size)
    peaks = {name: peak.total_bytes for name, peak in tracker.device.phase_peaks.items()}
    assert peaks == {"": 30 * FLOAT, "forward": 110 * FLOAT, "backward": 210 * FLOAT, "loss": 15 * FLOAT}
    assert tracker.device.peak.total_bytes == 210 * FLOAT
    assert tracker.device.peak.phase == "backward"
    assert kept.numel() == 10


def test_components_of_the_peak_follow_labels() -> None:
    def classify(func: Any, tensor: Tensor) -> Label:
        return Label("large" if tensor.numel() >= 100 else "small")

    with LiveTensorTracker(classify) as tracker:
        large, small = torch.zeros(100), torch.zeros(10)
        assert tracker.device.peak.components == {"large": large.nbytes, "small": small.nbytes}
        tracker.watch([small], Label("weights"))
        third = torch.zeros(20)
        assert tracker.device.peak.components == {"large": 100 * FLOAT, "weights": 10 * FLOAT, "small": third.nbytes}
    assert sum(tracker.device.peak.components.values()) == tracker.peak_bytes


def test_relabel_since_labels_live_tensors() -> None:
    with LiveTensorTracker(lambda func, tensor: Label("pool" if tensor.numel() == 7 else "work")) as tracker:
        before = torch.zeros(10)
        moment = tracker.moment
        kept, pooled = torch.zeros(20), torch.zeros(7)
        torch.zeros(30)  # gone when it is asked
        tracker.relabel_since(moment, "kept", exclude=frozenset({"pool"}))
        tracker.reset_peak()
    assert tracker.device.peak.components == {"work": before.nbytes, "kept": kept.nbytes, "pool": pooled.nbytes}


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


def bytes_of_a_step(policy: str) -> tuple[int, int, int, set[str]]:
    """Bytes of checkpoints when the loss begins, of gradients and of weights when backward is over; the phases."""
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
        phases = set(tracker.device.phase_peaks)
        tracker.reset_peak()
    found = by_component(tracker.device.peak.components)
    return checkpoints, found["gradients"], found["parameters"], phases


def test_a_step_labels_checkpoints_apart_from_gradients(ranks: Pools) -> None:
    residual = 30 * 32 * FLOAT
    layers = 2
    (full, *of_full), (attn_out, *others) = (ranks(1).run(bytes_of_a_step, name)[0] for name in ("full", "attn_out"))
    assert full == (layers + 1) * residual  # inputs of both layers and the output of the last
    assert attn_out == full + layers * (residual + 30 * 4 * FLOAT)  # out, and lse of 4 heads
    assert of_full == others
    assert others[0] == others[1] > 0
    of_layers = {f"{phase}/{place}" for phase in ("forward", "backward") for place in ("first", "last")}
    assert others[2] == of_layers | {"forward", "loss", "backward"}
