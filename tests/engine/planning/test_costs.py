"""Counted work against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.planning.schedule.plan import HeadPart, Kind, LocalOp, Slot, Tile, TokenBytes, View
from engine.planning.time.costs import ViewBytes, computed_pairs, query_heads, tile_flops, visible_pairs

BOUND = st.none() | st.integers(-15, 15)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), BOUND, BOUND)
def test_visible_pairs_are_those_inside_the_band(rows: int, keys: int, low: int | None, high: int | None) -> None:
    tile = Tile(View(0, 3, 3 + rows), View(1, 5, 5 + keys), View(2, 0, rows), low=low, high=high)
    inside = [
        (low is None or i - j >= low) and (high is None or i - j <= high) for i in range(rows) for j in range(keys)
    ]
    assert visible_pairs(tile) == sum(inside)


def test_a_tile_costs_its_own_heads_only() -> None:
    shape = TokenBytes(num_heads=12, num_kv_heads=4, head_dim=64)
    tile = Tile(View(0, 0, 8), View(1, 0, 8), View(2, 0, 8), low=0)
    for count in (1, 2, 3, 5):
        parts = [HeadPart(index, count) for index in range(count)]
        slots = [(Slot(Kind.Q, 8, heads=part), Slot(Kind.KV, 8), Slot(Kind.ACC, 8)) for part in parts]
        assert sum(query_heads(slot[0], shape) for slot in slots) == 12
        assert sum(tile_flops(tile, slot, shape, "forward") for slot in slots) == 4 * 64 * 12 * 36
        assert sum(tile_flops(tile, slot, shape, "backward") for slot in slots) == 10 * 64 * 12 * 36


def test_parts_of_different_size_meet_on_the_smaller_one() -> None:
    shape = TokenBytes(num_heads=4, num_kv_heads=4, head_dim=8)
    slots = (Slot(Kind.Q, 5, heads=HeadPart(0, 2)), Slot(Kind.Q, 5, heads=HeadPart(1, 4)))
    both = [LocalOp("copy", View(dst, 0, 5), View(1 - dst, 0, 5)) for dst in range(2)]
    assert [ViewBytes(slots, shape).moved_by_op(op) for op in both] == [2 * 5 * 8 * 2] * 2


def test_a_cast_moves_both_widths_of_the_heads_in_common() -> None:
    shape = TokenBytes(num_heads=4, num_kv_heads=4, head_dim=8)
    slots = (Slot(Kind.DQ, 10), Slot(Kind.DQ_CAST, 10, heads=HeadPart(0, 2)))
    moved = ViewBytes(slots, shape).moved_by_op(LocalOp("copy", View(1, 0, 6), View(0, 0, 6)))
    assert moved == 6 * (2 * 8 * 4 + 2 * 8 * 2)


@pytest.mark.parametrize(
    ("rows", "keys", "low", "high"), [(8, 8, 0, None), (8, 8, 0, 3), (8, 12, None, 2), (5, 9, None, None)]
)
def test_blocks_waste_half_of_one_along_every_edge(rows: int, keys: int, low: int | None, high: int | None) -> None:
    tile = Tile(View(0, 0, rows), View(1, 0, keys), View(2, 0, rows), None, low, high)
    edges = (low is not None) + (high is not None)
    assert computed_pairs(tile, 0) == visible_pairs(tile)
    assert computed_pairs(tile, 1) == min(rows * keys, visible_pairs(tile) + edges * min(rows, keys) / 2)
    assert computed_pairs(tile, 1000) == (rows * keys if edges else visible_pairs(tile))
