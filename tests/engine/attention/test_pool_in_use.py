"""A layer's forward and backward passes share one block of memory and stop allocating buffers after the first steps."""

from __future__ import annotations

import torch
from attention_oracle import random_inputs
from test_attention_gloo import HEAD_DIM, HEADS, build, local_rows

from engine.attention.buffers import BufferPool, Place, allocate_bytes


def blocks_per_step() -> tuple[list[int], int]:
    """Blocks allocated up to each of five training steps, and bytes that stay."""
    sizes: list[int] = []

    def allocate(place: Place, size: int) -> torch.Tensor:
        sizes.append(size)
        return allocate_bytes(place, size)

    layer = build(35, 2, {"preset": "burst"}, 2)
    pool = BufferPool(allocate=allocate)
    object.__setattr__(layer.group, "pool", pool)  # before the first plan is made
    inputs = random_inputs(35, HEADS, 2, HEAD_DIM)
    counts = []
    for _ in range(5):
        args = [local_rows(layer, x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        torch.autograd.grad(layer(*args), args, local_rows(layer, inputs.dout))
        counts.append(len(sizes))
    return counts, pool.idle_bytes


def test_training_steps_stop_allocating_buffers(ranks) -> None:
    for counts, idle_bytes in ranks(4).run(blocks_per_step):
        assert 0 < counts[2] == counts[3] == counts[4]
        assert idle_bytes > 0
