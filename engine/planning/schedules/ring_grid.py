"""Rings of ranks in one or two levels: who works on which block at which step, and which of its rows. Arithmetic only.

A ring grid has `outer` inner rings (nodes) of `inner` ranks each; ring rank r is number r % inner of ring r // inner.
Every block makes one lap around each inner ring, its owner's first; `stop` counts the ranks of a lap.

    inner=3, outer=2: holder (ring, number) of the block of (0, 0)

    step                            0      1      2      3      4      5
    (lap, stop)                  (0, 0) (0, 1) (0, 2) (1, 0) (1, 1) (1, 2)
    direction=1                  (0, 0) (0, 1) (0, 2) (1, 0) (1, 1) (1, 2)
    the same, deferred_stops=1   (0, 0) (0, 1) (1, 0) (1, 1) (1, 2) (0, 2)
    direction=1, is_reversed     (1, 2) (1, 1) (1, 0) (0, 2) (0, 1) (0, 0)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from engine.planning.program.buffers import Rows
from engine.planning.visibility.visible import NOWHERE, Integers, RowRanges


@dataclass(frozen=True)
class RingGrid:
    """The route of every block.

    direction        blocks move towards higher (1) or lower (-1) ring ranks
    deferred_stops   this many last stops of a block's first lap come after all other laps
    is_reversed      blocks start where the route would end, and end at their owners
    """

    inner: int
    outer: int
    direction: Literal[-1, 1] = -1
    deferred_stops: int = 0
    is_reversed: bool = False

    @property
    def size(self) -> int:
        """Number of ranks, and of steps with tiles."""
        return self.inner * self.outer

    @property
    def owner_lap(self) -> int:
        """The lap around the owner's ring."""
        return self.outer - 1 if self.is_reversed else 0

    @property
    def owner_stop(self) -> int:
        """The stop of that lap at which the owner has its block."""
        return self.inner - 1 if self.is_reversed else 0

    def holder(self, owner: int, lap: int, stop: int) -> int:
        """Ring rank that works on the block of `owner` at a stop of a lap."""
        return int(self._moved(owner, lap, stop, self.direction))

    def owner(self, ring_rank: int, lap: int, stop: int) -> int:
        """Whose block a ring rank works on at a stop of a lap."""
        return int(self._moved(ring_rank, lap, stop, -self.direction))

    def step(self, lap: int, stop: int) -> int:
        """Number of the step of a stop, from 0."""
        if lap:
            return lap * self.inner + stop - self.deferred_stops
        return stop if stop < self.inner - self.deferred_stops else (self.outer - 1) * self.inner + stop

    def holders(self, owner: Any, lap: Any, stop: Any) -> Integers:
        """`holder` of arrays."""
        holders: Integers = self._moved(owner, lap, stop, self.direction)
        return holders

    def lap_holders(self, owner: int, lap: int) -> Integers:
        """`holder` of all stops of a lap."""
        ring, number = divmod(self.holder(owner, lap, 0), self.inner)
        # A slice, for a rank that plans for itself asks for a lap at each of its steps.
        start = number * self._lap_direction % self.inner
        return ring * self.inner + self._lap_numbers[start : start + self.inner]

    @property
    def _lap_direction(self) -> int:
        """From stop to stop of a lap; `direction`, unless blocks go against the route."""
        return -self.direction if self.is_reversed else self.direction

    @cached_property
    def _lap_numbers(self) -> Integers:
        """Numbers in a ring from 0 on, for two laps: a lap that begins at any number is a slice of them."""
        return self._lap_direction * np.arange(2 * self.inner) % self.inner

    def _moved(self, ring_rank: Any, lap: Any, stop: Any, direction: int) -> Any:
        if self.is_reversed:
            lap, stop = -1 - lap, -1 - stop
        ring, number = divmod(ring_rank, self.inner)
        return (ring + direction * lap) % self.outer * self.inner + (number + direction * stop) % self.inner


