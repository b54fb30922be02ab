"""What plans move, when, and in how many buffers: the published formulas, hops, order and overlap, what masks save.

That the plans are right for any shape is shown by test_planners.py and test_method_matrix.py.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from testkit.attention_oracle import ring_method
from testkit.resolved import method_of

from engine.config.settings import AttentionConfig, ModelConfig, RunConfig, TrainConfig
from engine.planning.methods.blocks import divide_sequence
from engine.planning.methods.layers import attention_layers
from engine.planning.methods.presets import PRESETS, AttentionMethod
from engine.planning.program.ops import AttentionPlan, Channel, Kind, RankPlan, TokenBytes
from engine.planning.schedules.plan import PlanPair, plan_method
from engine.planning.topology import Topology
from engine.planning.visibility.mask import Mask, halves
from engine.planning.visibility.visible import Visibility

SHAPES = [(w, size // w) for size in range(1, 9) for w in range(1, size + 1) if size % w == 0]
DOUBLE = [(2, 2), (2, 3), (3, 2), (4, 2)]
HEADS = 8
MHA = TokenBytes(HEADS, HEADS, 16, 16)


def plans_of(method: AttentionMethod, mask: Mask | None = None, before: int | None = None) -> PlanPair:
    """Without a mask every rank needs everything; `before`: queries that run again."""
    mask = mask or Mask(4 * method.cp_size, causal=False)
    return plan_method(method, mask, divide_sequence(method, mask.seq_len, [mask]), recompute_before=before)


def sent_by(plan: AttentionPlan, tokens: TokenBytes = MHA) -> list[int]:
    """Bytes of every rank."""
    return [link.total for link in plan.bytes_by_link(tokens, Topology(1, plan.size)).values()]


def hops(plan: AttentionPlan, channel: Channel) -> set[int]:
    """Messages that ranks send on a channel; one number if all send the same."""
    return {sum(t.op == "send" and t.channel == channel for t in p.transfers()) for p in plan.ranks.values()}


def exposed(plan: RankPlan) -> list[Channel]:
    """Channels of the messages that are in flight without any tile of this rank, in the order of their waits."""
    found = []
    posted: dict[int, tuple[Channel, int]] = {}
    for step in plan.steps:
        posted |= {transfer.tag: (transfer.channel, step.index) for transfer in step.post}
        for message in step.wait:
            channel, post = posted[message]
            if not any(other.tiles for other in plan.steps if post <= other.index <= step.index):
                found.append(channel)
    return found


def travelling(plan: AttentionPlan, kind: Kind) -> int:
    """Most buffers of a kind that a rank has besides its inputs and outputs."""
    return max(
        sum(buffer.kind == kind and buffer.argument is None for buffer in p.buffers) for p in plan.ranks.values()
    )


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_one_ring_moves_what_the_published_formulas_say(size: int, wire: Any) -> None:
    """But for the home tile's own gradient, which never travels here."""
    tokens = replace(MHA, wire_gradient_bytes=4 if wire == "float32" else 2)
    rows, width = 4, HEADS * 16
    block, home = 4 * rows * width, size - 1  # block: C, K and V of one rank in bf16
    gradients = 2 * rows * width * tokens.wire_gradient_bytes
    ring = ring_method(size, gradient_wire_dtype=wire)
    for method in (ring, replace(ring, backward_order="reversed"), replace(ring, kv_transport="all_gather")):
        plans = plans_of(method)
        assert set(sent_by(plans.forward, tokens)) == {home * block}
        assert set(sent_by(plans.backward, tokens)) == {home * (block + gradients)}
    queries = plans_of(replace(ring, backward_circulates="q")).backward
    assert set(sent_by(queries, tokens)) == {home * (block + rows * 8 * HEADS + gradients // 2)}


@pytest.mark.parametrize(
    ("grid", "kv_heads"), [((2, 2, 2), 8), ((4, 2, 1), 4), ((2, 1, 4), 2), ((8, 1, 1), 8), ((4, 1, 1), 2)]
)
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_traffic_of_two_dimensions_equals_the_formula(grid: tuple[int, int, int], kv_heads: int, wire: Any) -> None:
    """(h-1)/h of rows, then W (w-1) inner and W-1 outer hops of K,V."""
    (heads, inner, outer), wide = grid, 2 if wire == "float32" else 1  # numbers of 16 bits in a gradient's
    plans = plans_of(ring_method(inner, outer, heads=heads, kv_replicated=heads > kv_heads, gradient_wire_dtype=wire))
    share, width, head_dim = 4, HEADS * 16, 16
    exchange = (heads - 1) * share * (2 * width + 2 * max(kv_heads, heads) * head_dim) * 2 // heads
    block = 2 * share * heads * max(kv_heads // heads, 1) * head_dim * 2  # C of the formula
    ring_hops = outer * (inner - 1) + outer - 1
    tokens = TokenBytes(HEADS, kv_heads, head_dim, head_dim, wire_gradient_bytes=2 * wide)
    assert set(sent_by(plans.forward, tokens)) == {exchange + ring_hops * block}
    # dK, dV: one hop home inside the ring, or the last hop of a single level; sums of far cycles go straight.
    gradient_hops = ring_hops + (inner > 1 and outer > 1)
    partial_sums = (heads - 1) * share * 2 * head_dim * 2 * (wide - 1) if heads > kv_heads else 0  # of copied heads
    gradients = partial_sums + gradient_hops * wide * block
    assert set(sent_by(plans.backward, tokens)) == {exchange + ring_hops * block + gradients}


def forward_bytes(seq_len: int, **attention: object) -> int:
    """Of all 8 ranks of a configured method."""
    config = RunConfig(
        model=ModelConfig(num_heads=HEADS, num_kv_heads=HEADS, head_dim=16),
        attention=AttentionConfig(**attention),  # type: ignore[arg-type]
        train=TrainConfig(seq_len=seq_len),
    )
    (layer,) = attention_layers(config, method_of(config, Topology(1, 8)))
    return sum(sent_by(plans_of(layer.method, layer.mask).forward))


@pytest.mark.parametrize("preset", ["ring", "burst", "megatron_allgather"])
def test_a_window_of_an_eighth_on_eight_ranks_moves_at_most_two_sevenths_of_the_ring(preset: str) -> None:
    window = {"mask": "window", "window_tokens": 512}
    whole = forward_bytes(4096, preset="ring")
    assert 0 < forward_bytes(4096, preset=preset, **window) <= 2 / 7 * whole
    # Under a zigzag its keys lie on two more ranks: hence contiguous blocks where every layer has a window.
    assert forward_bytes(4096, preset=preset, layout="zigzag", **window) > 2 / 7 * whole


def test_only_rows_with_a_reader_are_sent() -> None:
    edge = forward_bytes(4096, preset="burst", mask="window", window_tokens=65)
    assert edge == 7 * 64 * MHA.of(Kind.KV)  # the rows before each of seven edges
    rows, sink, ring = 1 << 16, 64, ring_method(8, layout="contiguous")
    with_sink, plain = (sum(sent_by(plans_of(ring, Mask(rows, window=rows // 64, sink=n)).forward)) for n in (sink, 0))
    # The last rank on the way of the first block needs both of its ends.
    assert 0 < with_sink - plain <= 7 * rows // 8 * MHA.of(Kind.KV)
    assert sum(sent_by(plans_of(ring, Mask(1024, documents=tuple(range(0, 1024, 64)))).forward)) == 0
    causal = plans_of(ring, Mask(32)).forward
    assert sum(t.op == "send" for rank in causal.ranks.values() for t in rank.transfers()) == 7 * 8 // 2


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "split_zigzag"])
@pytest.mark.parametrize("axes", [{}, {"backward_order": "reversed"}, {"kv_transport": "all_gather"}], ids=str)
def test_only_keys_that_recomputation_needs_are_sent(axes: dict[str, Any], layout: Any) -> None:
    for shape in ((8, 1), (4, 2)):
        ring = ring_method(*shape, layout=layout, split_at=128 * (layout == "split_zigzag"), **axes)
        plans = plans_of(ring, Mask(256), before=128)
        assert plans.recompute is not None
        assert sum(sent_by(plans.recompute)) < sum(sent_by(plans.forward))
        if layout == "contiguous":
            both = [plan.ranks.values() for plan in (plans.recompute, plans.forward)]
            again, once = (sum(t.op == "send" for rank in ranks for t in rank.transfers()) for ranks in both)
            assert again < once


# ---- hops and overlap -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inner", "outer"), DOUBLE)
@pytest.mark.parametrize("circulates", ["kv", "q"])
def test_double_ring_makes_the_promised_hops(inner: int, outer: int, circulates: Any) -> None:
    plan = plans_of(ring_method(inner, outer, backward_circulates=circulates)).backward
    assert hops(plan, Channel.PAYLOAD_INNER) == {outer * (inner - 1)}
    assert hops(plan, Channel.PAYLOAD_OUTER) == hops(plan, Channel.GRADIENT_OUTER) == {outer - 1}
    assert hops(plan, Channel.GRADIENT_INNER) == {outer * (inner - 1) + 1}


@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (5, 1), (1, 3), (4, 2), (2, 3)])
def test_reversed_blocks_return_to_their_owner_with_gradients(inner: int, outer: int) -> None:
    plans = plans_of(ring_method(inner, outer, backward_order="reversed"))
    for plan, inside, outside in (
        (plans.forward, Channel.PAYLOAD_INNER, Channel.PAYLOAD_OUTER),
        (plans.backward, Channel.PAYLOAD_INNER, Channel.PAYLOAD_OUTER),
        (plans.backward, Channel.GRADIENT_INNER, Channel.GRADIENT_OUTER),
    ):
        assert hops(plan, inside) == {outer * (inner - 1)}
        assert hops(plan, outside) == {outer - 1}
    for rank_plan in plans.backward.ranks.values():
        assert len(rank_plan.steps) == inner * outer
        assert exposed(rank_plan) == []
    divided = plans_of(ring_method(inner, outer, heads=2, backward_order="reversed")).backward
    # A step of exchange before and one after, in which all gradients go home.
    assert {len(rank_plan.steps) for rank_plan in divided.ranks.values()} == {inner * outer + 2}


@pytest.mark.parametrize("circulates", ["q", "kv"])
@pytest.mark.parametrize(("inner", "outer"), [(w, o) for w, o in SHAPES if w * o in (2, 6, 8)])
def test_deferred_tiles_hide_the_last_gradients_without_further_hops(inner: int, outer: int, circulates: Any) -> None:
    ring = ring_method(inner, outer, backward_circulates=circulates)
    plain = plans_of(ring).backward
    two_levels = inner > 1 and outer > 1
    for tail in range(inner + 1):
        plan = plans_of(replace(ring, deferred_local_tiles=tail)).backward
        for channel in Channel:
            assert hops(plan, channel) == hops(plain, channel)
        found = {tuple(exposed(rank_plan)) for rank_plan in plan.ranks.values()}
        last = Channel.GRADIENT_OUTER if inner == 1 else Channel.GRADIENT_INNER
        if tail == 0:  # every rank sends one gradient home and receives one
            assert found == {(Channel.GRADIENT_OUTER,) * 2 * two_levels + (last,) * 2}
        else:
            assert found == {(Channel.GRADIENT_INNER,) * 2 if two_levels and tail == 1 else ()}
        steps = inner * outer + (2 if two_levels and tail < 2 else 1)
        assert {len(rank_plan.steps) for rank_plan in plan.ranks.values()} == {steps}


def test_the_local_tile_is_split_in_halves_of_equal_work() -> None:
    method = ring_method(4)
    bands = Visibility(Mask(4000), divide_sequence(method, 4000).ring).bands(1, 1)
    first, last = (sum(band.area() for band in part) for part in halves(bands))
    assert first + last == sum(band.area() for band in bands)
    assert 0.99 < first / last < 1.01


@pytest.mark.parametrize(("inner", "outer"), [(2, 1), (1, 4), *DOUBLE])
def test_all_but_the_last_gathered_gradient_hide_behind_tiles(inner: int, outer: int) -> None:
    size, plans = inner * outer, plans_of(ring_method(inner, outer, kv_transport="all_gather"))
    last = Channel.GRADIENT_INNER if outer == 1 else Channel.GRADIENT_OUTER
    for rank in range(size):
        assert exposed(plans.forward.ranks[rank]) == []
        assert exposed(plans.backward.ranks[rank]) == [last] * 2  # one sent, one received
    assert hops(plans.forward, Channel.PAYLOAD_INNER) == hops(plans.backward, Channel.GRADIENT_INNER) == {inner - 1}
    assert hops(plans.forward, Channel.PAYLOAD_OUTER) == hops(plans.backward, Channel.GRADIENT_OUTER) == {size - inner}


# ---- buffers and planning -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inner", "outer", "buffers"), [(8, 1, 2), (4, 2, 3), (4, 4, 4)])
def test_travelling_blocks_need_few_buffers(inner: int, outer: int, buffers: int) -> None:
    ring = ring_method(inner, outer)
    assert travelling(plans_of(ring, Mask(4 * ring.cp_size)).forward, Kind.KV) <= buffers
    plans = plans_of(ring_method(4, 2, kv_transport="all_gather"))  # gathered ones no longer than they must
    assert travelling(plans.forward, Kind.KV) == 6
    assert travelling(plans.backward, Kind.DKV) <= 3


@pytest.mark.parametrize("circulates", ["kv", "q"])
def test_a_causal_ring_sets_nothing_to_zero(circulates: Any) -> None:
    """Every sum's first tile covers its rows, and stores."""
    plans = plans_of(ring_method(4, backward_circulates=circulates), Mask(32))
    both = (plans.forward, plans.backward)
    ops = [o.op for plan in both for r in plan.ranks.values() for step in r.steps for o in (*step.pre, *step.after)]
    assert "init" not in ops
    assert "add" in ops


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ("single", "megatron_tp", "fpdt")])
def test_one_rank_of_128_is_planned_within_a_second_of_cpu_time(preset: Any) -> None:
    """A tenth of it is usual; a planner that looks at all pairs of ranks one by one takes seconds."""
    seq_len, topology = 1 << 20, Topology(16, 8)
    config = RunConfig(
        model=ModelConfig(num_heads=128, num_kv_heads=128, head_dim=16),
        attention=AttentionConfig(preset=preset),
        train=TrainConfig(seq_len=seq_len),
    )
    method = method_of(config, topology)
    blocks = divide_sequence(method, seq_len)
    start_s = time.process_time()
    plans = plan_method(method, Mask(seq_len), blocks, 77)
    cpu_s = time.process_time() - start_s
    assert set(plans.forward.ranks) == set(plans.backward.ranks) == {77}
    assert cpu_s < 1, f"{preset}: {cpu_s:.2f} s of CPU time to plan one rank"
