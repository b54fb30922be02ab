"""Work counted as brute force has it; replayed times, exact on schedules worked out by hand, bounded on real ones."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.planning.methods.blocks import divide_sequence
from engine.planning.methods.presets import AttentionMethod
from engine.planning.program.ops import (
    AttentionPlan,
    Buffer,
    Channel,
    HeadPart,
    Kind,
    LatentShape,
    LocalOp,
    OpName,
    RankPlan,
    Step,
    Tile,
    TokenBytes,
    Transfer,
    View,
)
from engine.planning.schedules.plan import PlanPair, plan_method
from engine.planning.topology import Topology
from engine.planning.visibility.mask import UNBOUNDED, Band, Mask
from engine.predict.machine import Machine, find_machine
from engine.predict.plan_costs import ViewBytes, computed_pairs, expansion_flops, query_heads, tile_flops
from engine.predict.replay import COMPUTE_LANE, replay

LOW, HIGH = st.just(-UNBOUNDED) | st.integers(-15, 15), st.just(UNBOUNDED) | st.integers(-15, 15)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), LOW, HIGH)
def test_visible_pairs_are_those_inside_the_band(rows: int, keys: int, low: int, high: int) -> None:
    assert Band(3, 3 + rows, 5, 5 + keys, low, high).area() == sum(
        low <= i - j <= high for i in range(rows) for j in range(keys)
    )


def test_a_token_takes_what_its_fields_take() -> None:
    """bf16 tensors, fp32 sums and (out of three bytes, as nothing else is) gradients on the wire."""
    q, kv, lse, shape = 4 * 8, 2 * 2 * 8, 4, TokenBytes(4, 2, 8, 8, wire_gradient_bytes=3)
    assert {kind.value: shape.of(kind) for kind in Kind} == {
        **{"q": 2 * q, "kv": 2 * kv, "out": 2 * q, "dout": 2 * q, "dq_cast": 2 * q, "dkv_cast": 2 * kv},
        **{"partial": 4 * (q + lse), "out_lse": 2 * q + 4 * lse},
        **{"q_dout_stats": 2 * 2 * q + 4 * 2 * lse, "q_dout_out": 2 * 2 * q},
        **{"dq": 4 * q, "dkv": 4 * kv, "dq_wire": 3 * q, "dkv_wire": 3 * kv},
    }
    assert [channel.value for channel in Channel] == ["x.in", "x.out", "g.in", "g.out", "h", "h2d", "d2h"]


def test_heads_of_v_have_a_width_of_their_own() -> None:
    """4 query heads and 2 kv heads, of 24 for q and k and of 16 for v: numbers per token of every kind."""
    q, k, v, out, lse = 4 * 24, 2 * 24, 2 * 16, 4 * 16, 4
    shape = TokenBytes(4, 2, 24, 16, element_bytes=1, gradient_bytes=1, wire_gradient_bytes=1)
    assert {kind.value: shape.of(kind) for kind in Kind} == {
        **{"q": q, "kv": k + v, "partial": out + lse, "out_lse": out + lse, "out": out, "dout": out},
        **{"q_dout_stats": q + out + 2 * lse, "q_dout_out": q + out, "dq": q, "dq_wire": q, "dq_cast": q},
        **{"dkv": k + v, "dkv_wire": k + v, "dkv_cast": k + v},
    }


def test_flops_of_a_tile_depend_on_both_head_dims() -> None:
    """Per pair 2 FLOPs per channel: QK^T and PV; backward QK^T, dQ, dK and dO V^T, dV."""
    tile, buffers = Tile(View(0, 0, 8), View(0, 0, 8), View(0, 0, 8), Band(0, 8, 0, 8)), (Buffer(Kind.Q, 8),)
    shape = TokenBytes(num_heads=1, num_kv_heads=1, qk_dim=24, v_dim=16)
    assert tile_flops(tile, buffers, shape, "forward") == 64 * 2 * (24 + 16)
    assert tile_flops(tile, buffers, shape, "backward") == 64 * 2 * (3 * 24 + 2 * 16)


def test_a_tile_of_latents_costs_the_products_that_expand_them() -> None:
    """Per row of keys and head 2 FLOPs for each of 6 numbers and of 24 - 8 + 16 channels; in backward three times."""
    tile = Tile(View(0, 0, 8), View(0, 0, 5), View(0, 0, 8), Band(0, 8, 0, 5))
    shape = TokenBytes(num_heads=4, num_kv_heads=2, qk_dim=24, v_dim=16, latent=LatentShape(rank=6, rope_dim=8))
    forward, backward = (expansion_flops(tile, shape, direction) for direction in ("forward", "backward"))
    assert (forward, backward) == (5 * 2 * 2 * 6 * 32, 3 * 5 * 2 * 2 * 6 * 32)


def test_a_tile_costs_only_the_heads_of_its_buffer() -> None:
    shape = TokenBytes(num_heads=12, num_kv_heads=4, qk_dim=64, v_dim=64)
    tile = Tile(View(0, 0, 8), View(1, 0, 8), View(2, 0, 8), Band(0, 8, 0, 8, low=0))
    for count in (1, 2, 3, 5):
        parts = [HeadPart(index, count) for index in range(count)]
        buffers = [(Buffer(Kind.Q, 8, heads=part), Buffer(Kind.KV, 8), Buffer(Kind.PARTIAL, 8)) for part in parts]
        assert sum(query_heads(tile, buffer, shape) for buffer in buffers) == 12
        assert sum(tile_flops(tile, buffer, shape, "forward") for buffer in buffers) == 4 * 64 * 12 * 36
        assert sum(tile_flops(tile, buffer, shape, "backward") for buffer in buffers) == 10 * 64 * 12 * 36


def test_a_tile_of_some_heads_costs_these_alone() -> None:
    """12 query heads of 64 and their sums in fp32, of which a third is computed and merged."""
    shape, buffers = TokenBytes(12, 4, 64, 64), (Buffer(Kind.Q, 8), Buffer(Kind.KV, 8), Buffer(Kind.PARTIAL, 8))
    tile = Tile(View(0, 0, 8), View(1, 0, 8), View(2, 0, 8), Band(0, 8, 0, 8, low=0), heads=HeadPart(1, 3))
    assert tile_flops(tile, buffers, shape, "forward") == 4 * 64 * 4 * 36
    assert ViewBytes(buffers, shape).moved_by_tile(tile) == 2 * 8 * 4 * (64 + 1) * 4


def test_a_copy_between_head_parts_moves_the_smaller_one() -> None:
    shape = TokenBytes(num_heads=4, num_kv_heads=4, qk_dim=8, v_dim=8)
    buffers = (Buffer(Kind.Q, 5, heads=HeadPart(0, 2)), Buffer(Kind.Q, 5, heads=HeadPart(1, 4)))
    both = [LocalOp("copy", View(dst, 0, 5), View(1 - dst, 0, 5)) for dst in range(2)]
    assert [ViewBytes(buffers, shape).moved_by_op(op) for op in both] == [2 * 5 * 8 * 2] * 2


def test_a_cast_moves_both_widths() -> None:
    shape = TokenBytes(num_heads=4, num_kv_heads=4, qk_dim=8, v_dim=8)
    buffers = (Buffer(Kind.DQ, 10), Buffer(Kind.DQ_CAST, 10, heads=HeadPart(0, 2)))
    moved = ViewBytes(buffers, shape).moved_by_op(LocalOp("copy", View(1, 0, 6), View(0, 0, 6)))
    assert moved == 6 * (2 * 8 * 4 + 2 * 8 * 2)


@pytest.mark.parametrize(("op", "passes"), [("copy", 1 + 1), ("add", 2 + 1), ("merge", 2 + 1)])
def test_adding_or_merging_reads_its_target_too(op: OpName, passes: int) -> None:
    shape, buffers = TokenBytes(num_heads=2, num_kv_heads=1, qk_dim=8, v_dim=8), (Buffer(Kind.PARTIAL, 5),) * 2
    moved = ViewBytes(buffers, shape).moved_by_op(LocalOp(op, View(0, 0, 5), View(1, 0, 5)))
    assert moved == passes * 5 * 2 * (8 + 1) * 4, f"{op} moves {moved} bytes"


@pytest.mark.parametrize(
    ("band", "edges"),
    [(Band(0, 8, 0, 8, 0), 1), (Band(0, 8, 0, 8, 0, 3), 2), (Band(0, 8, 0, 12, high=2), 1), (Band(0, 5, 0, 9), 0)],
)
def test_blocks_waste_half_of_one_along_every_edge(band: Band, edges: int) -> None:
    whole, side = band.num_queries * band.num_keys, min(band.num_queries, band.num_keys)
    assert computed_pairs(band, 0) == band.area()
    assert computed_pairs(band, 1) == min(whole, band.area() + edges * side / 2)
    assert computed_pairs(band, 1000) == (whole if edges else band.area())


# One head of one channel: a key-value token is 4 bytes, a gradient of k and v 8, an accumulator 8, a full 4 x 4 tile
# 64 FLOPs forward and 160 backward.
ONE = TokenBytes(num_heads=1, num_kv_heads=1, qk_dim=1, v_dim=1)
SLOW = Machine(
    name="slow",
    forward_flops_per_s=64.0,
    backward_flops_per_s=160.0,
    matmul_flops_per_s=math.inf,
    kernel_block_rows=0,
    tile_overhead_s=0.0,
    elementwise_bytes_per_s=math.inf,
    update_bytes_per_s=math.inf,
    intra_bytes_per_s=8.0,
    intra_latency_s=0.5,
    inter_bytes_per_s=2.0,
    inter_latency_s=1.0,
    host_bytes_per_s=16.0,
    host_latency_s=0.25,
)


def block(buffer: int) -> View:
    return View(buffer, 0, 4)


def exchange(message: int, rank: int, peer: int, src: int, dst: int, channel: Channel) -> tuple[Transfer, Transfer]:
    """Both ends that `rank` posts to swap 4 tokens with `peer`: messages are numbered by sender."""
    return (
        Transfer(message + rank, "send", channel, peer, block(src)),
        Transfer(message + peer, "recv", channel, peer, block(dst)),
    )


def ring_of_two(rank: int) -> RankPlan:
    buffers = (Buffer(Kind.Q, 4, "q"), Buffer(Kind.KV, 4, "kv"), Buffer(Kind.PARTIAL, 4, "partial"), Buffer(Kind.KV, 4))
    own, other = (Tile(block(0), block(kv), block(2), Band(0, 4, 0, 4)) for kv in (1, 3))
    posts = exchange(0, rank, 1 - rank, 1, 3, Channel.PAYLOAD_INNER)
    return RankPlan(rank, buffers, (Step(0, post=posts, tiles=(own,), wait=(0, 1)), Step(1, tiles=(other,))))


def test_ring_of_two_by_hand() -> None:
    """16 bytes take 2 s and arrive 0.5 s later; each tile takes 1 s: 1.5 s of the message show."""
    plan = AttentionPlan("forward", 2, {rank: ring_of_two(rank) for rank in range(2)})
    timeline = replay(plan, SLOW, ONE, Topology(1, 2))
    assert timeline.total_s == 3.5
    assert timeline.compute_s == {0: 2.0, 1: 2.0}
    assert timeline.waited_s == {0: 1.5, 1: 1.5}
    assert timeline.exposed_s == 1.5
    assert {interval for interval in timeline.intervals if interval.rank == 0} == {
        (0, "compute", "full", 0.0, 1.0),
        (0, "compute", "wait", 1.0, 2.5),
        (0, "compute", "full", 2.5, 3.5),
        (0, "x.in", "recv", 0.0, 2.5),
        (0, "x.in", "send", 0.0, 2.5),
    }
    assert replay(plan, SLOW, ONE, Topology(2, 1)).total_s == 8.0 + 1.0 + 1.0  # between nodes


@pytest.mark.parametrize(
    ("share", "lanes"),
    [
        # 2 s of message, of which computing loses so much: copies until 1, the tile until 2, waiting until 2.5.
        (0.5, [("copy", 0.0, 1.0), ("full", 1.0, 2.0), ("wait", 2.0, 2.5), ("full", 2.5, 3.5)]),
        (1.0, [("copy", 0.0, 2.0), ("full", 2.0, 3.0), ("full", 3.0, 4.0)]),
    ],
)
def test_cores_that_copy_messages_do_not_compute_meanwhile(share: float, lanes: list[tuple[str, float, float]]) -> None:
    plan = AttentionPlan("forward", 2, {rank: ring_of_two(rank) for rank in range(2)})
    timeline = replay(plan, replace(SLOW, message_compute_share=share), ONE, Topology(1, 2))
    computing = [(i.kind, i.start_s, i.stop_s) for i in timeline.intervals if (i.rank, i.lane) == (0, COMPUTE_LANE)]
    assert computing == lanes
    assert timeline.exposed_s == lanes[-1][2] - 2.0


def test_host_pipeline_by_hand() -> None:
    """Two loads share the link into the device; a store goes the other way and does not hinder them.

    pre: init of 32 bytes, 0.5 s. Loads of 16 and 32 bytes: 0.5..1.75 and, after the first's 1 s, 1.5..3.75. Tile:
    10 causal pairs, 100 FLOPs, and 2 * (16 + 32) bytes merged: 0.625 + 0.25 + 1.5 s. Then add moves 96 bytes: 1.5 s.
    """
    buffers = (
        Buffer(Kind.Q_DOUT_STATS, 4, "q_dout"),
        Buffer(Kind.KV, 4, "kv", where="host"),
        Buffer(Kind.KV, 4),
        Buffer(Kind.DQ, 4, "dq"),
        Buffer(Kind.DKV, 4, "dkv"),
        Buffer(Kind.DKV, 4),
        Buffer(Kind.DKV, 4, where="host"),
    )
    machine = replace(SLOW, elementwise_bytes_per_s=64.0, tile_overhead_s=0.25)
    tile = Tile(block(0), block(2), block(3), Band(0, 4, 0, 4, low=0), block(4))
    loads = (
        Transfer(0, "load", Channel.TO_DEVICE, 0, block(2), block(1)),
        Transfer(1, "load", Channel.TO_DEVICE, 0, block(5), block(6)),
        Transfer(2, "store", Channel.TO_HOST, 0, block(6), block(5)),
    )
    step = Step(
        0,
        pre=(LocalOp("init", block(4)),),
        post=loads,
        tiles=(tile,),
        wait=(0, 1, 2),
        after=(LocalOp("add", block(4), block(5)),),
    )
    timeline = replay(AttentionPlan("backward", 1, {0: RankPlan(0, buffers, (step,))}), machine, ONE, Topology(1, 1))
    spans = {(i.lane, i.kind, i.start_s): i.stop_s for i in timeline.intervals}
    tile_stop = 0.5 + 100 / 160 + 0.25 + 2 * (4 * 4 + 4 * 8) / 64
    assert spans == {
        ("compute", "op", 0.0): 0.5,
        ("compute", "causal", 0.5): tile_stop,
        ("h2d", "load", 0.5): 1.75,
        ("h2d", "load", 1.5): 3.75,
        ("d2h", "store", 0.5): 2.75,
        ("compute", "wait", tile_stop): 3.75,
        ("compute", "op", 3.75): 3.75 + 96 / 64,
    }
    assert timeline.total_s == 5.25


def test_messages_of_a_channel_are_a_queue() -> None:
    """A second message of the channel starts when the first has arrived, latency included; host memory does not wait.

    Step 0 posts 16 bytes, step 1 16 more and a load: 0..2.5, then 2.5..5; the load takes 0..1.25.
    """
    plans = {}
    for rank in range(2):
        first, second = (exchange(2 * n, rank, 1 - rank, 0, n + 1, Channel.PAYLOAD_INNER) for n in range(2))
        load = Transfer(4 + rank, "load", Channel.TO_DEVICE, rank, block(3), block(4))
        buffers = (*(Buffer(Kind.KV, 4) for _ in range(4)), Buffer(Kind.KV, 4, where="host"))
        steps = (Step(0, post=first), Step(1, post=(*second, load), wait=(0, 1, 2, 3, 4 + rank)))
        plans[rank] = RankPlan(rank, buffers, steps)
    timeline = replay(AttentionPlan("forward", 2, plans), SLOW, ONE, Topology(1, 2))
    spans = {(i.lane, i.start_s, i.stop_s) for i in timeline.intervals if i.lane != COMPUTE_LANE}
    assert spans == {("x.in", 0.0, 2.5), ("x.in", 2.5, 5.0), ("h2d", 0.0, 1.25)}


def exchange_of_all(rank: int, size: int) -> RankPlan:
    """Every rank sends 4 tokens to every other one at the same step."""
    others = [peer for peer in range(size) if peer != rank]
    sends = [Transfer(rank * size + peer, "send", Channel.HEADS, peer, block(0)) for peer in others]
    receives = [Transfer(peer * size + rank, "recv", Channel.HEADS, peer, block(peer + 1)) for peer in others]
    buffers = (Buffer(Kind.KV, 4, "kv"), *(Buffer(Kind.KV, 4) for _ in range(size)))
    posts = (*sends, *receives)
    return RankPlan(rank, buffers, (Step(0, post=posts, wait=tuple(t.tag for t in posts)),))


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_an_exchange_among_all_ranks_fills_every_link(size: int) -> None:
    plan = AttentionPlan("forward", size, {rank: exchange_of_all(rank, size) for rank in range(size)})
    timeline = replay(plan, SLOW, ONE, Topology(1, size))
    assert timeline.total_s == (size - 1) * 2.0 + 0.5


def test_a_shared_nic_serves_the_ranks_of_a_node_one_after_another() -> None:
    """Rank 0 and 1 swap blocks with 2 and 3 on the other node: 8 s each, one after the other on one NIC."""
    plans = {}
    for rank in range(4):
        peer = (rank + 2) % 4
        posts = exchange(0, rank, peer, 0, 1, Channel.PAYLOAD_OUTER)
        buffers = (Buffer(Kind.KV, 4, "kv"), Buffer(Kind.KV, 4))
        plans[rank] = RankPlan(rank, buffers, (Step(0, post=posts, wait=tuple(t.tag for t in posts)),))
    plan = AttentionPlan("forward", 4, plans)
    assert replay(plan, SLOW, ONE, Topology(2, 2)).total_s == 8.0 + 1.0
    assert replay(plan, replace(SLOW, shared_nic=True), ONE, Topology(2, 2)).total_s == 2 * 8.0 + 1.0


def one_way(rank: int, sources: tuple[int, ...]) -> RankPlan:
    """Rank 0 receives 4 tokens from each source at step 1, and the sender waits as well."""
    buffers = (Buffer(Kind.KV, 4, "kv"), *(Buffer(Kind.KV, 4) for _ in range(4)))
    if rank == 0:
        posts = tuple(Transfer(src, "recv", Channel.PAYLOAD_INNER, src, block(src)) for src in sources)
    else:
        posts = (Transfer(rank, "send", Channel.PAYLOAD_INNER, 0, block(0)),)
    return RankPlan(rank, buffers, (Step(1, post=posts, wait=tuple(transfer.tag for transfer in posts)),))


def test_a_late_receiver_delays_who_sends_to_it() -> None:
    """Rank 0 computes 2 s before it posts: the message is on the way from 2 to 4.5 s, though it was sent at 0."""
    busy = ring_of_two(0).steps[0].tiles * 2
    late, early = one_way(0, (1,)), one_way(1, ())
    buffers = (*ring_of_two(0).buffers, *late.buffers)
    post = Transfer(1, "recv", Channel.PAYLOAD_INNER, 1, block(5))
    late = RankPlan(0, buffers, (Step(0, tiles=busy), Step(1, post=(post,), wait=(1,))))
    timeline = replay(AttentionPlan("forward", 2, {0: late, 1: early}), SLOW, ONE, Topology(1, 2))
    assert timeline.waited_s == {0: 2.5, 1: 4.5}
    assert timeline.exposed_s == 2.5


def test_a_receiver_takes_in_one_message_at_a_time() -> None:
    plan = AttentionPlan("forward", 3, {rank: one_way(rank, (1, 2)) for rank in range(3)})
    timeline = replay(plan, SLOW, ONE, Topology(1, 3))
    assert timeline.finish_s[0] == 2 * 2.0 + 0.5
    assert sorted(timeline.finish_s[rank] for rank in (1, 2)) == [2.5, 4.5]


def test_a_rank_alone_takes_as_long_as_beside_one_that_does_the_same() -> None:
    both = AttentionPlan("forward", 2, {0: ring_of_two(0), 1: ring_of_two(1)})
    alone = replay(replace(both, ranks={0: ring_of_two(0)}), SLOW, ONE, Topology(1, 2))
    together = replay(both, SLOW, ONE, Topology(1, 2))
    assert alone.total_s == together.total_s
    assert alone.exposed_s == together.exposed_s
    assert alone.waited_s == {0: together.waited_s[0]}


# ---- real plans ---------------------------------------------------------------------------------------------------

GQA = TokenBytes(num_heads=8, num_kv_heads=2, qk_dim=64, v_dim=64)


@st.composite
def plans(draw: st.DrawFn) -> tuple[AttentionPlan, Topology]:
    inner, outer = draw(
        st.sampled_from([(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 4), (3, 2), (1, 3), (7, 1)])
    )
    size = inner * outer
    rows = draw(st.integers(2, 40)) * size
    mask = draw(st.sampled_from([Mask(rows), Mask(rows, causal=False), Mask(rows, window=rows // 3 + 1)]))
    layout, way = draw(st.sampled_from(["contiguous", "zigzag", "striped"])), draw(st.sampled_from(["kv", "q"]))
    found = ring_plans(inner, outer, mask, layout=layout, backward_circulates=way)
    return draw(st.sampled_from([found.forward, found.backward])), Topology(outer, inner)


def ring_plans(inner: int, outer: int, mask: Mask, **axes: Any) -> PlanPair:
    method = AttentionMethod(**{"layout": "zigzag", **axes}, ring_inner_size=inner, ring_outer_size=outer)
    return plan_method(method, mask, divide_sequence(method, mask.seq_len))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """The H100 node with every link slowed down by up to a factor of a million."""
    base = find_machine("h100")
    rates = {f"{link}_bytes_per_s": getattr(base, f"{link}_bytes_per_s") for link in ("intra", "inter", "host")}
    slow = {name: rate / 10 ** draw(st.integers(0, 6)) for name, rate in rates.items()}
    return replace(base, shared_nic=draw(st.booleans()), **slow)


@settings(max_examples=80, deadline=None)
@given(plans(), machines(), st.sampled_from(["intra_bytes_per_s", "inter_bytes_per_s", "backward_flops_per_s"]))
def test_a_plan_is_no_faster_than_its_resources(
    case: tuple[AttentionPlan, Topology], machine: Machine, field: str
) -> None:
    """No plan is faster than either, no rank does two things at once, and a slower machine is never faster."""
    plan, topology = case
    timeline = replay(plan, machine, GQA, topology)
    assert timeline.total_s >= timeline.busiest_s
    for sent in plan.bytes_by_link(GQA, topology).values():
        assert timeline.total_s >= sent.intra_bytes / machine.intra_bytes_per_s * (1 - 1e-9)
        assert timeline.total_s >= sent.inter_bytes / machine.inter_bytes_per_s * (1 - 1e-9)
    for rank in range(plan.size):
        own = [i for i in timeline.intervals if i.rank == rank and i.lane == COMPUTE_LANE]
        assert all(before.stop_s == after.start_s for before, after in pairwise(own))
        assert not own or own[-1].stop_s == timeline.finish_s[rank]
        busy_s = timeline.compute_s[rank] + timeline.waited_s[rank]
        assert math.isclose(busy_s, timeline.finish_s[rank], abs_tol=1e-15)
    slower = replace(machine, **{field: getattr(machine, field) / 2})
    assert replay(plan, slower, GQA, topology).total_s >= timeline.total_s
    names = [f"{link}_{what}" for link in ("intra", "inter", "host") for what in ("bytes_per_s", "latency_s")]
    free = {name: 0.0 if name.endswith("latency_s") else math.inf for name in names}
    alone = replay(plan, replace(machine, **free), GQA, topology)
    assert alone.busiest_s == timeline.busiest_s
    assert plan.size > 1 or alone.total_s == alone.busiest_s


def test_sixty_four_ranks_are_replayed() -> None:
    plan = ring_plans(8, 8, Mask(1 << 20)).backward
    timeline = replay(plan, find_machine("h100"), GQA, Topology(8, 8))
    assert sum(i.kind in ("full", "causal") for i in timeline.intervals) == 64 * 64
