"""Plans of chunk pipelines: every pair counted once, exact numbers, bounded device memory, few transfers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_oracle import Group, dense_visibility, errors, oracle, random_inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.counting import prove_pair
from engine.attention.kernels.reference import ReferenceKernel
from engine.attention.mask import BlockList, Mask
from engine.attention.methods import PlanPair, chunk_count, divide_sequence, plan_method
from engine.attention.plan import AttentionPlan, TokenBytes
from engine.attention.planners.chunk_stays import Stay, stays
from engine.attention.presets import AttentionMethod
from engine.attention.topology import Topology

ROWS = 23
MASKS = {
    "causal": Mask(ROWS),
    "full": Mask(ROWS, causal=False),
    "window": Mask(ROWS, window=4),
    "documents": Mask(ROWS - 1, documents=(0, 1, 7, 15)),
    "blocks": Mask(ROWS, blocks=BlockList.from_pairs(4, {(0, 0), (2, 1), (3, 3), (5, 0), (5, 5)})),
}
BASE = AttentionMethod("fpdt", "chunk_cyclic", 1, 1, "kv", "float32", "", chunk_tokens=3, chunk_store="host")


def method(heads: int = 1, inner: int = 1, outer: int = 1, **changes: object) -> AttentionMethod:
    return replace(BASE, head_parallel_size=heads, ring_inner_size=inner, ring_outer_size=outer, **changes)


def prove(chosen: AttentionMethod, mask: Mask, rows: int = ROWS) -> PlanPair:
    """Structural rules and counting runs over both hubs."""
    blocks = divide_sequence(chosen, rows, [mask])
    plans = plan_method(chosen, mask, blocks)
    plans.forward.validate()
    plans.backward.validate()
    for late in (True, False):
        prove_pair(plans, mask, blocks, late=late)
    return plans


def check_numbers(chosen: AttentionMethod, mask: Mask, heads: tuple[int, int] = (4, 4)) -> None:
    """Equal to dense float64 attention; and bytes moved are those planned."""
    blocks = divide_sequence(chosen, ROWS, [mask])
    plans = plan_method(chosen, mask, blocks)
    inputs = random_inputs(ROWS, *heads)
    topology = Topology(chosen.ring_outer_size, chosen.cp_size // chosen.ring_outer_size)
    result = Group(plans, blocks, ReferenceKernel(), topology=topology, wire=torch.float64).run(inputs)
    found = errors(result.values, oracle(inputs, dense_visibility(mask, ROWS)))
    assert all(error < 1e-10 for error in found.values()), found
    tokens = TokenBytes(*heads, 8, element_bytes=8, gradient_bytes=8, wire_gradient_bytes=8)
    assert plans.forward.bytes_by_link(tokens, topology) == result.forward_bytes
    assert plans.backward.bytes_by_link(tokens, topology) == result.backward_bytes


@pytest.mark.parametrize("store", ["host", "device"])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.pairwise
def test_every_pair_is_counted_once_and_numbers_equal_dense_attention(mask, heads, store):
    for chunks in range(1, 7):
        tokens = -(-ROWS // heads // chunks)
        chosen = method(heads, chunk_tokens=tokens, chunk_store=store, prefetch_chunks=chunks % 4)
        prove(chosen, mask)
    check_numbers(replace(chosen, chunk_tokens=2), mask)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.pairwise
def test_chunks_may_be_fetched_any_distance_ahead(mask, prefetch):
    for chosen in (method(chunk_tokens=4), method(2, chunk_tokens=2), method(1, 2, chunk_tokens=3)):
        prove(replace(chosen, prefetch_chunks=prefetch), mask)


@pytest.mark.parametrize("store", ["host", "device"])
@pytest.mark.parametrize("grid", [(1, 2, 1), (1, 3, 1), (1, 2, 2), (1, 1, 3), (2, 2, 1), (2, 2, 2)], ids=str)
def test_chunks_travel_around_rings(grid, store):
    for layout in ("chunk_cyclic", "zigzag"):
        for mask in (MASKS["causal"], MASKS["documents"], MASKS["window"]):
            prove(method(*grid, chunk_tokens=2, chunk_store=store, layout=layout), mask)
    check_numbers(method(*grid, chunk_tokens=3, chunk_store=store), MASKS["causal"])
    prove(method(*grid, chunk_tokens=3, chunk_store=store, gradient_wire_dtype="bfloat16"), MASKS["causal"])


@pytest.mark.parametrize(("heads", "parallel"), [((4, 2), 4), ((8, 1), 4), ((6, 2), 2)])
def test_kv_heads_may_be_few(heads, parallel):
    for store in ("host", "device"):
        for rings in ((1, 1), (2, 1)):
            replicated = parallel > heads[1]
            chosen = method(parallel, *rings, chunk_tokens=2, chunk_store=store, kv_replicated=replicated)
            check_numbers(chosen, MASKS["causal"], heads)


@settings(deadline=None)
@given(
    rows=st.integers(2, 20),
    chunk_tokens=st.integers(1, 8),
    prefetch=st.integers(0, 3),
    grid=st.sampled_from([(1, 1, 1), (2, 1, 1), (3, 1, 1), (1, 2, 1), (2, 1, 2)]),
    store=st.sampled_from(["host", "device"]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 20),
    starts=st.sets(st.integers(1, 19)),
)
def test_any_small_pipeline_is_proven(rows, chunk_tokens, prefetch, grid, store, causal, window, starts):
    documents = (0, *sorted(start for start in starts if start < rows))
    mask = Mask(rows, causal=causal, window=window, documents=documents)
    changes = {"chunk_tokens": chunk_tokens, "prefetch_chunks": prefetch, "chunk_store": store}
    prove(method(*grid, **changes), mask, rows + rows % 3)


def device_rows(plan: AttentionPlan) -> dict[str, int]:
    """Rows of the device's buffers of rank 0, by kind."""
    found: dict[str, int] = {}
    for slot in plan.ranks[0].slots:
        if slot.where == "device":
            found[slot.kind] = found.get(slot.kind, 0) + slot.rows
    return found


