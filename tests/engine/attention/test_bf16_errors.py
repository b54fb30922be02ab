"""bf16 attention on any number of ranks is about as exact as one kernel on one rank, both against float64."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from attention_oracle import Group, build_group, causal, oracle, random_inputs, relative_errors

from engine.attention.kernels.cpu_flash import CpuFlashKernel
from engine.attention.mask import Mask
from engine.attention.methods import divide_sequence, plan_method
from engine.attention.planners.ring import Ring
from engine.attention.presets import resolve_attention
from engine.attention.topology import Topology
from engine.config import AttentionConfig, ModelConfig, RunConfig, TrainConfig


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


LARGE_ROWS = 2048


@pytest.fixture(scope="module")
def on_one_rank():
    """Inputs in bfloat16, what float64 makes of them, and the errors of the one kernel of one rank."""
    inputs = random_inputs(LARGE_ROWS, 32, 32, head_dim=16, dtype=torch.bfloat16)
    want = dense_causal(inputs)
    return inputs, want, relative_errors(on_ranks("single", Topology(1, 1), inputs), want)


# The others move the same tiles over links that these have, too.
ALIKE = [pytest.param(preset, marks=pytest.mark.thorough) for preset in ("ring", "megatron_cp", "ulysses")]


@pytest.mark.parametrize("preset", ["burst", "usp", "megatron_allgather", *ALIKE])
@pytest.mark.thorough
def test_bf16_error_is_that_of_one_kernel_up_to_32_ranks(preset, on_one_rank):
    inputs, want, single = on_one_rank
    got = relative_errors(on_ranks(preset, Topology(4, 8), inputs), want)
    assert all(got[name] <= 1.3 * single[name] for name in got), (got, single)


def on_ranks(preset, topology, inputs) -> dict[str, torch.Tensor]:
    """Results of causal attention by `preset` over all ranks of `topology`."""
    config = RunConfig(
        model=ModelConfig(num_heads=32, num_kv_heads=32, head_dim=16),
        attention=AttentionConfig(preset=preset),
        train=TrainConfig(seq_len=LARGE_ROWS),
    )
    method, mask = resolve_attention(config, topology), Mask(LARGE_ROWS)
    assert method.cp_size == topology.nodes * topology.local_ranks
    blocks = divide_sequence(method, LARGE_ROWS, [mask])
    return Group(plan_method(method, mask, blocks), blocks, CpuFlashKernel()).run(inputs).values


def dense_causal(inputs) -> dict[str, torch.Tensor]:
    """Causal float64 attention by torch's own dense path."""
    q, k, v = (x.double().transpose(0, 1)[None].detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout.double().transpose(0, 1)[None])
    names = ("out", "dq", "dk", "dv")
    return {name: x.detach()[0].transpose(0, 1) for name, x in zip(names, (out, *grads), strict=True)}
