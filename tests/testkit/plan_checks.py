"""What every plan must hold, in one place: rules, counts, tiles, channels, bytes and float64 numbers."""

from __future__ import annotations

from itertools import chain, pairwise

import torch

from engine.kernels.attention.base import TileKernel
from engine.kernels.attention.cuda import window_of
from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.methods.blocks import Blocks
from engine.planning.program.ops import RankPlan, Tile, TokenBytes
from engine.planning.schedules.plan import PlanPair
from engine.planning.topology import Topology
from engine.planning.visibility.mask import Mask
from testkit.attention_oracle import Group, dense_visibility, errors, oracle, random_inputs
from testkit.counting import band_mask, prove_pair
from testkit.plan_rules import check_rules

HEAD_DIMS = (8, 8)  # of q and k, and of v
EXACT = 1e-10  # float64 sums in another order; seen: 4e-15


def check_plans(
    plans: PlanPair,
    mask: Mask,
    blocks: Blocks,
    heads: tuple[int, int],
    *,
    kernel: TileKernel | None = None,
    late: bool = True,
    topology: Topology | None = None,
    before: int | None = None,
    head_dims: tuple[int, int] = HEAD_DIMS,
    sinks: torch.Tensor | None = None,
) -> None:
    """The plans of all ranks: proven by counting, with dense attention's numbers and the planned bytes.

    `sinks` are learnable, [heads]; they send nothing, so the planned bytes are the same.

    Counted over a hub that delivers late if `late`, computed over the other kind: each finds what the other cannot.
    """
    for plan in filter(None, (plans.forward, plans.recompute, plans.backward)):
        check_rules(plan)
        for rank_plan in plan.ranks.values():
            check_places(rank_plan)
    prove_pair(plans, mask, blocks, late=late, before=before)
    visible = dense_visibility(mask, blocks.rank_layout.seq_len)
    check_tiles(plans, blocks, visible, before)
    inputs = random_inputs(blocks.rank_layout.seq_len, *heads, head_dims[0], v_dim=head_dims[1])
    topology = topology or Topology(1, blocks.rank_layout.size)
    group = Group(plans, blocks, kernel or ReferenceKernel(), not late, topology, torch.float64, before, sinks)
    result = group.run(inputs)
    found = errors(result.values, oracle(inputs, visible, sinks))
    assert all(error < EXACT for error in found.values()), found
    tokens = TokenBytes(*heads, *head_dims, element_bytes=8, gradient_bytes=8, wire_gradient_bytes=8)
    assert plans.forward.bytes_by_link(tokens, topology) == result.forward_bytes
    assert plans.backward.bytes_by_link(tokens, topology) == result.backward_bytes


def check_places(plan: RankPlan) -> None:
    """Only loads and stores touch host memory."""
    views = [view for tile in plan.tiles() for view in (tile.q, tile.kv, tile.sums, tile.kv_sums)]
    views += [view for step in plan.steps for op in (*step.pre, *step.after) for view in (op.dst, op.src)]
    views += [transfer.view for transfer in plan.transfers() if transfer.source is None]
    assert {plan.buffers[view.buffer].where for view in views if view} <= {"device"}


def check_tiles(plans: PlanPair, blocks: Blocks, visible: torch.Tensor, before: int | None) -> None:
    """No pair is computed that nobody asked for, and every tile is one that stock kernels take."""
    asked = {"forward": visible, "backward": visible}
    if plans.recompute is not None:
        asked["recompute"] = visible[:before]
    for name, pairs in asked.items():
        tiles = list(chain.from_iterable(rank.tiles() for rank in getattr(plans, name).ranks.values()))
        computed = sum(check_tile(tile) for tile in tiles)
        assert computed == blocks.grid.heads * int(pairs.sum()), name  # every part of the heads has all of them


def check_tile(tile: Tile) -> int:
    """Visible pairs of a tile that is full, square and causal, or a window, and has no blind row."""
    band = tile.band
    seen = band_mask(band)
    assert seen.any(0).all(), f"a key that nobody sees: {tile}"
    assert seen.any(1).all(), f"a query that sees nothing: {tile}"
    if band.is_causal:
        assert band.num_queries == band.num_keys, f"causal, but not square: {tile}"
    elif not band.is_full:
        window_of(band)  # asserts that it is one
    return int(seen.sum())


def windows(plans: PlanPair) -> int:
    """Tiles that only a kernel with windows can compute."""
    tiles = chain.from_iterable(r.tiles() for plan in (plans.forward, plans.backward) for r in plan.ranks.values())
    return sum(tile.band.kind == "band" for tile in tiles)


def same_but_for_step_numbers(alone: RankPlan, of_all: RankPlan) -> bool:
    """Whether a rank that planned alone has its part of the whole: steps in which no planned rank acts are left out."""
    steps = [[(s.pre, s.post, s.tiles, s.wait, s.after) for s in plan.steps] for plan in (alone, of_all)]
    assert all(a.index < b.index for a, b in pairwise(alone.steps))
    return alone.buffers == of_all.buffers and steps[0] == steps[1]
