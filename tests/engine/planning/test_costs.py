"""Counted work against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.planning.schedule.plan import HeadPart, Kind, LocalOp, Slot, Tile, TokenBytes, View
from engine.planning.sequence.mask import UNBOUNDED, Band
from engine.planning.time.costs import ViewBytes, computed_pairs, query_heads, tile_flops

LOW, HIGH = st.just(-UNBOUNDED) | st.integers(-15, 15), st.just(UNBOUNDED) | st.integers(-15, 15)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), LOW, HIGH)
def test_visible_pairs_are_those_inside_the_band(rows: int, keys: int, low: int, high: int) -> None:
    assert Band(3, 3 + rows, 5, 5 + keys, low, high).area() == sum(
        low <= i - j <= high for i in range(rows) for j in range(keys)
    )


def test_a_tile_costs_its_own_heads_only() -> None:
    shape = TokenBytes(num_heads=12, num_kv_heads=4, head_dim=64)
    tile = Tile(View(0, 0, 8), View(1, 0, 8), View(2, 0, 8), Band(0, 8, 0, 8, low=0))
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
    ("band", "edges"),
    [(Band(0, 8, 0, 8, 0), 1), (Band(0, 8, 0, 8, 0, 3), 2), (Band(0, 8, 0, 12, high=2), 1), (Band(0, 5, 0, 9), 0)],
)
def test_blocks_waste_half_of_one_along_every_edge(band: Band, edges: int) -> None:
    whole, side = band.num_queries * band.num_keys, min(band.num_queries, band.num_keys)
    assert computed_pairs(band, 0) == band.area()
    assert computed_pairs(band, 1) == min(whole, band.area() + edges * side / 2)
    assert computed_pairs(band, 1000) == (whole if edges else band.area())
