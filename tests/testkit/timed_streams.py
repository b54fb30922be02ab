"""Streams with clocks instead of work: a copy takes its bytes over a rate, compute takes what it is told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from engine.planning.program.ops import Channel


class TimedStreams:
    """StreamOps and StreamClock; an event is the time at which it comes."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._now: defaultdict[Channel | None, float] = defaultdict(float)
        self._current: Channel | None = None
        self.computed_s = 0.0

    @property
    def finished_s(self) -> float:
        """When compute has done all it was given."""
        return self._now[None]

    def compute(self, seconds: float) -> None:
        self._now[None] += seconds
        self.computed_s += seconds

    def record(self, stream: Channel | None) -> float:
        return self._now[stream]

    def hold(self, stream: Channel | None, event: float) -> None:
        self._now[stream] = max(self._now[stream], event)

    @contextmanager
    def under(self, stream: Channel) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def copy(self, source: Tensor, target: Tensor) -> None:
        assert self._current is not None
        target.copy_(source)
        self._now[self._current] += source.nbytes / self._rate

    def mark(self, stream: Channel | None) -> float:
        return self._now[stream]

    def seconds(self, start: float, stop: float) -> float:
        return stop - start
