"""THE clock of tests: time that only `sleep` and the test itself move."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

EPOCH_NS = 1_700_000_000_000_000_000


class Clock:
    """Seconds are what a call, or `monotonic`, gives; `after` has something done when its time has come."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self._plans: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return EPOCH_NS + int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self._plans and self._plans[0][0] <= end:
            self.now, _, action = heapq.heappop(self._plans)
            action()
        self.now = end

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Have `action` done in so many seconds."""
        heapq.heappush(self._plans, (self.now + seconds, next(self._numbers), action))
