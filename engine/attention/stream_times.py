"""How long transfers were under way on their streams, and how long compute stood still for them.

    channel stream   |ready| ... copy ............ |done|                    under way: done - ready
    compute stream   tiles of step s ... |before| waits for the copy |after| exposed:   after - before

All four are events on the device, so measuring makes nobody wait; they are read when the device has done all of it. A
wait that is over before compute comes to it takes no time.

`under way` begins when the transfer may begin, and it may begin late: behind a tile that fills the device, or a peer
that is not there. So it is no measure of the wire, and one less exposed / under way calls a run in which every copy
waits for the tile before it nine tenths hidden. What share of the wire's time is exposed is told by `exposed_share`,
against the seconds that the same bytes take while nothing else runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from engine.planning.program.ops import Channel

Event = TypeVar("Event")


class StreamClock(Protocol[Event]):
    """Points in time on the streams of a device; None is the compute stream."""

    def mark(self, stream: Channel | None) -> Event:
        """The time when `stream` has done what it was given so far."""

    def seconds(self, start: Event, stop: Event) -> float:
        """From one to the other, when both have come."""


_NOTHING = nullcontext()


class Times(NamedTuple):
    """Of some transfers: bytes, seconds under way (two directions at once count twice), seconds that compute waited for
    them. None: without streams of its own a copy takes compute's time, and nobody measured it.
    """

    transferred_bytes: int
    transfer_s: float | None
    exposed_s: float | None

    def exposed_share(self, idle_wire_s: float) -> float | None:
        """Exposed seconds over those that these bytes take on an idle wire: 0 is hidden, 1 adds all of them to the
        time. None if unknown or nothing was transferred.
        """
        if self.exposed_s is None or not self.transferred_bytes or not idle_wire_s:
            return None
        return self.exposed_s / idle_wire_s


class TransferTimes(Generic[Event]):
    """Collects what is transferred and waited for between `start` and `read`; otherwise it does nothing.

    clock   None: bytes are counted, no time is known
    """

    def __init__(self, clock: StreamClock[Event] | None = None) -> None:
        self._clock = clock
        self.on = False  # whether things count
        self._bytes = 0
        self._transfers: list[tuple[Event, Event]] = []
        self._waits: list[tuple[Event, Event]] = []

    def start(self) -> None:
        """From now on things count."""
        self._reset()
        self.on = True

    def read(self) -> Times:
        """What came since `start`, and the end of counting. The device must have done all of it."""
        found = Times(self._bytes, self._sum(self._transfers), self._sum(self._waits))
        self._reset()
        return found

    def _reset(self) -> None:
        self.on, self._bytes = False, 0
        self._transfers.clear()
        self._waits.clear()

    def transfer(self, channel: Channel, size_bytes: int) -> AbstractContextManager[None]:
        """Around the work that is given to `channel`, after what it has to wait for."""
        if not self.on:
            return _NOTHING
        self._bytes += size_bytes
        return self._between(channel, self._transfers)

    def wait(self) -> AbstractContextManager[None]:
        """Around telling the compute stream to wait, and nothing else."""
        return self._between(None, self._waits) if self.on else _NOTHING

    @contextmanager
    def _between(self, stream: Channel | None, pairs: list[tuple[Event, Event]]) -> Iterator[None]:
        if self._clock is None:
            yield
            return
        before = self._clock.mark(stream)
        yield
        pairs.append((before, self._clock.mark(stream)))

    def _sum(self, pairs: list[tuple[Event, Event]]) -> float | None:
        if self._clock is None:
            return None
        return sum((self._clock.seconds(*pair) for pair in pairs), 0.0)


def total(times: Iterable[Times]) -> Times:
    """All of them together; seconds are unknown if they are of one that transferred something."""
    found = [one for one in times if one.transferred_bytes or one.exposed_s]

    def added(values: list[Any]) -> float | None:
        return None if not found or None in values else sum(values)

    return Times(
        sum(one.transferred_bytes for one in found),
        added([one.transfer_s for one in found]),
        added([one.exposed_s for one in found]),
    )
