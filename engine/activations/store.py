"""Where layers keep what backward needs: in device memory, or in host memory, copied there and back beside compute.

    compute stream   layer n |R|                    layer n+1 ...       |wait S of n-1, its device memory is free| ...
    d2h stream               '-> |wait R| copy n |S|
    compute stream   backward of n: |A|           |wait L of n| layer n ...   (the load of n-1 has begun)
    h2d stream                      '-> |wait A| load n-1 |L|

Streams are ordered by events and the host never waits, as for the transfers of plans (`engine.attention.streams`):

- A copy to the host starts after what compute was given so far. Its source stays referenced here until the compute
  stream has been told to wait for the copy, so its memory, which goes back to that stream, is written only afterwards.
  At most `copies_in_flight` entries are so; beyond that the compute stream waits for the oldest. An entry whose source
  is still there is not loaded at all.
- A load starts after what compute was given so far, which includes waiting for the copy to the host; and its memory may
  be that of a tensor which compute had still to read. Compute waits for every load: if it is used before that, else
  before it is freed.
- So a buffer may be used again at once: the next copy into it starts after all that compute has waited for.

Entries that are dropped without a backward pass (an evaluation with gradients, an exception) are taken back at the
store's next call. Nothing here belongs to a step or a layer, so any number of forward passes may be in flight.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from engine.attention.stream_times import TransferTimes
from engine.attention.streams import CudaStreams, NoStreams, StreamOps
from engine.config.errors import RunError
from engine.device.host_memory import HostPool
from engine.device.row_blocks import is_fake_accelerator
from engine.planning.program.ops import Channel

Event = TypeVar("Event")
COPIES_IN_FLIGHT = 2  # the layer that compute is at, and the one before


class ReleasedError(RunError, RuntimeError):
    """What was kept for backward is asked for after backward released it."""

    def __init__(self) -> None:
        super().__init__(
            "what a layer kept for its backward pass is gone: backward ran a second time through the same forward "
            "pass, but expected was one time. Run the forward pass again, or add up the losses and run backward once."
        )


class SavedTensors(Protocol):
    """Some tensors in a store. Dropping it without `release` is fine."""

    def fetch(self) -> tuple[Tensor, ...]:
        """The tensors, contiguous, on the compute device, ready for its current stream; ReleasedError after `release`.

        May be called again, and then may give the same memory: the tensors must not be written.
        """

    def release(self) -> None:
        """Frees what was kept."""


class ActivationStore(Protocol):
    """A place for what backward needs."""

    def save(self, tensors: Sequence[Tensor]) -> SavedTensors:
        """Keeps the values of `tensors`, which must not be written afterwards; of views only the part they show."""


class DeviceStore:
    """ActivationStore that leaves tensors where they are."""

    def save(self, tensors: Sequence[Tensor]) -> SavedTensors:
        """See ActivationStore."""
        return _OnDevice(tuple(_own_memory(tensor) for tensor in tensors))


class _OnDevice:
    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors: tuple[Tensor, ...] | None = tensors

    def fetch(self) -> tuple[Tensor, ...]:
        if self._tensors is None:
            raise ReleasedError
        return self._tensors

    def release(self) -> None:
        self._tensors = None


def _own_memory(tensor: Tensor) -> Tensor:
    """The tensor without its graph, contiguous, in a storage of no more than its size."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class _Load(NamedTuple, Generic[Event]):
    """A copy back to the device: its targets, and the event of its end."""

    tensors: tuple[Tensor, ...]
    done: Event


@dataclass(eq=False)
class _Contents(Generic[Event]):
    """What belongs to an entry of a HostStore; the store takes it back when the entry is gone.

    shapes    shape and dtype of every tensor
    sources   on the device, while the compute stream has not waited for `stored`, the copy to the host
    before    what was kept before is fetched next, in backward's order
    ahead     a load that nobody has fetched
    fetched   what the last fetch gave, while somebody uses it
    """

    shapes: tuple[tuple[torch.Size, torch.dtype], ...]
    buffers: Sequence[Sequence[Tensor]]
    sources: tuple[Tensor, ...]
    stored: Event
    before: weakref.ref[_Contents[Event]] | None
    ahead: _Load[Event] | None = None
    fetched: tuple[weakref.ref[Tensor], ...] = ()
    released: bool = False


