"""RingGrid of ranks in one or two levels, and which rows of a block each of its visitors needs. Arithmetic only.

inner=3, outer=2, block of rank (0,0), upwards     step 0     1     2     3     4     5
                                                   (0,0) (0,1) (0,2) (1,0) (1,1) (1,2)
late=1                                             (0,0) (0,1) (1,0) (1,1) (1,2) (0,2)
turned, downwards                                  (1,2) (1,1) (1,0) (0,2) (0,1) (0,0)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from engine.planning.program.buffers import Rows
from engine.planning.visibility.visible import NOWHERE, Integers, RowRanges


@dataclass(frozen=True)
class RingGrid:
    """`outer` rings of `inner` members each; member m is number m % inner of ring m // inner.

    Every block visits a whole ring (a lap), then the next one. `way`: towards higher (1) or lower (-1) members.

    late     last stops of a block's first lap that are made after all others
    turned   from where the way would end back to the owner
    """

    inner: int
    outer: int
    way: Literal[-1, 1] = -1
    late: int = 0
    turned: bool = False

    @property
    def size(self) -> int:
        """Members, and steps with tiles."""
        return self.inner * self.outer

    @property
    def home_lap(self) -> int:
        """The lap round the owner's ring."""
        return self.outer - 1 if self.turned else 0

    @property
    def home_stop(self) -> int:
        """The owner's stop of that lap."""
        return self.inner - 1 if self.turned else 0

    def visitor(self, owner: int, lap: int, stop: int) -> int:
        """Member that works on a block at a stop of a lap."""
        return int(self._moved(owner, lap, stop, self.way))

    def owner(self, member: int, lap: int, stop: int) -> int:
        """Whose block a member works on at a stop of its lap."""
        return int(self._moved(member, lap, stop, -self.way))

    def step(self, lap: int, stop: int) -> int:
        """When."""
        if lap:
            return lap * self.inner + stop - self.late
        return stop if stop < self.inner - self.late else (self.outer - 1) * self.inner + stop

    def visitors(self, owner: Any, lap: Any, stop: Any) -> Integers:
        """As `visitor`, of arrays."""
        visitors: Integers = self._moved(owner, lap, stop, self.way)
        return visitors

    def _moved(self, member: Any, lap: Any, stop: Any, way: int) -> Any:
        if self.turned:
            lap, stop = -1 - lap, -1 - stop
        ring, local = divmod(member, self.inner)
        return (ring + way * lap) % self.outer * self.inner + (local + way * stop) % self.inner


class Lap:
    """Rows of one block that each stop of a lap needs."""

    def __init__(self, start: Integers, stop: Integers) -> None:
        self._start, self._stop, self._reads = start, stop, start < stop

    def reads(self, stop: int) -> bool:
        """Whether a stop needs any."""
        return bool(self._reads[stop])

    def before(self, stop: int) -> int | None:
        """The last stop before one that needs any."""
        found = self._reads[:stop][::-1]
        return stop - 1 - int(found.argmax()) if found.any() else None

    def last(self) -> int | None:
        """The last stop that needs any."""
        return self.before(len(self._reads))

    def behind(self, stop: int) -> int | None:
        """The next stop that needs any."""
        found = self._reads[stop + 1 :]
        return stop + 1 + int(found.argmax()) if found.any() else None

    def from_here_on(self, stop: int) -> Rows:
        """Hull of what a stop and all behind it need."""
        return Rows(int(self._start[stop:].min()), int(self._stop[stop:].max()))

    def up_to_here(self, stop: int) -> Rows:
        """Hull of what all stops up to this one need."""
        return Rows(int(self._start[: stop + 1].min()), int(self._stop[: stop + 1].max()))

    def rows_of(self, stop: int) -> Rows:
        """What a stop needs."""
        return Rows(int(self._start[stop]), int(self._stop[stop]))


def pairs_at(rings: RingGrid, member: int) -> dict[str, Collection[int]]:
    """Of what a rank sends: blocks of which all readers matter, and readers of which all blocks do.

    Blocks of its own ring, and those with which its laps start, or that end here.
    """
    first = member // rings.inner * rings.inner
    ring = range(first, first + rings.inner)
    starts = {rings.owner(member, lap, 0) for lap in range(rings.outer)}
    ends = {rings.owner(member, rings.outer - 1, stop) for stop in range(rings.inner)}
    return {"blocks": {*ring, *starts, *ends}, "readers": ring}


class RowsNeeded:
    """Rows of blocks that their visitors need, in the order of their visits.

    table   [owner, member]
    last    [owner]: what the last stop takes instead
    """

    def __init__(self, rings: RingGrid, table: RowRanges, last: RowRanges | None = None) -> None:
        self.rings, self.table = rings, table
        self._last = last
        self._laps: dict[tuple[int, int, bool], Lap] = {}

    def lap(self, owner: int, lap: int, *, away: bool = False) -> Lap:
        """One lap of a block; `away`: without the owner's own stop."""
        if (owner, lap, away) not in self._laps:
            rows = self._rows(owner, lap)
            if away and lap == self.rings.home_lap:
                home = self.rings.home_stop
                rows.start[home], rows.stop[home] = NOWHERE, 0
            self._laps[owner, lap, away] = Lap(*rows)
        return self._laps[owner, lap, away]

    def laps_that_read(self, owner: int) -> dict[int, Rows]:
        """The first lap, and all with a stop that needs any: what they and all behind them need."""
        hulls = self._rows(owner, np.arange(self.rings.outer)[:, None]).hull(axis=1)
        behind, exists = hulls.from_here_on(axis=0), hulls.exists
        exists[0] = True
        return {lap: Rows(int(behind.start[lap]), int(behind.stop[lap])) for lap in np.flatnonzero(exists).tolist()}

    def _rows(self, owner: int, laps: int | Integers) -> RowRanges:
        """Of one lap, or of all."""
        visitors = self.rings.visitors(owner, laps, np.arange(self.rings.inner))
        rows = RowRanges(self.table.start[owner, visitors], self.table.stop[owner, visitors])
        if self._last is not None and np.max(laps) == self.rings.outer - 1:
            end = (-1,) * visitors.ndim
            rows.start[end], rows.stop[end] = self._last.start[owner], self._last.stop[owner]
        return rows
