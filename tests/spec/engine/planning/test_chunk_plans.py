"""Plans of chunk pipelines: bounded device memory, few transfers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.planning.methods.blocks import divide_sequence
from engine.planning.methods.presets import AttentionMethod
from engine.planning.program.ops import AttentionPlan
from engine.planning.schedules.plan import plan_method
from engine.planning.visibility.mask import Mask

ROWS = 23
BASE = AttentionMethod("fpdt", "chunk_cyclic", 1, 1, "kv", "float32", chunk_tokens=3, chunk_store="host")


def method(heads: int = 1, inner: int = 1, outer: int = 1, **changes: object) -> AttentionMethod:
    return replace(BASE, head_parallel_size=heads, ring_inner_size=inner, ring_outer_size=outer, **changes)


def device_rows(plan: AttentionPlan) -> dict[str, int]:
    """Rows of the device's buffers of rank 0, by kind."""
    found: dict[str, int] = {}
    for buffer in plan.ranks[0].buffers:
        if buffer.where == "device":
            found[buffer.kind] = found.get(buffer.kind, 0) + buffer.rows
    return found


@pytest.mark.parametrize("grid", [(1, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_device_buffers_do_not_grow_with_the_sequence(grid, window):
    chosen = method(*grid, chunk_tokens=16)
    found = []
    for chunks in (12, 24):  # more than the window has
        rows = 16 * chunks * chosen.cp_size
        plans = plan_method(chosen, Mask(rows, window=window), divide_sequence(chosen, rows), 0)
        found.append([device_rows(plan) for plan in (plans.forward, plans.backward)])
    assert found[0] == found[1]
    assert max(max(kinds.values()) for kinds in found[0]) <= 5 * 16 * chosen.head_parallel_size


@pytest.mark.parametrize("grid", [(2, 1, 1), (2, 2, 1), (1, 1, 2)], ids=str)
@pytest.mark.thorough_for("(2, 2, 1)", "(1, 1, 2)")
def test_chunks_that_are_only_exchanged_pass_through_few_buffers(grid):
    chosen = method(*grid, chunk_tokens=4)
    for rows in (64, 128):
        for cut in (0, rows // 2, rows - 3):
            plans = plan_method(chosen, Mask(rows), divide_sequence(chosen, rows), recompute_before=cut)
            assert sum(device_rows(plans.recompute).values()) <= 2 * sum(device_rows(plans.forward).values())


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 8])
def test_a_causal_pipeline_of_one_rank_moves_few_chunks(chunks):
    rows = 4 * chunks
    plans = plan_method(method(chunk_tokens=4), Mask(rows), divide_sequence(method(chunk_tokens=4), rows))
    moved: dict[tuple[str, str, str], int] = {}
    for plan in (plans.forward, plans.backward):
        for transfer in plan.ranks[0].transfers():
            key = plan.direction, transfer.op, plan.ranks[0].buffers[transfer.view.buffer].kind
            moved[key] = moved.get(key, 0) + 1
    pairs = chunks * (chunks + 1) // 2
    assert moved["forward", "load", "q"] == moved["forward", "store", "out_lse"] == chunks
    assert moved["backward", "load", "kv"] == moved["backward", "store", "dkv_cast"] == chunks
    assert moved["forward", "load", "kv"] <= max(1, pairs - chunks + 1)  # turning around saves at least one per row
    assert moved["backward", "load", "q_dout_stats"] <= max(1, pairs - chunks + 1)
    loads, stores = moved.get(("backward", "load", "dq"), 0), moved["backward", "store", "dq"]
    assert stores == loads + chunks  # a chunk that stays on the device is neither stored nor fetched
    assert loads <= max(0, pairs - 2 * chunks + 1)


def test_chunks_that_see_nothing_are_neither_fetched_nor_computed():
    mask = Mask(32, window=2)
    plans = plan_method(method(chunk_tokens=4), mask, divide_sequence(method(chunk_tokens=4), 32))
    for plan in (plans.forward, plans.backward):
        assert len(plan.ranks[0].steps) < 25  # of 36 pairs of chunks, 15 see each other
        assert sum(tile.kv.stop > tile.kv.start for tile in plan.ranks[0].tiles()) < 40


def test_the_first_chunks_exchange_does_not_wait_for_the_last():
    chosen = method(2, chunk_tokens=4)
    plan = plan_method(chosen, Mask(64), divide_sequence(chosen, 64)).forward.ranks[0]
    first_tile = next(step.index for step in plan.steps if step.tiles)
    sends = [step.index for step in plan.steps for transfer in step.post if transfer.op == "send"]
    overlapping = [step for step in plan.steps if step.tiles and any(t.channel == "h" for t in step.post)]
    assert min(sends) < first_tile < max(sends)
    assert len(overlapping) >= 7


@pytest.mark.parametrize("grid", [(2, 1, 1), (2, 2, 1)], ids=str)
def test_backward_loads_dout_and_statistics_only_where_it_stored_them(grid):
    """After a head exchange the caller gives q alone; what the host has of the other fields was never written."""
    chosen = method(*grid, chunk_tokens=4)
    plan = plan_method(chosen, Mask(64), divide_sequence(chosen, 64)).backward.ranks[0]
    queries, stored = plan.argument("q_dout"), set[int]()
    for transfer in plan.transfers():
        if transfer.op == "store" and transfer.view.buffer == queries:
            stored.update(range(transfer.view.start, transfer.view.stop))
        if transfer.op == "load" and transfer.source.buffer == queries and transfer.kind is None:
            rows = range(transfer.source.start, transfer.source.stop)
            assert stored.issuperset(rows), f"loads all fields of {rows}, of which only q was written"


@pytest.mark.parametrize(("seq_len", "expected"), [(1, 1), (8, 1), (9, 2), (24, 3), (25, 4)])
def test_all_ranks_have_equally_many_chunks(seq_len, expected):
    chosen = method(2, chunk_tokens=4)
    assert divide_sequence(chosen, seq_len).chunks == expected
    rows = divide_sequence(chosen, seq_len).rank_layout.row_counts
    assert sum(rows) == seq_len
    assert max(rows) <= 4 * expected
