"""What stands in for ranks and kernels while a training step runs on tensors without values.

A plan's buffers are allocated before its first step, so its later steps add nothing but the temporaries of one tile or
one local op at a time: a rehearsal runs the largest of each kind once, whatever the number of ranks and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from engine.attention.runtime import AttentionRuntime
from engine.kernels.attention.base import Capabilities, TileGradients, TileResult
from engine.kernels.attention.heads import CUDA_CALL_ELEMENTS
from engine.planning.program.ops import LocalOp, RankPlan, Step, Tile
from engine.planning.visibility.mask import Band

Item = TypeVar("Item")
_ROUNDED_ROWS = 128  # FlashAttention-2 rounds rows up to this


def rehearsed_runtime(runtime: AttentionRuntime) -> AttentionRuntime:
    """`runtime` with all its plans rehearsed."""
    plans = {name: value for name, value in vars(runtime).items() if isinstance(value, RankPlan)}
    return replace(runtime, **{name: rehearsed(plan) for name, plan in plans.items()})  # type: ignore[arg-type]


def rehearsed(plan: RankPlan) -> RankPlan:
    """The same buffers and one step without transfers: of every kind the largest op and the largest tiles.

    Partial results are finished after the tiles: only then is there memory for what they become.
    """
    if not plan.steps:
        return plan
    ops = [op for step in plan.steps for op in (*step.pre, *step.after)]

    def op_kind(op: LocalOp) -> Hashable:
        ends = [plan.buffers[view.buffer] for view in (op.dst, op.src) if view is not None]
        return (op.op, *((buffer.kind, buffer.heads, buffer.where) for buffer in ends))

    def tile_kind(tile: Tile) -> Hashable:  # a general band needs a bias
        return plan.buffers[tile.q.buffer].heads, tile.heads, tile.kv_sums is None, tile.band.kind

    chosen = _largest(ops, op_kind, lambda op: op.dst.stop - op.dst.start)
    # A tile's temporaries are those of its queries and of its keys.
    measures: list[Callable[[Tile], int]] = [
        lambda tile: tile.band.num_queries,
        lambda tile: tile.band.num_keys,
        lambda tile: tile.band.num_queries + tile.band.num_keys,
    ]
    tiles = dict.fromkeys(tile for measure in measures for tile in _largest(plan.tiles(), tile_kind, measure))
    finishes = tuple(op for op in chosen if op.op == "finish")
    others = tuple(op for op in chosen if op.op != "finish")
    return replace(plan, steps=(Step(0, pre=others, tiles=tuple(tiles), after=finishes),))


def _largest(items: Iterable[Item], kind: Callable[[Item], Hashable], measure: Callable[[Item], int]) -> list[Item]:
    """The first of the largest items of every kind."""
    found: dict[Hashable, Item] = {}
    for item in sorted(items, key=measure, reverse=True):
        found.setdefault(kind(item), item)
    return list(found.values())


class StandInFlashKernel:
    """Allocates what FlashAttention-2 allocates for a tile, and computes nothing.

    forward    out, and lse [H, nq] fp32
    backward   dq, dk, dv; dq summed in fp32 [nq rounded to 128, H, D rounded to 32, above 128 to 64]; rowsum(dout *
               out) fp32 [H, nq rounded]; with grouped heads dk and dv once per query head

    Source: mha_fwd and mha_bwd in flash_api.cpp of flash-attention 2 and of torch's copy of it.
    """

    name = "stand_in_flash"
    capabilities = Capabilities(
        frozenset({"cpu"}),
        frozenset({torch.bfloat16, torch.float16}),
        max_head_dim=256,
        max_call_elements=CUDA_CALL_ELEMENTS,
    )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        """Memory for (out, lse)."""
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        return q.new_empty(*q.shape[:2], v.shape[2]), lse.transpose(0, 1)

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        """Memory for (dq, dk, dv)."""
        rows, num_heads, head_dim = q.shape
        multiple = 32 if head_dim <= 128 else 64
        rounded, width = -(-rows // _ROUNDED_ROWS) * _ROUNDED_ROWS, -(-head_dim // multiple) * multiple
        held = [grads.dout.contiguous(), grads.lse.transpose(0, 1).contiguous()]
        dq, dk, dv = map(torch.empty_like, (q, k, v))
        held += [
            q.new_empty(shape, dtype=torch.float32) for shape in ((num_heads, rounded), (rounded, num_heads, width))
        ]
        if num_heads != k.shape[1]:
            held += [k.new_empty(k.shape[0], num_heads, head_dim) for _ in range(2)]
        return TileResult(dq, dk, dv)
