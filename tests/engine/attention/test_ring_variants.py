"""Reversed backward and tiles kept for the tail: exact for every shape and mask, with the promised hops and steps."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from attention_oracle import Group, causal, dense_visibility, errors, gather, oracle, random_inputs, ring_plans
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.allocate import Lane, PlanBuilder, Rows
from engine.attention.counting import prove_pair
from engine.attention.grid import Grid
from engine.attention.kernels.reference import ReferenceKernel
from engine.attention.layout import Layout, build_layout
from engine.attention.mask import BlockList, Mask, Visibility
from engine.attention.methods import Blocks, PlanPair
from engine.attention.plan import AttentionPlan, Channel, Kind, RankPlan, TokenBytes
from engine.attention.planners.gather import plan_gather_backward, plan_gather_forward
from engine.attention.planners.ring import Operands, Ring, circulate, plan_backward, plan_forward
from engine.attention.planners.rows import NeededRows, bands_between, halves, needed_of
from engine.attention.runtime import AttentionRuntime
from engine.attention.topology import Topology
from engine.attention.transport import DistributedTransport, make_channel_groups
from engine.errors import PlanError

SHAPES = [(w, size // w) for size in range(1, 9) for w in range(1, size + 1) if size % w == 0]
LAYOUTS = ("contiguous", "zigzag", "striped")
MHA = TokenBytes(num_heads=4, num_kv_heads=4, head_dim=128)


def blocks_of(layout: Layout, ring: Ring) -> Blocks:
    return Blocks(Grid(1, ring.inner, ring.outer), layout, layout)


def prove(plans: PlanPair, mask: Mask, blocks: Blocks) -> None:
    for plan in (plans.forward, plans.backward):
        plan.validate()
    for late in (True, False):
        prove_pair(plans, mask, blocks, late=late)


def masks(rows: int) -> list[Mask]:
    documents = (0, *sorted({rows // 3, rows // 2} - {0}))
    return [Mask(rows), Mask(rows - 1, causal=False), Mask(rows, window=4), Mask(rows, documents=documents)]


def full_plan(ring: Ring, circulates: str, *, forward: bool = False) -> AttentionPlan:
    """Of a mask under which every rank needs everything."""
    visibility = Visibility(Mask(4 * ring.size, causal=False), build_layout("contiguous", 4 * ring.size, ring.size))
    return plan_forward(visibility, ring) if forward else plan_backward(visibility, ring, circulates)  # type: ignore[arg-type]


def hops(plan: AttentionPlan, channel: Channel) -> set[int]:
    """Messages that ranks send on a channel; one number if all send the same."""
    return {sum(t.op == "send" and t.channel == channel for t in p.transfers()) for p in plan.ranks.values()}


def exposed(plan: RankPlan) -> list[Channel]:
    """Channels of the messages that are in flight without any tile of this rank, in the order of their waits."""
    found = []
    posted: dict[int, tuple[Channel, int]] = {}
    for step in plan.steps:
        posted |= {transfer.message: (transfer.channel, step.index) for transfer in step.post}
        for message in step.wait:
            channel, post = posted[message]
            if not any(other.tiles for other in plan.steps if post <= other.index <= step.index):
                found.append(channel)
    return found


# ---- reversed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
@pytest.mark.pairwise
def test_the_reversed_order_is_proven_for_every_shape(inner: int, outer: int, layout: str) -> None:
    ring = Ring(inner, outer, backward_order="reversed")
    rows = 2 * ring.size + 3
    for mask in masks(rows):
        blocks = build_layout(layout, rows, ring.size)  # type: ignore[arg-type]
        prove(ring_plans(mask, blocks, ring, "kv"), mask, blocks_of(blocks, ring))


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_reversed_blocks_come_home_with_their_gradients(inner: int, outer: int) -> None:
    ring = Ring(inner, outer, backward_order="reversed")
    forward, backward = full_plan(ring, "kv", forward=True), full_plan(ring, "kv")
    for plan, inside, outside in (
        (forward, Channel.PAYLOAD_INNER, Channel.PAYLOAD_OUTER),
        (backward, Channel.PAYLOAD_INNER, Channel.PAYLOAD_OUTER),
        (backward, Channel.GRADIENT_INNER, Channel.GRADIENT_OUTER),
    ):
        assert hops(plan, inside) == {outer * (inner - 1)}
        assert hops(plan, outside) == {outer - 1}
    for rank_plan in backward.ranks.values():
        assert len(rank_plan.steps) == ring.size
        assert exposed(rank_plan) == []


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("gradient_bytes", [2, 4])
def test_reversed_bytes_follow_the_published_formula(size: int, gradient_bytes: int) -> None:
    tokens = TokenBytes(4, 4, 128, wire_gradient_bytes=gradient_bytes)
    ring = Ring(size, whole_blocks=True, narrow_gradients=gradient_bytes == 2, backward_order="reversed")
    visibility = Visibility(Mask(6 * size), build_layout("zigzag", 6 * size, size))
    block = 4 * 6 * 4 * 128  # C: K and V of one rank in bf16
    for plan, expected in (
        (plan_forward(visibility, ring), (size - 1) * block),
        (plan_backward(visibility, ring, "kv"), (size - 1) * block * (2 + gradient_bytes) // 2),
    ):
        links = plan.bytes_by_link(tokens, Topology(1, size))
        assert {link.total for link in links.values()} == {expected}


def test_a_reversed_backward_starts_from_the_last_block_and_never_reads_its_own() -> None:
    visibility = Visibility(Mask(22), build_layout("zigzag", 22, 6))
    ring = Ring(3, 2, backward_order="reversed")
    forward, backward = plan_forward(visibility, ring), plan_backward(visibility, ring, "kv")
    for rank in range(6):
        home = ring.last_home(rank)
        assert ring.visitor(home, 1, 2) == rank
        assert forward.ranks[rank].pins == {"q", "kv", "acc", "kv_last"}
        assert backward.ranks[rank].pins == {"qx", "kv_last", "dq", "dkv"}
        for plan in (forward.ranks[rank], backward.ranks[rank]):
            assert plan.slots[plan.pinned("kv_last")].rows == visibility.layout.rows(home)


def test_a_ring_of_one_rank_has_no_last_block_but_its_own() -> None:
    visibility = Visibility(Mask(5), build_layout("contiguous", 5, 1))
    ring = Ring(1, backward_order="reversed")
    assert plan_forward(visibility, ring) == plan_forward(visibility, Ring(1))
    assert plan_backward(visibility, ring, "kv") == plan_backward(visibility, Ring(1), "kv")


def test_reversed_q_circulation_is_refused() -> None:
    visibility = Visibility(Mask(8), build_layout("zigzag", 8, 2))
    with pytest.raises(PlanError, match="circulate kv"):
        plan_backward(visibility, Ring(2, backward_order="reversed"), "q")


@pytest.mark.parametrize("mask", [Mask(26), Mask(26, window=6), Mask(26, documents=(0, 3, 14))], ids=str)
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (5, 1), (1, 3), (2, 3), (3, 2)])
def test_reversed_numbers_equal_dense_attention(inner: int, outer: int, mask: Mask) -> None:
    ring = Ring(inner, outer, backward_order="reversed")
    layout = build_layout("zigzag", 26, ring.size)
    inputs = random_inputs(26, 4, 2)
    group = Group(ring_plans(mask, layout, ring, "kv"), blocks_of(layout, ring), ReferenceKernel())
    found = errors(group.run(inputs).values, oracle(inputs, dense_visibility(mask, 26)))
    assert all(error < 1e-10 for error in found.values()), found


# ---- tail -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
@pytest.mark.pairwise
def test_every_tail_of_every_shape_is_proven(inner: int, outer: int) -> None:
    for tail in range(1, inner + 1):
        ring = Ring(inner, outer, tail_steps=tail)
        rows = 3 * ring.size + 1
        for number, mask in enumerate(masks(rows)):
            layout = build_layout(LAYOUTS[(tail + number) % 3], rows, ring.size)  # type: ignore[arg-type]
            for circulates in ("q", "kv"):
                prove(ring_plans(mask, layout, ring, circulates), mask, blocks_of(layout, ring))  # type: ignore[arg-type]


@pytest.mark.parametrize("circulates", ["q", "kv"])
@pytest.mark.parametrize(("inner", "outer"), [(w, o) for w, o in SHAPES if w * o > 1])
def test_a_tail_hides_the_way_home_and_costs_no_hop(inner: int, outer: int, circulates: str) -> None:
    plain = full_plan(Ring(inner, outer), circulates)
    two_levels = inner > 1 and outer > 1
    for tail in range(inner + 1):
        plan = full_plan(Ring(inner, outer, tail_steps=tail), circulates)
        for channel in Channel:
            assert hops(plan, channel) == hops(plain, channel)
        found = {tuple(exposed(rank_plan)) for rank_plan in plan.ranks.values()}
        last = Channel.GRADIENT_OUTER if inner == 1 else Channel.GRADIENT_INNER
        if tail == 0:  # every rank sends one gradient home and receives one
            assert found == {(Channel.GRADIENT_OUTER,) * 2 * two_levels + (last,) * 2}
        else:
            assert found == {(Channel.GRADIENT_INNER,) * 2 if two_levels and tail == 1 else ()}
        steps = ring_steps(inner * outer, tail, two_levels=two_levels)
        assert {len(rank_plan.steps) for rank_plan in plan.ranks.values()} == {steps}


def ring_steps(size: int, tail: int, *, two_levels: bool) -> int:
    return size + 2 if two_levels and tail < 2 else size + 1


def test_the_own_tile_is_halved_by_work() -> None:
    visibility = Visibility(Mask(4000), build_layout("zigzag", 4000, 4))
    first, last = (sum(band.area() for band in part) for part in halves(visibility.bands(1, 1)))
    assert first + last == visibility.pairs(1, 1)
    assert 0.99 < first / last < 1.01


@pytest.mark.parametrize(("inner", "outer", "tail"), [(4, 1, 1), (1, 3, 1), (3, 2, 3), (2, 3, 2)])
def test_numbers_with_a_tail_equal_dense_attention(inner: int, outer: int, tail: int) -> None:
    ring = Ring(inner, outer, tail_steps=tail)
    layout = build_layout("zigzag", 26, ring.size)
    inputs = random_inputs(26, 4, 2)
    for circulates in ("q", "kv"):
        plans = ring_plans(Mask(26), layout, ring, circulates)  # type: ignore[arg-type]
        got = Group(plans, blocks_of(layout, ring), ReferenceKernel()).run(inputs).values
        found = errors(got, oracle(inputs, causal(26)))
        assert all(error < 1e-10 for error in found.values()), found


# ---- all variants ---------------------------------------------------------------------------------------------------


@st.composite
def any_masks(draw: st.DrawFn) -> Mask:
    rows = draw(st.integers(1, 22))
    starts = draw(st.sets(st.integers(1, 21), max_size=3))
    documents = (0, *sorted(s for s in starts if s < rows)) if starts else ()
    pairs = draw(st.none() | st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))))
    blocks = None if pairs is None else BlockList.from_pairs(5, pairs)
    return Mask(rows, draw(st.booleans()), draw(st.none() | st.integers(1, rows + 2)), documents, blocks)


@st.composite
def variants(draw: st.DrawFn) -> tuple[Mask, Layout, Ring]:
    mask = draw(any_masks())
    inner, outer = draw(st.sampled_from([(w, o) for w, o in SHAPES if w * o <= 6] + [(7, 1), (2, 4), (4, 2)]))
    padding = draw(st.integers(0, 4))
    layout = build_layout(draw(st.sampled_from(LAYOUTS)), mask.seq_len + padding, inner * outer)
    ring = Ring(
        inner,
        outer,
        draw(st.sampled_from([-1, 1])),
        narrow_gradients=draw(st.booleans()),
        whole_blocks=draw(st.booleans()),
        own_gradient_travels=draw(st.booleans()),
        backward_order=draw(st.sampled_from(["same", "reversed"])),
        tail_steps=draw(st.integers(0, inner)),
    )
    return mask, layout, ring


@settings(max_examples=100, deadline=None)
@given(variants())
def test_random_variants_are_proven(case: tuple[Mask, Layout, Ring]) -> None:
    mask, layout, ring = case
    prove(ring_plans(mask, layout, ring, "kv"), mask, blocks_of(layout, ring))
    if ring.backward_order == "same":
        prove(ring_plans(mask, layout, ring, "q"), mask, blocks_of(layout, ring))


@pytest.mark.parametrize("ring", [Ring(2, 3, backward_order="reversed"), Ring(3, 2, tail_steps=2)], ids=str)
def test_variants_work_on_a_lane_of_other_ranks(ring: Ring) -> None:
    members, mask = (4, 0, 5, 2, 1, 3), Mask(26)
    inside = build_layout("zigzag", 26, 6)
    plans = PlanPair(*(on_lane(Visibility(mask, inside), ring, members, what) for what in ("forward", "backward")))
    outside = Layout(inside.name, 26, tuple(inside.segments[members.index(rank)] for rank in range(6)))
    prove(plans, mask, blocks_of(outside, ring))


def on_lane(visibility: Visibility, ring: Ring, members: tuple[int, ...], direction: str) -> AttentionPlan:
    builder = PlanBuilder(direction, ring.size)  # type: ignore[arg-type]
    lane = Lane(builder, members, first_step=3)
    rows = [visibility.layout.rows(index) for index in range(ring.size)]
    last_rows = [rows[ring.last_home(index)] for index in range(ring.size)]

    def pinned(kind: Kind, pin: str, counts: list[int]):
        return [lane.value(index, kind, Rows(0, count), pin) for index, count in enumerate(counts)]

    kv_last = pinned(Kind.KV, "kv_last", last_rows) if ring.keeps_last else []
    if direction == "forward":
        kv = pinned(Kind.KV, "kv", rows)
        operands = Operands(pinned(Kind.Q, "q", rows), kv, pinned(Kind.ACC, "acc", rows), [], kv_last)
    else:
        kv = kv_last or pinned(Kind.KV, "kv", rows)
        operands = Operands(pinned(Kind.QX, "qx", rows), kv, pinned(Kind.DQ, "dq", rows), pinned(Kind.DKV, "dkv", rows))
    circulate(visibility, ring, "kv", lane, operands)
    return builder.build()


@settings(max_examples=150, deadline=None)
@given(any_masks(), st.sampled_from(LAYOUTS), st.integers(1, 7), st.integers(0, 4))
def test_needed_rows_are_those_of_the_bands(mask: Mask, name: str, size: int, padding: int) -> None:
    visibility = Visibility(mask, build_layout(name, mask.seq_len + padding, size))  # type: ignore[arg-type]
    keys, queries = NeededRows(visibility, "kv"), NeededRows(visibility, "q")
    for home in range(size):
        assert keys.of(home) == [needed_of(visibility.bands(rank, home), "kv") for rank in range(size)]
        assert queries.of(home) == [needed_of(visibility.bands(home, rank), "q") for rank in range(size)]
        for rank in range(size):
            assert bands_between(visibility, home, rank, ()) == visibility.bands(home, rank)


class ListeningVisibility(Visibility):
    """Remembers whose queries it was asked about."""

    def __init__(self, mask: Mask, layout: Layout) -> None:
        super().__init__(mask, layout)
        self.asked: set[int] = set()

    def bands(self, q_rank: int, kv_rank: int):
        self.asked.add(q_rank)
        return super().bands(q_rank, kv_rank)


@pytest.mark.parametrize("ring", [Ring(12), Ring(4, 3, tail_steps=2), Ring(3, 4, backward_order="reversed")], ids=str)
def test_a_rank_that_plans_alone_does_not_look_at_what_others_see(ring: Ring) -> None:
    visibility = ListeningVisibility(Mask(96), build_layout("zigzag", 96, 12))
    plan_forward(visibility, ring, only=(5,))
    plan_backward(visibility, ring, "kv", only=(5,))
    if ring.backward_order == "same":
        plan_backward(visibility, ring, "q", only=(5,))
    assert visibility.asked == {5}


@pytest.mark.parametrize(("inner", "outer"), [(6, 1), (2, 3), (3, 2), (1, 6)])
@pytest.mark.parametrize("changes", [{"backward_order": "reversed"}, {"tail_steps": 2}], ids=str)
def test_a_rank_that_plans_alone_gets_its_part_of_the_whole(inner: int, outer: int, changes: dict) -> None:
    ring = Ring(inner, outer, **changes)
    visibility = Visibility(Mask(25), build_layout("zigzag", 25, 6))
    whole = plan_forward(visibility, ring), plan_backward(visibility, ring, "kv")
    for rank in range(6):
        alone = plan_forward(visibility, ring, (rank,)), plan_backward(visibility, ring, "kv", (rank,))
        for mine, theirs in zip(alone, whole, strict=True):
            assert same_but_for_step_numbers(mine.ranks[rank], theirs.ranks[rank])


def same_but_for_step_numbers(first: RankPlan, second: RankPlan) -> bool:
    steps = [[(s.pre, s.post, s.tiles, s.wait, s.after) for s in plan.steps] for plan in (first, second)]
    assert all(a.index < b.index for a, b in pairwise(first.steps))
    return first.slots == second.slots and steps[0] == steps[1]


# ---- processes ------------------------------------------------------------------------------------------------------


def run_rank(variant: str) -> dict[str, torch.Tensor]:
    """Forward and backward of one of four ranks over gloo."""
    rank, mask = dist.get_rank(), Mask(37)
    layout = build_layout("zigzag", 37, 4)
    visibility = Visibility(mask, layout)
    if variant == "reversed":
        ring = Ring(2, 2, backward_order="reversed")
        forward, backward = plan_forward(visibility, ring, (rank,)), plan_backward(visibility, ring, "kv", (rank,))
    else:
        forward, backward = (
            make(visibility, Ring(2, 2), (rank,)) for make in (plan_gather_forward, plan_gather_backward)
        )
    groups = make_channel_groups([range(4)], rank, tuple(Channel), timedelta(seconds=30))
    transport = DistributedTransport(groups, range(4), Topology(2, 2), rank)
    runtime = AttentionRuntime(forward.ranks[rank], backward.ranks[rank], ReferenceKernel(), transport, poisoned=True)
    inputs, rows = random_inputs(37, 4, 2), torch.from_numpy(layout.positions(rank))
    qkv = inputs.q[rows], inputs.k[rows], inputs.v[rows]
    execution = runtime.forward_execution(*qkv)
    execution.run()
    out, saved = runtime.collect(execution, *qkv)
    gradients = runtime.backward_execution(saved, inputs.dout[rows])
    gradients.run()
    dkv = gradients.pinned("dkv")["dkv"]
    for group in groups.values():
        dist.destroy_process_group(group)
    return {"out": out, "lse": saved.lse, "dq": gradients.pinned("dq")["dq"], "dk": dkv[:, 0], "dv": dkv[:, 1]}


@pytest.mark.parametrize("variant", ["reversed", "gather"])
def test_processes_get_the_numbers_of_dense_attention(ranks, variant: str) -> None:
    replies = ranks(4).run(run_rank, variant)
    layout = build_layout("zigzag", 37, 4)
    index = [torch.from_numpy(layout.positions(rank)) for rank in range(4)]
    got = {name: gather(index, [reply[name] for reply in replies]) for name in replies[0]}
    found = errors(got, oracle(random_inputs(37, 4, 2), causal(37)))
    assert all(error < 1e-10 for error in found.values()), found
