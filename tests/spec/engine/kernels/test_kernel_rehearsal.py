"""A prediction of memory for a GPU counts what the kernels allocate: results, and nothing as wide as a temporary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.config.settings import LossConfig
from engine.device.live_tensors import LiveTensorTracker
from engine.device.row_blocks import FakeRun, use_fake_run
from engine.loss.fused import linear_cross_entropy
from engine.model.elementwise import add_rms_norm, rms_norm, swiglu
from engine.model.rope import apply_rope

ROWS, WIDTH, VOCAB, CHUNK = 600, 256, 2000, 250
BYTES = 2 * ROWS * WIDTH  # of a bf16 tensor


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def table() -> Tensor:
    return torch.ones(ROWS, WIDTH // 8)


def loss(hidden: Tensor, weight: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, torch.arange(ROWS), options=LossConfig(chunk_tokens=CHUNK))


# name: (function, inputs, number of results, bytes of results of forward and backward)
CASES: dict[str, tuple[Callable[..., Any], list[Tensor], int, int]] = {
    "norm": (lambda x, w: rms_norm(x, w, 1e-5), [ones(1, ROWS, WIDTH), ones(WIDTH)], 1, 2 * BYTES),
    # The product with 1 stands for the branch; its gradient is the fourth.
    "sum and norm": (
        lambda b, r, w: add_rms_norm(b * 1, r, w, 1e-5),
        [ones(1, ROWS, WIDTH), ones(1, ROWS, WIDTH), ones(WIDTH)],
        2,
        4 * BYTES,
    ),
    "swiglu": (swiglu, [ones(1, ROWS, WIDTH), ones(1, ROWS, WIDTH)], 1, 3 * BYTES),
    "rope": (lambda x: apply_rope(x, table(), table()), [ones(1, ROWS, 4, WIDTH // 4)], 1, 2 * BYTES),
    # Both gradients (the weight's in fp32) and a chunk of logits, which is gone before what backward needs for a block.
    "loss": (loss, [ones(ROWS, WIDTH), ones(VOCAB, WIDTH)], 0, BYTES + 4 * VOCAB * WIDTH + 2 * CHUNK * VOCAB),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fake_run_of_a_gpu_allocates_no_wide_temporaries(name: str) -> None:
    function, inputs, results, expected = CASES[name]
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        use_fake_run(FakeRun(as_accelerator=True)),
        LiveTensorTracker() as tracker,
    ):
        leaves = [torch.empty_like(x).requires_grad_() for x in inputs]
        douts = [ones(*inputs[0].shape) for _ in range(results)] or [torch.ones(())]
        tracker.watch([*leaves, *douts])
        before = tracker.live_bytes
        found = function(*leaves)
        torch.autograd.grad(found, leaves, douts)
    beyond = tracker.peak_bytes - before - expected
    tables, sums = 2 * table().nbytes * (name == "rope"), BYTES // 4
    assert 0 <= beyond <= tables + sums  # an fp32 copy would be twice a tensor
