"""Messages of GPU tensors through host memory over gloo: several ranks may share one GPU, which NCCL refuses.

For correctness, not for speed: the host waits for every copy before it hands the bytes to gloo. The copies run on the
streams of the channels h2d and d2h, in the order that `engine.attention.streams` keeps for those of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine.attention.streams import StreamOps, StreamTransport
from engine.attention.transport import Messenger, Meter, Parcel, Pending, Transport, by_channel
from engine.planning.schedule.plan import HOST_CHANNELS, Channel

Event = TypeVar("Event")


class BlockingStreamOps(StreamOps[Event], Protocol[Event]):
    """Streams that the host can wait for."""

    def finish(self, event: Event) -> None:
        """Return when `event` has come."""


class NoStreams:
    """BlockingStreamOps of a CPU: everything is done when the call returns, so there is no order to keep."""

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

    def finish(self, event: None) -> None:
        """See BlockingStreamOps."""


@dataclass(frozen=True)
class _Flight:
    """One end of a message: the host's copy and, if it is a receive, where it goes."""

    pending: Sequence[Pending]
    host: tuple[Tensor, ...]  # gloo reads or writes it until `pending` is waited for
    targets: tuple[Tensor, ...] = ()


class StagedTransport(Transport, Generic[Event]):
    """Sends device -> host -> gloo -> host -> device; `messenger` moves host tensors.

    Loads and stores of plans run as in StreamTransport.
    """

    def __init__(self, streams: BlockingStreamOps[Event], messenger: Messenger, meter: Meter) -> None:
        super().__init__(meter)
        self._streams = streams
        self._messenger = messenger
        self._copies = StreamTransport(streams, None, meter)
        self._flights: dict[int, _Flight] = {}

    def post(self, parcels: Sequence[Parcel]) -> None:
        """Copy what is sent to the host, wait for it, and start the messages."""
        copies = [parcel for parcel in parcels if parcel.channel in HOST_CHANNELS]
        messages = [parcel for parcel in parcels if parcel.channel not in HOST_CHANNELS]
        if copies:
            self._copies.post(copies)
        hosts = {parcel.message: tuple(_host_like(tensor) for tensor in parcel.tensors) for parcel in messages}
        sends = [parcel for parcel in messages if parcel.op == "send"]
        if sends:
            sources = [tensor for parcel in sends for tensor in parcel.tensors]
            copies_of = [tensor for parcel in sends for tensor in hosts[parcel.message]]
            self._streams.finish(self._copy(Channel.TO_HOST, sources, copies_of))
        for channel, members in by_channel(messages).items():
            staged = [parcel._replace(tensors=hosts[parcel.message]) for parcel in members]
            for parcel, pending in zip(members, self._messenger.start(channel, staged), strict=True):
                self.meter.count(parcel)
                targets = parcel.tensors if parcel.op == "recv" else ()
                self._flights[parcel.message] = _Flight(pending, hosts[parcel.message], targets)

    def wait(self, messages: Sequence[int]) -> None:
        """Wait for gloo, copy what was received to the device and hold the compute stream until it is there."""
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for message in messages:
            flight = self._flights.pop(message, None)
            if flight is None:
                self._copies.wait([message])
                continue
            for pending in flight.pending:
                pending.wait()
            if flight.targets:
                sources += flight.host
                targets += flight.targets
        if targets:
            self._streams.hold(None, self._copy(Channel.TO_DEVICE, sources, targets))

    def _copy(self, channel: Channel, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Event:
        """Copy after what the compute stream has been given so far; the event of the last copy.

        Host tensors may go when Python drops them: torch reuses pinned memory only after the copies that it saw.
        """
        self._streams.hold(channel, self._streams.record(None))
        with self._streams.under(channel):
            for source, target in zip(sources, targets, strict=True):
                self._streams.copy(source, target)
        return self._streams.record(channel)


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
