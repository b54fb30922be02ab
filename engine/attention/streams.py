"""Transfers that run beside compute on a GPU: one stream per channel, ordered by events, the host never waits.

    compute stream   ... tiles of step s-1, pre(s) |R| tiles of step s ............... |wait D| after(s) ...
    channel stream                                 '-> |wait R| sends and receives |D|-'

At `post` the compute stream records R: every local op and tile that wrote what is sent, and every one that read what
will be overwritten, lies before it. Each channel stream used waits for R, runs all transfers of the channel and step
as one group and records D, the event of all these messages. At `wait` the compute stream waits for D. So a buffer may
be written, sent, received into and read by the plan's rules alone (`engine.planning.program.ops`), and a store
followed by a load of the same host rows is ordered because the plan waits for the store first and R of the load comes
after.

What torch adds below: ProcessGroupNCCL runs a batch of sends and receives of a group on a stream of its own, which
first waits for the stream that is current at the call; `Work.wait()` makes the current stream, not the host, wait for
its end (unless TORCH_NCCL_BLOCKING_WAIT is set). Both are done under the channel stream here, so D follows the
transfer whichever stream carries it. For messages the own stream is therefore not what makes them overlap: the
process group per channel does (one group runs its batches in order), and calls from the compute stream would be
ordered the same. It gives messages and host copies one rule, in terms of public promises alone; copies between host
and device overlap only because of it.

Memory: tensors in flight belong to buffers that live until the plan's end, by which the compute stream has waited for
every transfer; memory freed then goes back to the stream that it was allocated on, the compute stream, and is written
only after those waits. So no `record_stream` is needed. If a run breaks off, its tensors stay referenced here until
`wait_pending` has made the compute stream wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine.attention.stream_times import StreamClock, TransferTimes
from engine.attention.transport import Messenger, Meter, P2POp, Transport, by_channel
from engine.planning.program.ops import HOST_CHANNELS, Channel

Event = TypeVar("Event")


class StreamOps(Protocol[Event]):
    """Streams of one rank: one per channel, and the compute stream (None), on which plans run.

    There is no way to make the host wait.
    """

    def record(self, stream: Channel | None) -> Event:
        """The point that `stream` has been given work up to."""

    def hold(self, stream: Channel | None, event: Event) -> None:
        """What `stream` is given from now on starts after `event`."""

    def under(self, stream: Channel) -> AbstractContextManager[object]:
        """Work that the body starts goes to `stream`."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy between host and device on the stream whose body this is."""


class CudaStreams:
    """StreamOps and StreamClock of one GPU; the compute stream is the one that is current when it is asked for.

    Channel streams have high priority, so that a transfer's few thread blocks are not queued behind those of a tile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[Channel, torch.cuda.Stream] = {
            channel: torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            for channel in Channel
        }

    def record(self, stream: Channel | None) -> torch.cuda.Event:
        """See StreamOps."""
        event: torch.cuda.Event = self._stream(stream).record_event()
        return event

    def hold(self, stream: Channel | None, event: torch.cuda.Event) -> None:
        """See StreamOps."""
        self._stream(stream).wait_event(event)

    def under(self, stream: Channel) -> AbstractContextManager[object]:
        """See StreamOps."""
        return torch.cuda.stream(self._streams[stream])

    def copy(self, source: Tensor, target: Tensor) -> None:
        """See StreamOps; host memory is pinned (else torch would make the host wait)."""
        target.copy_(source, non_blocking=True)

    def mark(self, stream: Channel | None) -> torch.cuda.Event:
        """See StreamClock."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream(stream))
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """See StreamClock."""
        return float(start.elapsed_time(stop)) / 1e3

    def _stream(self, stream: Channel | None) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if stream is None else self._streams[stream]


class NoStreams:
    """StreamOps of a CPU: everything is done when the call returns, so there is no order to keep."""

    def record(self, stream: Channel | None) -> None:
        """See StreamOps."""

    def hold(self, stream: Channel | None, event: None) -> None:
        """See StreamOps."""

    def under(self, stream: Channel) -> AbstractContextManager[object]:
        """See StreamOps."""
        return nullcontext()

    def copy(self, source: Tensor, target: Tensor) -> None:
        """See StreamOps."""
        target.copy_(source)


class StreamTransport(Transport, Generic[Event]):
    """Messages by `messenger` and copies between host and device, each channel on its own stream.

    See the module's text for the order that it keeps. `messenger` is None for a group of one rank; `clock` measures
    `copies` and `messages`.
    """

    def __init__(
        self,
        streams: StreamOps[Event],
        messenger: Messenger | None,
        meter: Meter,
        clock: StreamClock[Event] | None = None,
    ) -> None:
        super().__init__(meter)
        self._streams = streams
        self._messenger = messenger
        self.copies = TransferTimes(clock)
        self.messages = TransferTimes(clock)
        self._done: dict[int, tuple[Event, TransferTimes[Event]]] = {}
        self._in_flight: dict[int, P2POp] = {}  # keeps their tensors alive

    def post(self, ops: Sequence[P2POp]) -> None:
        """Start the transfers after what the compute stream has been given so far."""
        for op in ops:
            if op.tag in self._done:
                self.wait_pending()  # an earlier run broke off: the numbers begin anew
            self.meter.count(op)
            self._in_flight[op.tag] = op
        ready = self._streams.record(None)
        for channel, members in by_channel(ops).items():
            self._streams.hold(channel, ready)
            times = self.copies if channel in HOST_CHANNELS else self.messages
            size = sum(op.num_bytes for op in members) if times.on else 0
            with self._streams.under(channel), times.transfer(channel, size):
                self._start(channel, members)
            done = self._streams.record(channel), times
            for op in members:
                self._done[op.tag] = done

    def wait(self, messages: Sequence[int]) -> None:
        """Hold the compute stream until the messages' batches are done."""
        waited = None
        for message in messages:
            done = self._done.pop(message)
            if done is not waited:  # messages of one batch share theirs
                event, times = waited = done
                with times.wait():
                    self._streams.hold(None, event)
            del self._in_flight[message]

    def wait_pending(self) -> None:
        """After a run that broke off: hold the compute stream until its transfers are done, and forget them."""
        self.wait(tuple(self._done))
        self._in_flight.clear()

    def _start(self, channel: Channel, ops: Sequence[P2POp]) -> None:
        if channel in HOST_CHANNELS:
            for op in ops:
                for source, target in zip(op.tensors, op.into, strict=True):
                    self._streams.copy(source, target)
            return
        assert self._messenger is not None, (channel, ops)
        for works in self._messenger.start(channel, ops):
            for work in works:
                work.wait()  # the channel stream waits, not the host