@pytest.mark.parametrize("grid", [(1, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_device_buffers_do_not_grow_with_the_sequence(grid, window):
    chosen = method(*grid, chunk_tokens=16)
    found = []
    for chunks in (6, 12):
        rows = 16 * chunks * chosen.cp_size
        plans = plan_method(chosen, Mask(rows, window=window), divide_sequence(chosen, rows), 0)
        found.append([device_rows(plan) for plan in (plans.forward, plans.backward)])
    assert found[0] == found[1]
    assert max(max(kinds.values()) for kinds in found[0]) <= 5 * 16 * chosen.head_parallel_size


@pytest.mark.parametrize("grid", [(1, 1, 1), (4, 1, 1), (2, 2, 1)], ids=str)
def test_only_transfers_touch_host_memory(grid):
    chosen = method(*grid, chunk_tokens=3, kv_replicated=grid[0] == 4)
    plans = plan_method(chosen, MASKS["documents"], divide_sequence(chosen, ROWS))
    for plan in (plans.forward, plans.backward):
        for rank_plan in plan.ranks.values():
            ops = [op for step in rank_plan.steps for op in (*step.pre, *step.after)]
            views = [view for op in ops for view in (op.dst, op.src) if view]
            views += [view for tile in rank_plan.tiles() for view in (tile.q, tile.kv, tile.acc, tile.acc_kv) if view]
            messages = [transfer for transfer in rank_plan.transfers() if transfer.source is None]
            views += [transfer.view for transfer in messages]
            assert {rank_plan.slots[view.slot].where for view in views} == {"device"}
            assert all(slot.where == "host" for slot in rank_plan.slots if slot.pin)


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 8])
def test_a_causal_pipeline_of_one_rank_moves_few_chunks(chunks):
    rows = 4 * chunks
    plans = plan_method(method(chunk_tokens=4), Mask(rows), divide_sequence(method(chunk_tokens=4), rows))
    moved: dict[tuple[str, str, str], int] = {}
    for plan in (plans.forward, plans.backward):
        for transfer in plan.ranks[0].transfers():
            key = plan.direction, transfer.op, plan.ranks[0].slots[transfer.view.slot].kind
            moved[key] = moved.get(key, 0) + 1
    pairs = chunks * (chunks + 1) // 2
    assert moved["forward", "load", "q"] == moved["forward", "store", "saved"] == chunks
    assert moved["backward", "load", "kv"] == moved["backward", "store", "dkv_cast"] == chunks
    assert moved["forward", "load", "kv"] <= max(1, pairs - chunks + 1)  # turning around saves at least one per row
    assert moved["backward", "load", "qx"] <= max(1, pairs - chunks + 1)
    loads, stores = moved.get(("backward", "load", "dq"), 0), moved["backward", "store", "dq"]
    assert stores == loads + chunks  # a chunk that stays on the device is neither stored nor fetched
    assert loads <= max(0, pairs - 2 * chunks + 1)


def test_chunks_that_see_nothing_are_neither_fetched_nor_computed():
    mask = Mask(32, window=2)
    plans = plan_method(method(chunk_tokens=4), mask, divide_sequence(method(chunk_tokens=4), 32))
    for plan in (plans.forward, plans.backward):
        assert len(plan.ranks[0].steps) < 25  # of 36 pairs of chunks, 15 see each other
        assert sum(tile.kv.stop > tile.kv.start for tile in plan.ranks[0].tiles()) < 40


def test_what_is_needed_soon_stays():
    assert stays([(3, 0), (4, 0), (9, 0)], 1) == [Stay(0, 3, 4, True, False), Stay(0, 9, 9, False, True)]
    assert stays([(0, 0), (1, 1), (2, 0)], 1) == [Stay(0, 0, 2), Stay(1, 1, 1)]  # cannot be back by 2
    assert len(stays([(0, 0), (3, 0)], 1)) == 2  # stored during 1, fetched during 2
    assert len(stays([(0, 0), (3, 0)], 2)) == 1


def test_the_first_chunks_exchange_does_not_wait_for_the_last():
    chosen = method(2, chunk_tokens=4)
    plan = plan_method(chosen, Mask(64), divide_sequence(chosen, 64)).forward.ranks[0]
    first_tile = next(step.index for step in plan.steps if step.tiles)
    sends = [step.index for step in plan.steps for transfer in step.post if transfer.op == "send"]
    overlapping = [step for step in plan.steps if step.tiles and any(t.channel == "h" for t in step.post)]
    assert min(sends) < first_tile < max(sends)
    assert len(overlapping) >= 7


@pytest.mark.parametrize(("seq_len", "expected"), [(1, 1), (8, 1), (9, 2), (24, 3), (25, 4)])
def test_all_ranks_have_equally_many_chunks(seq_len, expected):
    chosen = method(2, chunk_tokens=4)
    assert chunk_count(chosen, seq_len) == expected
    rows = divide_sequence(chosen, seq_len).home.row_counts
    assert sum(rows) == seq_len
    assert max(rows) <= 4 * expected


def test_a_rank_plans_alone_what_the_whole_plan_has_for_it():
    chosen = method(2, 2, chunk_tokens=4)
    blocks = divide_sequence(chosen, 64)
    whole = plan_method(chosen, Mask(64), blocks)
    for rank in range(4):
        alone = plan_method(chosen, Mask(64), blocks, rank)
        for one, all_ranks in ((alone.forward, whole.forward), (alone.backward, whole.backward)):
            assert one.ranks[rank].slots == all_ranks.ranks[rank].slots
            assert [step.tiles for step in one.ranks[rank].steps if step.tiles] == [
                step.tiles for step in all_ranks.ranks[rank].steps if step.tiles
            ]
