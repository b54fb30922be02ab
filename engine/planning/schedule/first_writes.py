"""Sums that nothing has been added to are stored, not set to zero and added to.

Planners start every sum with `init`. Of the rows that one sets, most are first touched by a tile or by a sum that
arrives, which may write them as well: the tile `stores` and the addition becomes a copy. `init` is left for rows that
something else reads first, and those of results that nothing reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from engine.planning.schedule.plan import LocalOp, OpName, Slot, Step, Tile, Transfer, View

Flags = npt.NDArray[np.bool_]


def store_first(steps: Iterable[Step], slots: Sequence[Slot]) -> tuple[Step, ...]:
    """The same steps with as few `init` as possible; `slots` by the number that views have."""
    rows = _Rows(slots)
    changed = [
        Step(
            step.index,
            tuple(op for given in step.pre for op in rows.ops(given)),
            tuple(map(rows.touched_by, step.post)),
            tuple(map(rows.tile, step.tiles)),
            step.wait,
            tuple(op for given in step.after for op in rows.ops(given)),
        )
        for step in steps
    ]
    rows.finish()
    return tuple(Step(s.index, rows.needed(s.pre), s.post, s.tiles, s.wait, rows.needed(s.after)) for s in changed)


class _Rows:
    """Which rows were set by `init` and touched by nothing since, and which must be."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._fresh: dict[int, Flags] = {}
        self._kept: dict[int, Flags] = {}

    def ops(self, op: LocalOp) -> list[LocalOp]:
        """An op in its turn; an addition to fresh rows is a copy."""
        dst, src = op.dst, op.src
        if op.op == "init":
            for flags in (self._fresh, self._kept):
                flags.setdefault(dst.slot, np.zeros(self._slots[dst.slot].rows, dtype=np.bool_))
            self._fresh[dst.slot][dst.start : dst.stop] = True
            return [op]
        if src is not None:
            self._touch(src)
            fresh = self._fresh.get(dst.slot)
            if fresh is not None and op.op == "add" and self._slots[dst.slot].heads == self._slots[src.slot].heads:
                rows = fresh[dst.start : dst.stop]
                parts = [*_runs(~rows, "add"), *_runs(rows, "copy")]
                self._written(dst)
                return [LocalOp(what, _part(dst, *run), _part(src, *run)) for what, *run in parts]
        self._touch(dst)
        return [op]

    def touched_by(self, transfer: Transfer) -> Transfer:
        """A transfer in its turn."""
        for view in (transfer.view, transfer.source):
            if view is not None:
                self._touch(view)
        return transfer

    def tile(self, tile: Tile) -> Tile:
        """A tile in its turn, which stores what is fresh."""
        stores, stores_kv = self._take(tile.acc), tile.acc_kv is not None and self._take(tile.acc_kv)
        return Tile(*tile[:5], stores, stores_kv) if stores or stores_kv else tile

    def finish(self) -> None:
        """Results that nothing reached are what `init` made of them."""
        for number, fresh in self._fresh.items():
            if self._slots[number].pin is not None:
                self._kept[number] |= fresh

    def needed(self, ops: Iterable[LocalOp]) -> tuple[LocalOp, ...]:
        """The ops with `init` for the rows alone that need it."""
        return tuple(found for op in ops for found in (self._parts(op) if op.op == "init" else (op,)))

    def _parts(self, op: LocalOp) -> Iterator[LocalOp]:
        for what, *run in _runs(self._kept[op.dst.slot][op.dst.start : op.dst.stop], "init"):
            yield LocalOp(what, _part(op.dst, *run))

    def _take(self, view: View) -> bool:
        """Whether all rows are fresh, and so may be written; then they are no longer, and otherwise those are kept."""
        fresh = self._fresh.get(view.slot)
        if fresh is None:
            return False
        if fresh[view.start : view.stop].all():
            self._written(view)
            return True
        self._touch(view)
        return False

    def _touch(self, view: View) -> None:
        fresh = self._fresh.get(view.slot)
        if fresh is not None:
            self._kept[view.slot][view.start : view.stop] |= fresh[view.start : view.stop]
            self._written(view)

    def _written(self, view: View) -> None:
        fresh = self._fresh[view.slot]
        fresh[view.start : view.stop] = False
        if not fresh.any():
            del self._fresh[view.slot]


def _runs(flags: Flags, what: OpName) -> Iterator[tuple[OpName, int, int]]:
    """(what, start, stop) of every run of set flags."""
    if flags.all() or not flags.any():
        return iter([(what, 0, len(flags))] if flags.any() else [])
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).tolist()
    return ((what, start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))


def _part(view: View, start: int, stop: int) -> View:
    return View(view.slot, view.start + start, view.start + stop)
