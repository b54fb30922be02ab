"""Live bytes are those of storages: each once, views free, gone when freed, also in backward."""

from __future__ import annotations

import gc

import torch
from torch.autograd.graph import saved_tensors_hooks

from engine.memory_tracker import LiveTensorTracker

FLOAT = 4


def test_each_storage_counts_once_and_views_nothing() -> None:
    with LiveTensorTracker() as tracker:
        x = torch.zeros(100)
        views = [x[10:], x.view(10, 10), x.detach(), x.t()]
        assert tracker.live_bytes == 100 * FLOAT
        assert len(views) == 4
    assert tracker.peak_bytes == 100 * FLOAT


def test_freed_tensors_leave_and_the_peak_stays() -> None:
    with LiveTensorTracker() as tracker:
        x = torch.zeros(100)
        y = x + 1
        del x
        assert tracker.live_bytes == 100 * FLOAT
        z = y * 2
        del y, z
        assert tracker.live_bytes == 0
        assert tracker.peak_bytes == 200 * FLOAT
        tracker.reset_peak()
        assert tracker.peak_bytes == 0


def test_a_view_keeps_its_whole_storage_alive() -> None:
    with LiveTensorTracker() as tracker:
        part = torch.zeros(100)[:1]
        gc.collect()
        assert part.numel() == 1
        assert tracker.live_bytes == 100 * FLOAT


def test_in_place_and_out_operations_add_nothing() -> None:
    with LiveTensorTracker() as tracker:
        x = torch.zeros(100)
        x.add_(1).mul_(2)
        torch.exp(x, out=x)
        assert tracker.peak_bytes == 100 * FLOAT


def test_watched_and_read_tensors_count() -> None:
    watched, read, unseen = torch.zeros(10), torch.zeros(20), torch.zeros(40)
    with LiveTensorTracker() as tracker:
        tracker.watch([watched])
        assert tracker.peak_bytes == 10 * FLOAT
        read.add_(1)
        assert tracker.peak_bytes == 30 * FLOAT
    assert unseen.numel() == 40


def test_resized_storages_are_counted_at_their_size() -> None:
    with LiveTensorTracker() as tracker:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)  # as FSDP frees gathered weights
        y = torch.zeros(80)
        assert y.numel() == 80
        assert tracker.peak_bytes == 100 * FLOAT
        assert tracker.live_bytes == 80 * FLOAT


def test_saved_activations_and_gradients_are_seen_in_backward() -> None:
    x = torch.zeros(1000, requires_grad=True)
    with LiveTensorTracker() as tracker:
        loss = (x.exp() * x.sin()).sum()
        # x, exp and sin saved for backward; their product is gone.
        saved = 3 * 1000 * FLOAT + loss.nbytes
        assert tracker.live_bytes == saved
        loss.backward()
        assert tracker.peak_bytes > saved
        del loss
        assert x.grad is not None
        assert tracker.live_bytes == 2 * 1000 * FLOAT


def test_memory_is_as_with_hooks_that_save_nothing_extra() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    saved: list[int] = []
    with LiveTensorTracker() as tracker, saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        out = torch.relu(weight @ weight)
        assert tracker.live_bytes == weight.nbytes + out.nbytes
    assert saved