class HostStore(Generic[Event]):
    """ActivationStore in host memory, see the module's text. Use `host_store` to make one.

    copies_in_flight   entries whose device memory may still be held by their copy to the host after `keep`
    loads_ahead        entries that may be loaded before they are fetched: the one kept before the one being fetched
    times              collects how long copies take and compute waits for them; None: bytes alone

    Its methods must run on the thread and stream that compute, one at a time. Whoever drops a store while loads may be
    in flight calls `wait_pending` first.
    """

    def __init__(
        self,
        device: torch.device,
        streams: StreamOps[Event],
        pool: HostPool,
        *,
        copies_in_flight: int = COPIES_IN_FLIGHT,
        loads_ahead: int = 1,
        times: TransferTimes[Any] | None = None,
    ) -> None:
        self.device = device
        self.times = times or TransferTimes()
        self._streams = streams
        self.pool = pool
        self._copies_in_flight = copies_in_flight
        self._loads_ahead = loads_ahead
        self._flying: deque[_Contents[Event]] = deque()  # those with sources, oldest first
        self._ahead: set[_Contents[Event]] = set()
        self._dropped: deque[_Contents[Event]] = deque()  # of entries that are gone; filled by the garbage collector
        self._last: weakref.ref[_Contents[Event]] | None = None

    @property
    def in_use_bytes(self) -> int:
        """Host memory of the entries that are kept."""
        self._take_back_dropped()
        return self.pool.in_use_bytes

    def save(self, tensors: Sequence[Tensor]) -> SavedTensors:
        """See ActivationStore; tensors on the store's device. HostMemoryError beyond the pool's limit."""
        self._take_back_dropped()
        wrong = [tensor.device for tensor in tensors if tensor.device != self.device]
        if wrong:
            raise ValueError(f"a store for {self.device} was given a tensor on {wrong[0]}; keep those in a DeviceStore")
        buffers = self.pool.take(*(tensor.numel() * tensor.element_size() for tensor in tensors))
        sources = tuple(tensor.detach().contiguous() for tensor in tensors)
        shapes = tuple((source.shape, source.dtype) for source in sources)
        stored = self._copy(Channel.TO_HOST, _pairs(sources, buffers))
        contents = _Contents(shapes, buffers, sources, stored, self._last)
        self._last = weakref.ref(contents)
        self._flying.append(contents)
        while len(self._flying) > self._copies_in_flight:
            self._wait_for_copy(self._flying[0])
        entry = _OnHost(self, contents)
        # The entry may be part of a cycle that is collected at any time and on any thread: only note it then.
        weakref.finalize(entry, self._dropped.append, contents).atexit = False
        return entry

    def wait_pending(self) -> None:
        """Makes the compute stream wait for all copies and loads that nobody waited for, and frees their memory."""
        self._take_back_dropped()
        for contents in tuple(self._flying):
            self._wait_for_copy(contents)
        for contents in tuple(self._ahead):
            self._forget_load(contents)

    def fetch(self, contents: _Contents[Event]) -> tuple[Tensor, ...]:
        """For entries: see SavedTensors. Begins the load of the entry before, unless `loads_ahead` others wait."""
        self._take_back_dropped()
        if contents.released:
            raise ReleasedError
        again = tuple(tensor for tensor in (reference() for reference in contents.fetched) if tensor is not None)
        if contents.sources:
            tensors = contents.sources
        elif again and len(again) == len(contents.shapes):
            tensors = again
        else:
            load = contents.ahead or self._load(contents)
            self._forget_load(contents)
            self._wait(load.done)
            contents.fetched = tuple(weakref.ref(tensor) for tensor in load.tensors)
            tensors = load.tensors
        before = contents.before and contents.before()
        if before and not (before.released or before.sources or before.ahead) and len(self._ahead) < self._loads_ahead:
            before.ahead = self._load(before)
            self._ahead.add(before)
        return tensors

    def release(self, contents: _Contents[Event]) -> None:
        """Frees device and host memory of an entry that nobody will fetch any more; nothing if that was done."""
        self._take_back_dropped()
        self._take_back(contents)

    def _load(self, contents: _Contents[Event]) -> _Load[Event]:
        targets = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in contents.shapes)
        pairs = [(buffer, part) for part, buffer in _pairs(targets, contents.buffers)]
        return _Load(targets, self._copy(Channel.TO_DEVICE, pairs))

    def _copy(self, channel: Channel, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        """Copies from first to second, after what the compute stream has been given so far; the event of their end."""
        self._streams.hold(channel, self._streams.record(None))
        with self._streams.under(channel), self.times.transfer(channel, sum(source.nbytes for source, _ in pairs)):
            for source, target in pairs:
                self._streams.copy(source, target)
        return self._streams.record(channel)

    def _wait(self, event: Event) -> None:
        """The compute stream waits for a copy."""
        with self.times.wait():
            self._streams.hold(None, event)

    def _wait_for_copy(self, contents: _Contents[Event]) -> None:
        """The compute stream waits for the copy to the host; then the device memory may go."""
        self._wait(contents.stored)
        contents.sources = ()
        self._flying.remove(contents)

    def _forget_load(self, contents: _Contents[Event]) -> None:
        """A load ahead goes to whoever fetched it, or is freed, after which its memory is the compute stream's."""
        if contents.ahead is not None:
            self._wait(contents.ahead.done)
            contents.ahead = None
            self._ahead.remove(contents)

    def _take_back_dropped(self) -> None:
        while self._dropped:
            self._take_back(self._dropped.popleft())

    def _take_back(self, contents: _Contents[Event]) -> None:
        contents.released = True
        if contents in self._flying:
            self._wait_for_copy(contents)
        self._forget_load(contents)
        self.pool.give_back(contents.buffers)
        contents.buffers = ()


class _OnHost(Generic[Event]):
    """SavedTensors of a HostStore."""

    def __init__(self, store: HostStore[Event], contents: _Contents[Event]) -> None:
        self._store, self._contents = store, contents

    def fetch(self) -> tuple[Tensor, ...]:
        return self._store.fetch(self._contents)

    def release(self) -> None:
        self._store.release(self._contents)


def host_store(device: torch.device, limit_bytes: int | None = None) -> HostStore[Any]:
    """A HostStore for tensors on `device`: pinned memory and streams of its own for a GPU.

    On a CPU it is a copy into other memory, done at once, and nothing is loaded ahead: there is nothing to overlap.
    `limit_bytes`: of this rank.
    """
    if device.type == "cuda":
        streams = CudaStreams(device)
        return HostStore(device, streams, HostPool(limit_bytes, pinned=True), times=TransferTimes(streams))
    if is_fake_accelerator():  # buffers as large as pinned ones
        return HostStore(device, NoStreams(), HostPool(limit_bytes, pinned=True))
    return HostStore(device, NoStreams(), HostPool(limit_bytes), copies_in_flight=0, loads_ahead=0)


def _pairs(tensors: Sequence[Tensor], buffers: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """(bytes of a contiguous tensor, the part of a buffer that holds them), piece by piece."""
    pairs = []
    for tensor, pieces in zip(tensors, buffers, strict=True):
        data, start = tensor.view(-1).view(torch.uint8), 0
        for piece in pieces:
            part = data[start : start + piece.numel()]
            pairs.append((part, piece[: part.numel()]))
            start += piece.numel()
    return pairs
