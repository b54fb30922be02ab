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

from engine.planning.program.ops import Buffer, Kind, LocalOp, OpName, Step, View

Flags = npt.NDArray[np.bool_]

SUMS = frozenset({Kind.PARTIAL, Kind.DQ, Kind.DKV})


def store_first(steps: Iterable[Step], buffers: Sequence[Buffer]) -> tuple[Step, ...]:
    """Return the steps with stores in place of the first additions to every sum; `buffers` are indexed by view."""
    rows = _FreshRows(buffers)
    changed = list(map(rows.step, steps))
    if rest := list(rows.results()):
        first, *others = changed or [Step(0)]
        changed = [replace(first, pre=(*rest, *first.pre)), *others]
    return tuple(changed)


class _FreshRows:
    """Rows of sums that were not written yet."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._slots = buffers
        self._sums = {number for number, buffer in enumerate(buffers) if buffer.kind in SUMS}  # with fresh rows
        self._fresh: dict[int, Flags] = {}  # of the buffers seen so far

    def step(self, step: Step) -> Step:
        """Return the step after the ones before it, with stores and initialisation."""
        pre = [found for op in step.pre for found in self._op(op)]
        for transfer in step.post:
            if source := transfer.view if transfer.op == "send" else transfer.source:
                pre += self._read(source)
            if transfer.op != "send":
                self._write(transfer.view)
        tiles = []
        for tile in step.tiles:
            # Rows are fresh for all heads or for none, so a tile of some heads adds.
            stores, stores_kv = (
                view is not None and tile.heads.count == 1 and self._takes(view) for view in (tile.sums, tile.kv_sums)
            )
            pre += () if stores else self._read(tile.sums)
            pre += self._read(tile.kv_sums) if tile.kv_sums and not stores_kv else ()
            tiles.append(tile._replace(stores=stores, stores_kv=stores_kv) if stores or stores_kv else tile)
        after = [found for op in step.after for found in self._op(op)]
        return Step(step.index, tuple(pre), step.post, tuple(tiles), step.wait, tuple(after))

    def results(self) -> Iterator[LocalOp]:
        """Yield ops that initialise rows of results to which nothing was added."""
        for number in sorted(self._sums):
            buffer = self._slots[number]
            if buffer.argument is not None and buffer.where == "device":
                yield from self._read(View(number, 0, buffer.rows))

    def _op(self, op: LocalOp) -> Iterable[LocalOp]:
        """Return an op after the initialisation it needs; adding to or merging into fresh rows becomes a copy."""
        dst, src = op.dst, op.src
        assert src is not None, op
        before = self._read(src)
        if op.op not in ("add", "merge"):
            self._write(dst)
            return (*before, op)
        if self._slots[dst.buffer].heads != self._slots[src.buffer].heads:
            return (*before, *self._read(dst), op)
        fresh = self._write(dst)
        if fresh is None:
            return (*before, op)
        runs = (*_runs(~fresh, op.op), *_runs(fresh, "copy"))
        return (*before, *(LocalOp(what, _part(dst, *run), _part(src, *run)) for what, *run in runs))

    def _takes(self, view: View) -> bool:
        """Whether all rows are fresh, and so may be written."""
        return view.buffer in self._sums and bool(self._rows(view).all()) and self._write(view) is not None

    def _read(self, view: View) -> Iterable[LocalOp]:
        """Return the ops that initialise fresh rows before they are read."""
        fresh = self._write(view)
        return () if fresh is None else [LocalOp(what, _part(view, *run)) for what, *run in _runs(fresh, "init")]

    def _write(self, view: View) -> Flags | None:
        """Which rows were fresh, if the buffer has such; none is from now on."""
        if view.buffer not in self._sums:
            return None
        rows = self._rows(view)
        fresh = rows.copy()
        rows[:] = False
        if not self._fresh[view.buffer].any():
            self._sums.discard(view.buffer)
        return fresh

    def _rows(self, view: View) -> Flags:
        if view.buffer not in self._fresh:
            self._fresh[view.buffer] = np.ones(self._slots[view.buffer].rows, dtype=np.bool_)
        return self._fresh[view.buffer][view.start : view.stop]


def _runs(flags: Flags, what: OpName) -> Iterator[tuple[OpName, int, int]]:
    """Return (what, start, stop) for every run of set flags."""
    if flags.all() or not flags.any():
        return iter([(what, 0, len(flags))] if flags.any() else [])
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).tolist()
    return ((what, start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))


def _part(view: View, start: int, stop: int) -> View:
    return View(view.buffer, view.start + start, view.start + stop)
