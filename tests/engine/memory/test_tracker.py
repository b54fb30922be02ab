"""Live bytes are those of storages: each once, views free, gone when freed, also in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchao.optim.subclass_8bit import OptimState8bit

from engine.memory.host import host_empty
from engine.memory.tracker import Label, LiveTensorTracker

FLOAT = 4


def test_each_storage_counts_once_at_its_size_until_it_is_freed_and_views_nothing() -> None:
    with LiveTensorTracker() as tracker:
        x = torch.zeros(100)
        views = [x[10:], x.view(10, 10), x.detach(), x.t()]
        assert (tracker.live_bytes, len(views)) == (100 * FLOAT, 4)
        x.untyped_storage().resize_(0)  # as FSDP frees gathered weights
        y = torch.zeros(80)
        assert (tracker.peak_bytes, tracker.live_bytes) == (100 * FLOAT, y.nbytes)
        z = y + 1
        del y
        z = z * 2
        del z
        assert (tracker.live_bytes, tracker.peak_bytes) == (0, 160 * FLOAT)
        tracker.reset_peak()
        assert tracker.peak_bytes == 0


def test_host_memory_counts_apart_with_a_peak_of_its_own() -> None:
    with LiveTensorTracker() as tracker:
        on_host = host_empty((100,), torch.float32, pinned=False)
        assert (tracker.live_bytes, tracker.peak_host_bytes) == (0, 100 * FLOAT)
        on_device = on_host[:30].clone()
        del on_host
        assert (tracker.peak_bytes, tracker.peak_host_bytes) == (on_device.nbytes, 100 * FLOAT)
        tracker.reset_peak()
        assert (tracker.peak_bytes, tracker.peak_host_bytes) == (30 * FLOAT, 0)


def test_every_phase_has_a_peak_and_the_highest_is_named() -> None:
    with LiveTensorTracker() as tracker:
        kept = torch.zeros(10)
        for phase, size in (("forward", 100), ("backward", 200), ("loss", 5), ("backward", 50), ("", 20)):
            tracker.enter(phase)
            torch.zeros(size)
    peaks = {name: peak.total_bytes for name, peak in tracker.device.phase_peaks.items()}
    assert peaks == {"": 30 * FLOAT, "forward": 110 * FLOAT, "backward": 210 * FLOAT, "loss": 15 * FLOAT}
    assert (tracker.device.peak.total_bytes, tracker.device.peak.phase) == (210 * FLOAT, "backward")
    assert kept.numel() == 10


def test_components_add_up_to_the_peak_and_follow_new_labels() -> None:
    def classify(func: Any, tensor: Tensor) -> Label:
        return Label("large" if tensor.numel() >= 100 else "small")

    with LiveTensorTracker(classify) as tracker:
        large, small = torch.zeros(100), torch.zeros(10)
        assert tracker.device.peak.components == {"large": large.nbytes, "small": small.nbytes}
        tracker.watch([small], Label("weights"))
        third = torch.zeros(20)
        assert tracker.device.peak.components == {"large": 100 * FLOAT, "weights": 10 * FLOAT, "small": third.nbytes}
    assert sum(tracker.device.peak.components.values()) == tracker.peak_bytes


def test_what_came_since_a_moment_and_lives_is_labelled_anew() -> None:
    with LiveTensorTracker(lambda func, tensor: Label("pool" if tensor.numel() == 7 else "work")) as tracker:
        before = torch.zeros(10)
        moment = tracker.moment
        kept, pooled = torch.zeros(20), torch.zeros(7)
        torch.zeros(30)  # gone when it is asked
        tracker.relabel_since(moment, "kept", keep=frozenset({"pool"}))
        tracker.reset_peak()
    assert tracker.device.peak.components == {"work": before.nbytes, "kept": kept.nbytes, "pool": pooled.nbytes}


def test_of_a_wrapper_what_it_wraps_counts() -> None:
    moment = OptimState8bit.zeros((4096,), signed=True)
    with LiveTensorTracker() as tracker:
        tracker.watch([moment])
    assert tracker.peak_bytes == moment.codes.nbytes + moment.scale.nbytes + moment.qmap.nbytes
