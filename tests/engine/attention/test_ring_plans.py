"""Every plan is proven by counting under a late and an eager transport; its bytes follow the published formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.counting import prove_plan
from engine.attention.layout import build_layout
from engine.attention.mask import Mask, Visibility
from engine.attention.plan import AttentionPlan, Channel, Kind, TokenBytes
from engine.attention.planners.ring import Ring, plan_backward, plan_forward, preferred_direction
from engine.attention.topology import Topology

SHAPES = [(w, size // w) for size in range(1, 9) for w in range(1, size + 1) if size % w == 0]
LAYOUTS = ("contiguous", "zigzag", "striped")
MHA = TokenBytes(num_heads=4, num_kv_heads=4, head_dim=128)


def all_plans(visibility: Visibility, ring: Ring) -> list[AttentionPlan]:
    return [
        plan_forward(visibility, ring),
        plan_backward(visibility, ring, "kv"),
        plan_backward(visibility, ring, "q"),
    ]


def prove(visibility: Visibility, ring: Ring) -> None:
    for plan in all_plans(visibility, ring):
        plan.validate()
        prove_plan(plan, visibility, late=True)
        prove_plan(plan, visibility, late=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
@pytest.mark.pairwise
def test_every_ring_shape_is_proven_by_counting(inner: int, outer: int, layout: str) -> None:
    size = inner * outer
    rows = 2 * size + 3
    for mask in (Mask(rows), Mask(rows, causal=False), Mask(rows - 2)):
        for direction in (-1, 1):
            prove(Visibility(mask, build_layout(layout, rows, size)), Ring(inner, outer, direction))


@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (4, 1), (1, 3), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("option", ["narrow_gradients", "whole_blocks", "own_gradient_travels"])
def test_every_option_is_proven_by_counting(inner: int, outer: int, option: str) -> None:
    rows = 2 * inner * outer + 1
    for mask in (Mask(rows), Mask(rows, window=4), Mask(rows, documents=(0, 1, 4) if rows > 4 else ())):
        visibility = Visibility(mask, build_layout("zigzag", rows, inner * outer))
        prove(visibility, replace(Ring(inner, outer), **{option: True}))


@st.composite
def ring_cases(draw: st.DrawFn) -> tuple[Visibility, Ring]:
    inner, outer = draw(st.sampled_from([(w, o) for w, o in SHAPES if w * o <= 6] + [(7, 1), (2, 4)]))
    rows = draw(st.integers(1, 24))
    starts = draw(st.sets(st.integers(1, 23), max_size=3))
    documents = (0, *sorted(s for s in starts if s < rows)) if starts else ()
    window = draw(st.none() | st.integers(1, rows + 2))
    mask = Mask(rows, draw(st.booleans()), window, documents)
    layout = build_layout(draw(st.sampled_from(LAYOUTS)), rows + draw(st.integers(0, 4)), inner * outer)
    ring = Ring(
        inner,
        outer,
        draw(st.sampled_from([-1, 1])),
        narrow_gradients=draw(st.booleans()),
        whole_blocks=draw(st.booleans()),
        own_gradient_travels=draw(st.booleans()),
        tail_steps=draw(st.integers(0, inner)),
    )
    return Visibility(mask, layout), ring


@settings(max_examples=250, deadline=None)
@given(ring_cases())
def test_random_shapes_masks_and_options_are_proven(case: tuple[Visibility, Ring]) -> None:
    prove(*case)


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_a_rank_that_plans_alone_gets_its_part_of_the_whole(inner: int, outer: int) -> None:
    size = inner * outer
    visibility = Visibility(Mask(4 * size + 1), build_layout("zigzag", 4 * size + 1, size))
    for whole, circulates in zip(all_plans(visibility, Ring(inner, outer)), ("forward", "kv", "q"), strict=True):
        for rank in range(size):
            alone = rank_plan(visibility, Ring(inner, outer), circulates, rank)
            assert alone.slots == whole.ranks[rank].slots
            for mine, theirs in zip(alone.steps, whole.ranks[rank].steps, strict=True):
                assert replace(mine, index=theirs.index) == theirs


def rank_plan(visibility: Visibility, ring: Ring, circulates: str, rank: int):
    if circulates == "forward":
        return plan_forward(visibility, ring, only=(rank,)).ranks[rank]
    return plan_backward(visibility, ring, "kv" if circulates == "kv" else "q", only=(rank,)).ranks[rank]


def hops(plan: AttentionPlan, rank: int, channel: Channel) -> int:
    return sum(t.op == "send" and t.channel == channel for t in plan.ranks[rank].transfers())


@pytest.mark.parametrize(("inner", "outer"), [(w, o) for w, o in SHAPES if w > 1 and o > 1])
@pytest.mark.parametrize("circulates", ["kv", "q"])
def test_double_ring_makes_the_promised_hops(inner: int, outer: int, circulates: Literal["kv", "q"]) -> None:
    size = inner * outer
    visibility = Visibility(Mask(4 * size, causal=False), build_layout("contiguous", 4 * size, size))
    plan = plan_backward(visibility, Ring(inner, outer), circulates)
    for rank in range(size):
        assert hops(plan, rank, Channel.PAYLOAD_INNER) == outer * (inner - 1)
        assert hops(plan, rank, Channel.PAYLOAD_OUTER) == outer - 1
        assert hops(plan, rank, Channel.GRADIENT_INNER) == outer * (inner - 1) + 1
        assert hops(plan, rank, Channel.GRADIENT_OUTER) == outer - 1


def total_bytes(plan: AttentionPlan, token_bytes: TokenBytes) -> list[int]:
    links = plan.bytes_by_link(token_bytes, Topology(1, plan.size))
    return [link.total for link in links.values()]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("gradient_bytes", [2, 4])
def test_published_formulas_hold_when_whole_blocks_travel(size: int, gradient_bytes: int) -> None:
    rows, ring = 6 * size, Ring(size, whole_blocks=True, own_gradient_travels=True)
    tokens = replace(MHA, wire_gradient_bytes=gradient_bytes, gradient_bytes=4)
    ring = replace(ring, narrow_gradients=gradient_bytes == 2)
    visibility = Visibility(Mask(rows), build_layout("zigzag", rows, size))
    local, width = rows // size, tokens.num_heads * tokens.head_dim
    block = 4 * local * width  # C: K and V of one rank in bf16
    assert total_bytes(plan_forward(visibility, ring), tokens) == [(size - 1) * block] * size
    kv = (size - 1) * block + size * block * gradient_bytes // 2
    assert total_bytes(plan_backward(visibility, ring, "kv"), tokens) == [kv] * size
    payload = local * (4 * width + 8 * tokens.num_heads)
    q = (size - 1) * payload + size * local * gradient_bytes * width
    assert total_bytes(plan_backward(visibility, ring, "q"), tokens) == [q] * size


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_pruning_only_lowers_the_bytes(inner: int, outer: int, layout: str) -> None:
    size = inner * outer
    visibility = Visibility(Mask(4 * size + 1), build_layout(layout, 4 * size + 1, size))
    published = Ring(inner, outer, whole_blocks=True, own_gradient_travels=True)
    for ours, theirs in zip(all_plans(visibility, Ring(inner, outer)), all_plans(visibility, published), strict=True):
        assert sum(total_bytes(ours, MHA)) <= sum(total_bytes(theirs, MHA))


@pytest.mark.parametrize("size", [2, 5, 8])
def test_circulating_q_saves_24_percent_for_multi_head_attention(size: int) -> None:
    tokens = replace(MHA, wire_gradient_bytes=2)
    per_head = {
        "q": (tokens.of(Kind.QX) + tokens.of(Kind.DQ_WIRE)) / tokens.num_heads,
        "kv": (tokens.of(Kind.KV) + tokens.of(Kind.DKV_WIRE)) / tokens.num_heads,
    }
    assert per_head == {"q": 776, "kv": 1024}  # bytes per token and hop, D = 128, bf16 on the wire
    visibility = Visibility(Mask(4 * size, causal=False), build_layout("zigzag", 4 * size, size))
    ring = Ring(size, narrow_gradients=True)
    q, kv = (sum(total_bytes(plan_backward(visibility, ring, what), tokens)) for what in ("q", "kv"))
    assert q / kv == 776 / 1024


def test_circulating_towards_lower_ranks_moves_a_quarter_less_of_causal_zigzag() -> None:
    visibility = Visibility(Mask(64 * 32), build_layout("zigzag", 64 * 32, 32))
    down, up = (sum(total_bytes(plan_forward(visibility, Ring(32, direction=d)), MHA)) for d in (-1, 1))
    assert 0.23 <= 1 - down / up <= 0.26


@pytest.mark.parametrize(("inner", "outer"), [(8, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("circulates", ["kv", "q"])
def test_preferred_direction_never_costs_more_between_nodes(
    inner: int, outer: int, circulates: Literal["kv", "q"]
) -> None:
    visibility = Visibility(Mask(64), build_layout("zigzag", 64, 8))
    topology = Topology(outer, inner)
    cost = {}
    for direction in (-1, 1):
        links = plan_backward(visibility, Ring(inner, outer, direction), circulates).bytes_by_link(MHA, topology)
        cost[direction] = (
            sum(link.inter_bytes for link in links.values()),
            sum(link.total for link in links.values()),
        )
    chosen, other = (cost[sign * preferred_direction(circulates, outer, backward=True)] for sign in (1, -1))
    assert chosen[0] <= other[0]
    assert chosen[1] <= 1.05 * other[1]  # within a node the two may trade places by a few percent


@pytest.mark.parametrize(("inner", "outer", "slots"), [(8, 1, 2), (4, 2, 3), (4, 4, 4)])
def test_travelling_blocks_need_few_buffers(inner: int, outer: int, slots: int) -> None:
    size = inner * outer
    visibility = Visibility(Mask(4 * size), build_layout("zigzag", 4 * size, size))
    plan = plan_forward(visibility, Ring(inner, outer))
    for rank_plan_ in plan.ranks.values():
        assert sum(slot.kind == Kind.KV and slot.pin is None for slot in rank_plan_.slots) <= slots


def test_contiguous_causal_makes_no_useless_hop() -> None:
    visibility = Visibility(Mask(32), build_layout("contiguous", 32, 8))
    plan = plan_forward(visibility, Ring(8))
    messages = sum(hops(plan, rank, Channel.PAYLOAD_INNER) for rank in range(8))
    assert messages == 7 * 8 // 2


def test_topology_decides_which_bytes_cross_nodes() -> None:
    visibility = Visibility(Mask(64, causal=False), build_layout("contiguous", 64, 8))
    flat = plan_forward(visibility, Ring(8)).bytes_by_link(MHA, Topology(2, 4))
    double = plan_forward(visibility, Ring(4, 2)).bytes_by_link(MHA, Topology(2, 4))
    assert sum(link.inter_bytes for link in flat.values()) == 2 * 7 * 8 * MHA.of(Kind.KV)
    assert sum(link.inter_bytes for link in double.values()) == 8 * 8 * MHA.of(Kind.KV)
    assert sum(link.total for link in flat.values()) == sum(link.total for link in double.values())
