"""Tiles too large for one call of a kernel are computed in parts of their heads, with the same result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from testkit.attention_oracle import (
    build_group,
    dense_visibility,
    errors,
    oracle,
    random_inputs,
    relative_errors,
    ring_method,
)
from torch import Tensor

from engine.device.row_blocks import FakeRun, use_fake_run
from engine.kernels.attention.base import TileGradients, TileKernel, TileResult
from engine.kernels.attention.cpu_flash import CpuFlashKernel
from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.visibility.mask import Band, Mask

ROWS, HEADS, HEAD_DIM = 24, 12, 8


class LimitedKernel:
    """Another kernel that takes so many elements in one call and notes the heads of every call."""

    name = "limited"

    def __init__(self, kernel: TileKernel, max_elements: int) -> None:
        self.kernel = kernel
        self.capabilities = replace(kernel.capabilities, max_call_elements=max_elements)
        self.calls: list[tuple[int, int]] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        self._note(q, k, v)
        return self.kernel.forward(q, k, v, band)

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        self._note(grads.dout, grads.out, q, k, v)
        return self.kernel.backward(grads, q, k, v, band)

    def _note(self, *tensors: Tensor) -> None:
        limit = self.capabilities.max_call_elements
        assert limit is not None
        for x in tensors:
            reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
            assert reach <= limit, (x.shape, x.stride())
        self.calls.append((tensors[-3].shape[1], tensors[-2].shape[1]))


@pytest.mark.parametrize("kv_heads", [12, 4, 1])
@pytest.mark.parametrize("heads_per_call", [1, 3, 5, 12])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (2, 1), (2, 2)])
def test_parts_of_the_heads_give_the_whole_tile(inner: int, outer: int, heads_per_call: int, kv_heads: int) -> None:
    """One rank has tiles of all rows; the ranks of a ring have smaller ones, of which fewer are cut."""
    inputs, mask = random_inputs(ROWS, HEADS, kv_heads, HEAD_DIM), Mask(ROWS)
    want = oracle(inputs, dense_visibility(mask, ROWS))
    kernel = LimitedKernel(ReferenceKernel(), heads_per_call * (ROWS // (inner * outer)) * HEAD_DIM)
    for circulates in ("kv", "q"):
        group = build_group(ring_method(inner, outer, backward_circulates=circulates), mask, kernel)
        found = errors(group.run(inputs).values, want)
        assert all(error < 1e-10 for error in found.values()), found
    assert any(queries < HEADS for queries, _ in kernel.calls) == (heads_per_call < HEADS)
    if (inner, outer) == (1, 1):
        assert sum(queries for queries, _ in kernel.calls) == 4 * HEADS  # both directions, both circulations


def test_gradients_of_a_kv_head_that_parts_share_are_summed_in_fp32() -> None:
    inputs, mask = random_inputs(64, HEADS, 1, 64, dtype=torch.bfloat16), Mask(64)
    want = oracle(inputs, dense_visibility(mask, 64))

    def found(kernel: TileKernel) -> dict[str, float]:
        return relative_errors(build_group(ring_method(1), mask, kernel).run(inputs).values, want)

    whole, parts = found(CpuFlashKernel()), found(LimitedKernel(CpuFlashKernel(), 3 * 64 * 64))
    assert all(parts[name] <= 1.1 * whole[name] for name in whole), (parts, whole)


def test_a_fake_run_computes_three_sample_parts() -> None:
    inputs, mask = random_inputs(ROWS, HEADS, 4, HEAD_DIM), Mask(ROWS)
    kernel = LimitedKernel(ReferenceKernel(), ROWS * HEAD_DIM)
    with use_fake_run(FakeRun()):
        build_group(ring_method(1), mask, kernel).run(inputs)
    assert len(kernel.calls) == 2 * 3
