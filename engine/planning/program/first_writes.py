"""Sums that nothing has been added to are stored, not set to zero and added to.

Planners add to sums and never set them to zero. Of their rows most are first touched by a tile or by a sum that
arrives, which may write them as well: the tile `stores` and the addition becomes a copy. Rows that something else
reads first get an `init` before it, and results that nothing reaches one at the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from engine.planning.program.ops import Kind, LocalOp, OpName, Slot, Step, Tile, View

Flags = npt.NDArray[np.bool_]

SUMS = frozenset({Kind.ACC, Kind.DQ, Kind.DKV})


def store_first(steps: Iterable[Step], slots: Sequence[Slot]) -> tuple[Step, ...]:
    """The same steps with what sums start from; `slots` by the number that views have."""
    rows = _FreshRows(slots)
    changed = list(map(rows.step, steps))
    if rest := list(rows.results()):
        first, *others = changed or [Step(0)]
        changed = [replace(first, pre=(*rest, *first.pre)), *others]
    return tuple(changed)


class _FreshRows:
    """Which rows of sums nothing has written yet."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._sums = {number for number, slot in enumerate(slots) if slot.kind in SUMS}  # with fresh rows
        self._fresh: dict[int, Flags] = {}  # of those that were touched

    def step(self, step: Step) -> Step:
        """A step in its turn."""
        pre = [found for op in step.pre for found in self._op(op)]
        for transfer in step.post:
            if source := transfer.view if transfer.op == "send" else transfer.source:
                pre += self._read(source)
            if transfer.op != "send":
                self._write(transfer.view)
        tiles = []
        for tile in step.tiles:
            stores, stores_kv = self._takes(tile.acc), tile.acc_kv is not None and self._takes(tile.acc_kv)
            pre += () if stores else self._read(tile.acc)
            pre += self._read(tile.acc_kv) if tile.acc_kv and not stores_kv else ()
            tiles.append(Tile(*tile[:5], stores, stores_kv) if stores or stores_kv else tile)
        after = [found for op in step.after for found in self._op(op)]
        return Step(step.index, tuple(pre), step.post, tuple(tiles), step.wait, tuple(after))

    def results(self) -> Iterator[LocalOp]:
        """What makes results of which nothing reached some rows."""
        for number in sorted(self._sums):
            slot = self._slots[number]
            if slot.pin is not None and slot.where == "device":
                yield from self._read(View(number, 0, slot.rows))

    def _op(self, op: LocalOp) -> Iterable[LocalOp]:
        """An op behind what it needs; an addition to fresh rows is a copy."""
        dst, src = op.dst, op.src
        assert src is not None, op
        before = self._read(src)
        if op.op != "add":
            self._write(dst)
            return (*before, op)
        if self._slots[dst.slot].heads != self._slots[src.slot].heads:
            return (*before, *self._read(dst), op)
        fresh = self._write(dst)
        if fresh is None:
            return (*before, op)
        runs = (*_runs(~fresh, "add"), *_runs(fresh, "copy"))
        return (*before, *(LocalOp(what, _part(dst, *run), _part(src, *run)) for what, *run in runs))

    def _takes(self, view: View) -> bool:
        """Whether all rows are fresh, and so may be written."""
        return view.slot in self._sums and bool(self._rows(view).all()) and self._write(view) is not None

    def _read(self, view: View) -> Iterable[LocalOp]:
        """What makes fresh rows readable."""
        fresh = self._write(view)
        return () if fresh is None else [LocalOp(what, _part(view, *run)) for what, *run in _runs(fresh, "init")]

    def _write(self, view: View) -> Flags | None:
        """Which rows were fresh, if the slot has such; none is from now on."""
        if view.slot not in self._sums:
            return None
        rows = self._rows(view)
        fresh = rows.copy()
        rows[:] = False
        if not self._fresh[view.slot].any():
            self._sums.discard(view.slot)
        return fresh

    def _rows(self, view: View) -> Flags:
        if view.slot not in self._fresh:
            self._fresh[view.slot] = np.ones(self._slots[view.slot].rows, dtype=np.bool_)
        return self._fresh[view.slot][view.start : view.stop]


def _runs(flags: Flags, what: OpName) -> Iterator[tuple[OpName, int, int]]:
    """(what, start, stop) of every run of set flags."""
    if flags.all() or not flags.any():
        return iter([(what, 0, len(flags))] if flags.any() else [])
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).tolist()
    return ((what, start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))


def _part(view: View, start: int, stop: int) -> View:
    return View(view.slot, view.start + start, view.start + stop)
