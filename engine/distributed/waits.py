"""How long a rank waits for other ranks, and for whom it waits now. Standard library only.

In synchronous training all ranks take as long as the slowest one. The slow rank itself waits least: when it comes,
everybody is there. So the figure that finds it is not time spent working but time spent waiting.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Ranks differ by a few percent for no reason of their own; less than this share of a step names nobody.
STRAGGLER_SHARE = 0.1


class Wait(NamedTuple):
    """What a rank waits for: the operation, the one rank it needs (None: those of a group), since when."""

    what: str
    peer: int | None
    since_ns: int  # of time.perf_counter_ns


class WaitClock:
    """Adds up the seconds that the main thread spends blocked on other ranks; another thread may look at `current`.

    `begin` and `end` cost about a microsecond together. Waits do not nest.
    """

    def __init__(self) -> None:
        self.current: Wait | None = None
        self._waited_ns = 0

    def begin(self, what: str, peer: int | None = None) -> None:
        """From now on this rank waits for `peer`, or for a group."""
        self.current = Wait(what, peer, time.perf_counter_ns())

    def end(self) -> None:
        """It waits no longer."""
        if self.current is not None:
            self._waited_ns += time.perf_counter_ns() - self.current.since_ns
            self.current = None

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around one blocking collective. After an error `current` stays: it says where the rank was."""
        self.begin(what)
        yield
        self.end()

    def take(self) -> float:
        """Seconds waited since the last call."""
        seconds, self._waited_ns = self._waited_ns / 1e9, 0
        return seconds


def find_straggler(waits_s: Sequence[float], step_time_s: float) -> int | None:
    """The rank that the others wait for, given what every rank waited in one step; None when all are about even."""
    if not waits_s or max(waits_s) - min(waits_s) < STRAGGLER_SHARE * step_time_s:
        return None
    return min(range(len(waits_s)), key=waits_s.__getitem__)
