"""Sums are stored by what writes them first; `init` is left where something else would meet rows without values."""

from __future__ import annotations

from attention_oracle import ring_method

from engine.planning.methods.blocks import divide_sequence
from engine.planning.methods.methods import plan_method
from engine.planning.schedule.first_writes import store_first
from engine.planning.schedule.plan import Kind, LocalOp, Slot, Step, Tile, View
from engine.planning.sequence.mask import Mask

SLOTS = {
    0: Slot(Kind.DQ, 8),
    1: Slot(Kind.DKV, 8),
    2: Slot(Kind.DKV, 8, "dkv"),
}
INPUT = View(9, 0, 4)


def tile(start: int, stop: int, kv_start: int = 0, kv_stop: int = 8, sums: int = 1) -> Tile:
    return Tile(INPUT, INPUT, View(0, start, stop), View(sums, kv_start, kv_stop))


def init(slot: int, start: int = 0, stop: int = 8) -> LocalOp:
    return LocalOp("init", View(slot, start, stop))


def stored(*steps: Step) -> tuple[list[LocalOp], list[tuple[bool, bool]]]:
    """(ops that are left, what every tile stores)."""
    found = store_first(steps, SLOTS)
    ops = [op for step in found for op in (*step.pre, *step.after)]
    return ops, [(t.stores, t.stores_kv) for step in found for t in step.tiles]


def test_rows_that_a_tile_shares_with_one_before_are_set_first() -> None:
    ops, stores = stored(Step(0, (init(0), init(1)), (), (tile(2, 4), tile(0, 8))))
    assert ops == [init(0, 0, 2), init(0, 4, 8)]
    assert stores == [(True, True), (False, False)]


def test_what_arrives_for_more_rows_than_a_tile_has_is_added_to_those_and_copied_to_the_others() -> None:
    """So a tile's gradients and what arrives for the same rows can go to their sum in one pass."""
    add = LocalOp("add", View(1, 0, 8), View(2, 0, 8))
    ops, _ = stored(Step(0, (init(0), init(1)), (), (tile(0, 8, 2, 6),), after=(add,)))
    parts = [("add", 2, 6), ("copy", 0, 2), ("copy", 6, 8)]
    assert ops == [LocalOp(what, View(1, *rows), View(2, *rows)) for what, *rows in parts]  # type: ignore[arg-type]


def test_a_causal_ring_sets_nothing_to_zero() -> None:
    """Every sum's first tile covers its rows."""
    plans = []
    for way in ("kv", "q"):
        method = ring_method(4, backward_circulates=way)
        pair = plan_method(method, Mask(32), divide_sequence(method, 32))
        plans += [pair.forward, pair.backward]
    ops = [op.op for plan in plans for rank in plan.ranks.values() for s in rank.steps for op in (*s.pre, *s.after)]
    assert "init" not in ops
    assert "add" in ops
