"""Every preset, ring shape, layout and mask equals dense float64 attention, on 1 to 8 ranks in one process."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from attention_oracle import build_group, causal, dense_visibility, errors, oracle, random_inputs, relative_errors

from engine.attention.kernels.base import TileKernel
from engine.attention.kernels.cpu_flash import CpuFlashKernel
from engine.attention.kernels.reference import ReferenceKernel
from engine.attention.mask import Mask
from engine.attention.planners.ring import Ring

EXACT = 1e-10  # float64 sums in another order; seen: 4e-15
SHAPES = [(1, 1), (2, 1), (3, 1), (2, 2), (1, 4), (5, 1), (3, 2), (2, 3), (7, 1), (8, 1), (4, 2), (2, 4), (1, 8)]


@pytest.mark.parametrize("circulates", ["kv", "q"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
@pytest.mark.pairwise
def test_group_equals_dense_attention(
    inner: int, outer: int, layout: Literal["zigzag"], circulates: Literal["kv", "q"]
) -> None:
    rows = 3 * inner * outer + 5  # never divides
    for kv_heads in (4, 2):
        inputs = random_inputs(rows, 4, kv_heads)
        for mask in (Mask(rows), Mask(rows, causal=False)):
            group = build_group(layout, Ring(inner, outer), circulates, mask, CpuFlashKernel())
            found = errors(group.run(inputs).values, oracle(inputs, dense_visibility(mask, rows)))
            assert all(error < EXACT for error in found.values()), found


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("kernel", [ReferenceKernel(), CpuFlashKernel()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    "mask",
    [Mask(29, window=5), Mask(29, documents=(0, 1, 8, 20)), Mask(29, causal=False, window=4), Mask(26)],
    ids=["window", "documents", "two-sided window", "padding"],
)
def test_other_masks_equal_dense_attention_under_both_hubs(mask: Mask, kernel: TileKernel, late: bool) -> None:
    inputs = random_inputs(29, 4, 2)
    want = oracle(inputs, dense_visibility(mask, 29))
    for layout in ("contiguous", "zigzag", "striped"):
        for circulates in ("kv", "q"):
            group = build_group(layout, Ring(3, 2), circulates, mask, kernel, rows=29, late=late)  # type: ignore[arg-type]
            found = errors(group.run(inputs).values, want)
            assert all(error < EXACT for error in found.values()), (layout, circulates, found)


@pytest.mark.parametrize("circulates", ["kv", "q"])
@pytest.mark.parametrize("ring", [Ring(2), Ring(8), Ring(4, 2), Ring(16)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.pairwise
def test_bf16_error_is_at_most_that_of_one_kernel(ring: Ring, circulates: Literal["kv", "q"], kv_heads: int) -> None:
    rows = 1024
    inputs = random_inputs(rows, 4, kv_heads, head_dim=64, dtype=torch.bfloat16)
    want = oracle(inputs, causal(rows))
    group = build_group("zigzag", ring, circulates, Mask(rows), CpuFlashKernel())
    ours = relative_errors(group.run(inputs).values, want)
    single = relative_errors(one_kernel(inputs), want)
    ratios = {name: ours[name] / single[name] for name in ours}
    assert all(ratio <= 1.3 for ratio in ratios.values()), ratios  # goal of the project; no more than 1.2 seen


@pytest.mark.parametrize("circulates", ["kv", "q"])
def test_bf16_gradients_on_the_wire_hold_the_goal_on_four_ranks(circulates: Literal["kv", "q"]) -> None:
    inputs = random_inputs(1024, 4, 4, head_dim=64, dtype=torch.bfloat16)
    want = oracle(inputs, causal(1024))
    group = build_group("zigzag", Ring(4, narrow_gradients=True), circulates, Mask(1024), CpuFlashKernel())
    ours, single = relative_errors(group.run(inputs).values, want), relative_errors(one_kernel(inputs), want)
    assert all(ours[name] <= 1.3 * single[name] for name in ours), (ours, single)


def one_kernel(inputs):
    """The stock bf16 operator called once on the whole sequence, with its own out."""
    q, k, v, dout = (x.transpose(0, 1)[None] for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, True)
    return dict(zip(("out", "dq", "dk", "dv"), (x[0].transpose(0, 1).double() for x in (out, *grads)), strict=True))
