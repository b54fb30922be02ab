"""Memory of the loss in bytes of live tensors: what it takes beyond its inputs does not depend on the length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.config.settings import LossConfig
from engine.device.live_tensors import LiveTensorTracker
from engine.device.row_blocks import CPU_BLOCK_ELEMENTS
from engine.loss.fused import linear_cross_entropy

VOCAB, SIZE, CHUNK = 2000, 16, 128


def peak_bytes(function: Any, rows: int, *, train: bool, dtype: torch.dtype = torch.float32) -> int:
    """Peak over forward and backward, inputs and their gradients included."""
    hidden = torch.randn(rows, SIZE, dtype=dtype).requires_grad_(train)
    weight = torch.randn(VOCAB, SIZE, dtype=dtype).requires_grad_(train)
    labels = torch.randint(0, VOCAB, (rows,))
    with LiveTensorTracker() as tracker:
        tracker.watch([hidden, weight, labels])
        loss = function(hidden, weight, labels, options=LossConfig(chunk_tokens=CHUNK))
        if train:
            loss.backward()
    return tracker.peak_bytes


def growth_per_row(function: Any, *, train: bool, dtype: torch.dtype = torch.float32) -> float:
    """Bytes that one more row costs, from two lengths."""
    short, long = 4 * CHUNK, 24 * CHUNK
    peaks = [peak_bytes(function, rows, train=train, dtype=dtype) for rows in (short, long)]
    return (peaks[1] - peaks[0]) / (long - short)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_memory_per_row_has_no_logits(dtype: torch.dtype) -> None:
    # hidden and its gradient; one int64 label. Nothing else may grow with the rows.
    allowed = 2 * SIZE * dtype.itemsize + 8
    assert growth_per_row(linear_cross_entropy, train=True, dtype=dtype) <= allowed


def test_evaluation_memory_per_row_has_no_logits() -> None:
    assert growth_per_row(linear_cross_entropy, train=False) <= SIZE * 4 + 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_scales_both_gradients_in_place(dtype: torch.dtype) -> None:
    hidden, weight = (torch.randn(4096, 256, dtype=dtype).requires_grad_() for _ in range(2))
    labels = torch.arange(4096)
    with LiveTensorTracker() as tracker:
        tracker.watch([hidden, weight, labels])
        loss = linear_cross_entropy(hidden, weight, labels, options=LossConfig())
        tracker.enter("backward")
        loss.backward()
    inputs = hidden.nbytes + weight.nbytes + labels.nbytes
    sums, block, scalars = 4 * weight.numel(), dtype.itemsize * CPU_BLOCK_ELEMENTS, 64
    peak = tracker.device.phase_peaks["backward"].total_bytes
    assert peak <= inputs + hidden.nbytes + sums + block + scalars
    assert weight.grad is not None
    assert weight.grad.untyped_storage().nbytes() == weight.nbytes
