"""Measures how long a rank waits for other ranks, and which one it waits for now. Standard library only.

In synchronous training all ranks take as long as the slowest. The slowest rank waits least, since the others are there
when it arrives. So stragglers are found by the time ranks wait, not by the time they work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Waits differ by a few percent without a cause; below this share of a step no straggler is reported.
STRAGGLER_SHARE = 0.1


class Wait(NamedTuple):
    """A wait in progress: the operation, the rank waited for (None: a group), and its start."""

    what: str
    peer: int | None
    since_ns: int  # of time.perf_counter_ns


class WaitClock:
    """Sums the time that the main thread is blocked on other ranks; other threads may read `current`.

    `begin` and `end` together cost about a microsecond. Waits do not nest.
    """

    def __init__(self) -> None:
        self.current: Wait | None = None
        self._waited_ns = 0

    def begin(self, what: str, peer: int | None = None) -> None:
        """Start a wait for `peer`, or for a group (None)."""
        self.current = Wait(what, peer, time.perf_counter_ns())

    def end(self) -> None:
        """End the current wait, if any."""
        if self.current is not None:
            self._waited_ns += time.perf_counter_ns() - self.current.since_ns
            self.current = None

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count the body, one blocking collective, as a wait. After an error `current` stays, to show where it was."""
        self.begin(what)
        yield
        self.end()

    def take(self) -> float:
        """Return the seconds waited since the last call."""
        seconds, self._waited_ns = self._waited_ns / 1e9, 0
        return seconds


def find_straggler(waits_s: Sequence[float], step_time_s: float) -> int | None:
    """Return the rank that the others wait for; None if all wait about equally long.

    Args:
        waits_s: Seconds that each rank waited in one step.
        step_time_s: Duration of the step.
    """
    if not waits_s or max(waits_s) - min(waits_s) < STRAGGLER_SHARE * step_time_s:
        return None
    return min(range(len(waits_s)), key=waits_s.__getitem__)
