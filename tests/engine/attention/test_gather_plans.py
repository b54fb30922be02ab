"""Gathered K,V: proven by counting, equal to dense attention, bytes as published, messages hidden behind tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attention_oracle import Group, dense_visibility, errors, oracle, random_inputs
from hypothesis import given, settings
from test_ring_variants import (
    LAYOUTS,
    MHA,
    SHAPES,
    ListeningVisibility,
    blocks_of,
    exposed,
    hops,
    masks,
    prove,
    same_but_for_step_numbers,
    variants,
)

from engine.attention.kernels.reference import ReferenceKernel
from engine.attention.layout import Layout, build_layout
from engine.attention.mask import Mask, Visibility
from engine.attention.methods import PlanPair
from engine.attention.plan import Channel, Kind
from engine.attention.planners.gather import plan_gather_backward, plan_gather_forward
from engine.attention.planners.ring import Ring
from engine.attention.topology import Topology


def gather_plans(mask: Mask, layout: Layout, ring: Ring) -> PlanPair:
    visibility = Visibility(mask, layout)
    return PlanPair(plan_gather_forward(visibility, ring), plan_gather_backward(visibility, ring))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_every_shape_is_proven_by_counting(inner: int, outer: int, layout: str) -> None:
    rows = 2 * inner * outer + 3
    for mask in masks(rows):
        blocks = build_layout(layout, rows, inner * outer)  # type: ignore[arg-type]
        ring = Ring(inner, outer)
        prove(gather_plans(mask, blocks, ring), mask, blocks_of(blocks, ring))


@settings(max_examples=80, deadline=None)
@given(variants())
def test_random_masks_and_options_are_proven(case: tuple[Mask, Layout, Ring]) -> None:
    mask, layout, ring = case
    ring = replace(ring, backward_order="same", prefetch_steps=ring.tail_steps - 1 if ring.tail_steps else None)
    prove(gather_plans(mask, layout, ring), mask, blocks_of(layout, ring))


@pytest.mark.parametrize("mask", [Mask(26), Mask(26, window=6), Mask(26, documents=(0, 3, 14))], ids=str)
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (5, 1), (1, 3), (2, 3)])
def test_numbers_equal_dense_attention(inner: int, outer: int, mask: Mask) -> None:
    ring = Ring(inner, outer)
    layout = build_layout("zigzag", 26, ring.size)
    inputs = random_inputs(26, 4, 2)
    group = Group(gather_plans(mask, layout, ring), blocks_of(layout, ring), ReferenceKernel())
    found = errors(group.run(inputs).values, oracle(inputs, dense_visibility(mask, 26)))
    assert all(error < 1e-10 for error in found.values()), found


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("gradient_bytes", [2, 4])
def test_bytes_follow_the_published_formulas(size: int, gradient_bytes: int) -> None:
    tokens = replace(MHA, wire_gradient_bytes=gradient_bytes)
    ring = Ring(size, whole_blocks=True, narrow_gradients=gradient_bytes == 2)
    plans = gather_plans(Mask(6 * size), build_layout("zigzag", 6 * size, size), ring)
    block = 4 * 6 * 4 * 128  # C: K and V of one rank in bf16
    for plan, expected in (
        (plans.forward, (size - 1) * block),
        (plans.backward, (size - 1) * block * (2 + gradient_bytes) // 2),
    ):
        links = plan.bytes_by_link(tokens, Topology(1, size))
        assert {link.total for link in links.values()} == {expected}


def test_only_visible_rows_are_sent() -> None:
    layout = build_layout("contiguous", 80, 8)
    for mask, blocks in ((Mask(80), 8 * 7 / 2), (Mask(80, window=5), 7 * 4 / 10), (Mask(80, documents=(0, 40)), 12)):
        plan = gather_plans(mask, layout, Ring(8)).forward
        links = plan.bytes_by_link(MHA, Topology(1, 8))
        assert sum(link.total for link in links.values()) == blocks * 10 * MHA.of(Kind.KV)


@pytest.mark.parametrize(("inner", "outer"), [(w, o) for w, o in SHAPES if w * o > 1])
def test_all_but_the_last_gradient_hide_behind_tiles(inner: int, outer: int) -> None:
    size = inner * outer
    plans = gather_plans(Mask(4 * size, causal=False), build_layout("contiguous", 4 * size, size), Ring(inner, outer))
    last = Channel.GRADIENT_INNER if outer == 1 else Channel.GRADIENT_OUTER
    for rank in range(size):
        assert exposed(plans.forward.ranks[rank]) == []
        assert exposed(plans.backward.ranks[rank]) == [last] * 2  # one sent, one received
        assert all(len(step.post) == 0 for step in plans.forward.ranks[rank].steps[1:])
    assert hops(plans.forward, Channel.PAYLOAD_INNER) == {inner - 1}
    assert hops(plans.forward, Channel.PAYLOAD_OUTER) == {size - inner}
    assert hops(plans.backward, Channel.GRADIENT_INNER) == {inner - 1}
    assert hops(plans.backward, Channel.GRADIENT_OUTER) == {size - inner}


@pytest.mark.parametrize(("prefetch_steps", "blocks"), [(None, 7), (0, 2), (1, 3), (4, 6)])
def test_prefetch_decides_how_many_blocks_are_held(prefetch_steps: int | None, blocks: int) -> None:
    ring = Ring(4, 2, prefetch_steps=prefetch_steps)
    plan = gather_plans(Mask(64, causal=False), build_layout("contiguous", 64, 8), ring).forward
    for rank_plan in plan.ranks.values():
        assert sum(slot.kind == Kind.KV and slot.pin is None for slot in rank_plan.slots) == blocks


def test_gradients_need_few_buffers() -> None:
    plan = gather_plans(Mask(64), build_layout("zigzag", 64, 8), Ring(8)).backward
    for rank_plan in plan.ranks.values():
        assert sum(slot.kind == Kind.DKV and slot.pin is None for slot in rank_plan.slots) <= 3


@pytest.mark.parametrize(("inner", "outer"), [(6, 1), (2, 3), (3, 2), (1, 6)])
def test_a_rank_that_plans_alone_gets_its_part_of_the_whole(inner: int, outer: int) -> None:
    ring = Ring(inner, outer)
    visibility = ListeningVisibility(Mask(25), build_layout("zigzag", 25, 6))
    whole = plan_gather_forward(visibility, ring), plan_gather_backward(visibility, ring)
    for rank in range(6):
        visibility.asked.clear()
        alone = plan_gather_forward(visibility, ring, (rank,)), plan_gather_backward(visibility, ring, (rank,))
        assert visibility.asked == {rank}
        for mine, theirs in zip(alone, whole, strict=True):
            assert same_but_for_step_numbers(mine.ranks[rank], theirs.ranks[rank])
