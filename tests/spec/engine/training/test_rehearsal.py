"""A sampled plan has the same buffers and the largest work of each kind; the stand-in kernel takes what it should."""

from __future__ import annotations

import pytest
import torch
from testkit.resolved import method_of

from engine.config.settings import AttentionConfig, ModelConfig, RunConfig
from engine.device.live_tensors import LiveTensorTracker
from engine.kernels.attention.base import TileGradients
from engine.planning.methods.blocks import divide_sequence
from engine.planning.program.ops import RankPlan, Tile
from engine.planning.schedules.plan import plan_method
from engine.planning.topology import Topology
from engine.planning.visibility.mask import Band, Mask
from engine.training.fake_run.stand_ins import StandInFlashKernel, sampled_plan

MODEL = ModelConfig(num_heads=8, num_kv_heads=8, head_dim=16, hidden_size=128)


def plans_of(preset: str, seq_len: int = 256) -> list[RankPlan]:
    """Plans of both passes of all ranks of two nodes of four."""
    config = RunConfig(model=MODEL, attention=AttentionConfig(preset=preset))  # type: ignore[arg-type]
    method = method_of(config, Topology(2, 4))
    blocks = divide_sequence(method, seq_len)
    pair = plan_method(method, Mask(seq_len), blocks)
    return [plan for passes in (pair.forward, pair.backward) for plan in passes.ranks.values()]


def rows_of(tile: Tile) -> tuple[int, int]:
    return tile.q.stop - tile.q.start, tile.kv.stop - tile.kv.start


@pytest.mark.parametrize("preset", ["burst", "ring", "striped", "usp", "megatron_allgather", "loongtrain"])
def test_a_sampled_plan_has_the_memory_peaks_of_the_plan(preset: str) -> None:
    assert sampled_plan(RankPlan(0, (), ())) == RankPlan(0, (), ())
    for plan in plans_of(preset):
        kinds = {op.op for step in plan.steps for op in (*step.pre, *step.after)}
        short = sampled_plan(plan)
        assert {op.op for step in short.steps for op in (*step.pre, *step.after)} == kinds
        assert short.buffers == plan.buffers
        assert len(short.steps) == 1
        assert not list(short.transfers())
        assert set(short.tiles()) <= set(plan.tiles())
        for axis in (0, 1):
            assert max(rows_of(t)[axis] for t in short.tiles()) == max(rows_of(t)[axis] for t in plan.tiles())


def kernel_peak(rows: int, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Bytes that forward and backward of one tile take at most, beyond their inputs."""
    kernel = StandInFlashKernel()
    q = torch.zeros(rows, heads, head_dim, dtype=torch.bfloat16)
    k, v = (torch.zeros(rows, kv_heads, head_dim, dtype=torch.bfloat16) for _ in range(2))
    lse = torch.zeros(rows, heads)
    band = Band(0, rows, 0, rows)
    grads = TileGradients(torch.zeros_like(q), torch.zeros_like(q), lse)
    inputs = (*grads, q, k, v)
    with LiveTensorTracker() as tracker:
        tracker.watch(inputs)
        before = tracker.live_bytes
        kernel.forward(q, k, v, band)
        forward = tracker.peak_bytes - before
        tracker.reset_peak()
        kernel.backward(grads, q, k, v, band)
    return forward, tracker.peak_bytes - before


def test_the_stand_in_kernel_takes_what_flash_attention_2_takes() -> None:
    rows, heads, kv_heads, head_dim = 200, 4, 2, 48
    forward, backward = kernel_peak(rows, heads, kv_heads, head_dim)
    assert forward == rows * heads * (2 * head_dim + 4)  # out in bf16, lse in fp32
    results = 2 * rows * head_dim * (heads + 2 * kv_heads)
    rounded = 256  # rows, to a multiple of 128
    summed = 4 * rounded * heads * 64 + 4 * rounded * heads  # dq with 48 columns rounded to 64, and rowsum(dout * out)
    expanded = 2 * 2 * rows * heads * head_dim
    lse_copy = 4 * rows * heads
    assert backward == results + summed + expanded + lse_copy
