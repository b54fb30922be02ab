"""Substitutes for plans and kernels while a training step runs on tensors without values.

A plan allocates its buffers before its first step, and its steps only add the temporaries of one tile or local op at a
time. So a fake run executes the largest of each kind once, whatever the number of ranks and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.runtime import AttentionRuntime
from engine.kernels.attention.base import Capabilities, TileGradients, TileResult
from engine.kernels.attention.heads import CUDA_CALL_ELEMENTS
from engine.planning.program.ops import LocalOp, RankPlan, Step, Tile
from engine.planning.visibility.mask import Band

Item = TypeVar("Item")
_ROUNDED_ROWS = 128  # FlashAttention-2 rounds rows up to this


def sampled_runtime(runtime: AttentionRuntime) -> AttentionRuntime:
    """Return `runtime` with `sampled_plan` of all its plans."""
    plans = {name: value for name, value in vars(runtime).items() if isinstance(value, RankPlan)}
    return replace(runtime, **{name: sampled_plan(plan) for name, plan in plans.items()})  # type: ignore[arg-type]


def sampled_plan(plan: RankPlan) -> RankPlan:
    """Return a plan with the same buffers and one step without transfers: the largest op and tiles of every kind.

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
    """Return the largest item of every kind."""
    largest: dict[Hashable, Item] = {}
    for item in sorted(items, key=measure, reverse=True):
        largest.setdefault(kind(item), item)
    return list(largest.values())


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
        """Allocate out and lse."""
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        return q.new_empty(*q.shape[:2], v.shape[2]), lse.transpose(0, 1)

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        """Allocate dq, dk and dv, with the kernel's temporaries alive at the same time."""
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


class StandInGroupedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside the body the grouped products of experts allocate their results, and compute nothing.

    torch (2.13) computes them in fp32 too, but knows the shapes of fake results for bf16 alone.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run `func`."""
        kwargs = kwargs or {}
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **kwargs)
        left, right, offsets = (*args, *(() if len(args) > 2 else (kwargs["offs"],)))[:3]
        if left.dim() == right.dim() == 2:  # [K, S] x [S, N] in groups of S -> [E, K, N]: gradients of weights
            return left.new_empty(offsets.shape[0], left.shape[0], right.shape[1])
        return left.new_empty(left.shape[0], right.shape[2])  # [S, K] x [E, K, N] -> [S, N]
