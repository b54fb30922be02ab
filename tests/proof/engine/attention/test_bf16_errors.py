"""bf16 attention on any number of ranks is about as exact as one kernel on one rank, both against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from testkit.attention_oracle import build_group, causal, oracle, random_inputs, relative_errors, ring_method

from engine.kernels.attention.cpu_flash import CpuFlashKernel
from engine.planning.visibility.mask import Mask

ROWS = 1024
NARROW = {"inner": 4, "gradient_wire_dtype": "bfloat16"}  # on the wire; up to four ranks they hold the goal
LARGEST = pytest.param({"inner": 8, "outer": 4}, marks=pytest.mark.thorough)
RINGS = [{"inner": 2}, {"inner": 8}, {"inner": 4, "outer": 2}, {"inner": 16}, NARROW, LARGEST]


@pytest.mark.parametrize("circulates", ["kv", "q"])
@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.pairwise
def test_bf16_error_is_at_most_that_of_one_kernel(ring: dict[str, Any], circulates: str, kv_heads: int) -> None:
    inputs = random_inputs(ROWS, 4, kv_heads, head_dim=64, dtype=torch.bfloat16)
    want = oracle(inputs, causal(ROWS))
    group = build_group(ring_method(**ring, backward_circulates=circulates), Mask(ROWS), CpuFlashKernel())
    ours = relative_errors(group.run(inputs).values, want)
    single = relative_errors(one_kernel(inputs), want)
    ratios = {name: ours[name] / single[name] for name in ours}
    assert all(ratio <= 1.3 for ratio in ratios.values()), ratios  # goal of the project; no more than 1.2 seen


def one_kernel(inputs):
    """The stock bf16 operator called once on the whole sequence, with its own out."""
    q, k, v, dout = (x.transpose(0, 1)[None] for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, True)
    return dict(zip(("out", "dq", "dk", "dv"), (x[0].transpose(0, 1).double() for x in (out, *grads)), strict=True))