class LapRows:
    """Rows of one block that each stop of one lap needs."""

    def __init__(self, start: Integers, stop: Integers) -> None:
        self._start, self._stop, self._is_needed = start, stop, start < stop

    def is_needed(self, stop: int) -> bool:
        """Whether a stop needs any row of the block."""
        return bool(self._is_needed[stop])

    def previous(self, stop: int) -> int | None:
        """The last stop before this one that needs the block."""
        needed = self._is_needed[:stop][::-1]
        return stop - 1 - int(needed.argmax()) if needed.any() else None

    def next(self, stop: int) -> int | None:
        """The first stop after this one that needs the block."""
        needed = self._is_needed[stop + 1 :]
        return stop + 1 + int(needed.argmax()) if needed.any() else None

    def last(self) -> int | None:
        """The last stop of the lap that needs the block."""
        return self.previous(len(self._is_needed))

    def at(self, stop: int) -> Rows:
        """Rows that a stop needs."""
        return Rows(int(self._start[stop]), int(self._stop[stop]))

    def from_stop(self, stop: int) -> Rows:
        """Hull of the rows that this stop and all later ones need."""
        return Rows(int(self._start[stop:].min()), int(self._stop[stop:].max()))

    def up_to_stop(self, stop: int) -> Rows:
        """Hull of the rows that this stop and all earlier ones need."""
        return Rows(int(self._start[: stop + 1].min()), int(self._stop[: stop + 1].max()))


class RowsNeeded:
    """Rows of every block that the ranks need of it, in the order in which these hold it.

    ranges       [owner, ring rank]: what a rank needs of a block
    final_rows   [owner]: what the last stop of the last lap takes instead
    """

    def __init__(self, grid: RingGrid, ranges: RowRanges, final_rows: RowRanges | None = None) -> None:
        self.grid, self.ranges = grid, ranges
        self._final_rows = final_rows
        self._laps: dict[tuple[int, int, bool], LapRows] = {}

    def of_lap(self, owner: int, lap: int, *, without_owner: bool = False) -> LapRows:
        """Rows of a block that one lap needs; `without_owner`: of the other ranks alone."""
        key = owner, lap, without_owner
        if key not in self._laps:
            rows = self._rows(owner, self.grid.lap_holders(owner, lap), is_final=lap == self.grid.outer - 1)
            if without_owner and lap == self.grid.owner_lap:
                rows.start[self.grid.owner_stop], rows.stop[self.grid.owner_stop] = NOWHERE, 0
            self._laps[key] = LapRows(*rows)
        return self._laps[key]

    def of_laps(self, owner: int) -> dict[int, Rows]:
        """Rows of a block that a lap and all later ones need, for the first lap and all others that need any."""
        holders = self.grid.holders(owner, np.arange(self.grid.outer)[:, None], np.arange(self.grid.inner))
        hulls = self._rows(owner, holders, is_final=True).hull(axis=1)
        later, exists = hulls.from_here_on(axis=0), hulls.exists
        exists[0] = True
        return {lap: Rows(int(later.start[lap]), int(later.stop[lap])) for lap in np.flatnonzero(exists).tolist()}

    def _rows(self, owner: int, holders: Integers, *, is_final: bool) -> RowRanges:
        """Rows that holders of a block need; `is_final`: the last one is the last stop of the last lap."""
        rows = RowRanges(self.ranges.start[owner][holders], self.ranges.stop[owner][holders])
        if self._final_rows is not None and is_final:
            final = (-1,) * holders.ndim
            rows.start[final], rows.stop[final] = self._final_rows.start[owner], self._final_rows.stop[owner]
        return rows


def pairs_that_matter(grid: RingGrid, ring_rank: int) -> dict[str, Collection[int]]:
    """Which entries of `RowsNeeded.ranges` the messages of one rank depend on: all of a table would be size**2 pairs.

    Returns:
        blocks: owners of which every reader matters: its own ring, and the blocks with which its laps begin or end.
        readers: ring ranks of which every block matters: its own ring.
    """
    first = ring_rank // grid.inner * grid.inner
    ring = range(first, first + grid.inner)
    begin = {grid.owner(ring_rank, lap, 0) for lap in range(grid.outer)}
    end = {grid.owner(ring_rank, grid.outer - 1, stop) for stop in range(grid.inner)}
    return {"blocks": {*ring, *begin, *end}, "readers": ring}
