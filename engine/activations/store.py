"""Stores for activations: in device memory, or in host memory with copies that overlap computation.

    compute stream   layer n |R|                    layer n+1 ...       |wait S of n-1, its device memory is free| ...
    d2h stream               '-> |wait R| copy n |S|
    compute stream   backward of n: |A|           |wait L of n| layer n ...   (the load of n-1 has begun)
    h2d stream                      '-> |wait A| load n-1 |L|

Streams are ordered by events; the host never waits, as for the transfers of plans (`engine.attention.streams`):

- A copy to the host starts after the work queued on the compute stream so far. Its source tensor is referenced here
  until the compute stream waits for the copy. Only then does the allocator get the memory back, so nothing queued
  earlier can overwrite it. At most `copies_in_flight` entries hold their source; beyond that the compute stream waits
  for the oldest. An entry whose source is still on the device is not loaded at all.
- A load starts after the work queued on the compute stream so far, because its target may be memory of a tensor that
  this work still reads. That work includes the wait for the copy to the host. The compute stream waits for every load:
  before its first use, or before it is freed unused.
- So a host buffer may be reused immediately: the next copy into it starts after all copies compute has waited for.

Entries dropped without a backward pass (an evaluation with gradients, an exception) are reclaimed at the store's next
call. No state belongs to a step or a layer, so any number of forward passes may be in flight.
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
COPIES_IN_FLIGHT = 2  # entries: of the layer that computes, and of the one before


class ReleasedError(RunError, RuntimeError):
    """Saved tensors were fetched after backward had released them."""

    def __init__(self) -> None:
        super().__init__(
            "a layer's saved tensors were released: backward ran a second time through the same forward pass, "
            "expected one time. Run the forward pass again, or add up the losses and run backward once."
        )


class SavedTensors(Protocol):
    """Tensors in a store. Memory is reclaimed as well if it is dropped without `release`."""

    def fetch(self) -> tuple[Tensor, ...]:
        """Return the tensors, contiguous, on the compute device and ready for its current stream.

        A second call may return the same memory, so the tensors must not be written.

        Raises:
            ReleasedError: `release` was called.
        """

    def release(self) -> None:
        """Free the saved tensors."""


class ActivationStore(Protocol):
    """Holds tensors from the forward pass until backward."""

    def save(self, tensors: Sequence[Tensor]) -> SavedTensors:
        """Save `tensors`, which must not be written afterwards; of a view only its own elements."""


class DeviceStore:
    """ActivationStore that leaves tensors in device memory."""

    def save(self, tensors: Sequence[Tensor]) -> SavedTensors:
        """See `ActivationStore`."""
        return _OnDevice(tuple(_compact(tensor) for tensor in tensors))


class _OnDevice:
    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors: tuple[Tensor, ...] | None = tensors

    def fetch(self) -> tuple[Tensor, ...]:
        if self._tensors is None:
            raise ReleasedError
        return self._tensors

    def release(self) -> None:
        self._tensors = None


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor detached, contiguous, in a storage of its own size: a view would keep its base alive."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class _Load(NamedTuple, Generic[Event]):
    """A copy back to the device: its targets, and the event of its completion."""

    tensors: tuple[Tensor, ...]
    done: Event


@dataclass(eq=False)
class _Contents(Generic[Event]):
    """State of an entry of a HostStore; the store reclaims it when the entry is garbage.

    Attributes:
        shapes: Shape and dtype of every tensor.
        buffers: Host buffers of every tensor.
        sources: Device tensors, until the compute stream has waited for `stored`.
        stored: Completion of the copy to the host.
        before: The entry saved before this one, which backward fetches next.
        ahead: A load that was started early and not fetched yet.
        fetched: Result of the last fetch, while it is still referenced elsewhere.
        released: Whether the entry was released.
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
    """ActivationStore in host memory; see the module's docstring. Built by `host_store`.

    Methods must run on the thread and stream that compute, one at a time. Call `wait_pending` before dropping a store
    with loads in flight.

    Args:
        device: Where the tensors are.
        streams: Creates and orders copies.
        pool: Host buffers.
        copies_in_flight: Entries that may hold their device memory after `save`, until their copy is complete.
        loads_ahead: Entries that may be loaded before they are fetched: the one saved before the one being fetched.
        times: Records the duration of copies and how long compute waits for them; None: bytes alone.
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
        self._flying: deque[_Contents[Event]] = deque()  # entries with sources, oldest first
        self._ahead: set[_Contents[Event]] = set()  # entries with a load that was not fetched
        self._dropped: deque[_Contents[Event]] = deque()  # of garbage entries; appended to by the garbage collector
        self._last: weakref.ref[_Contents[Event]] | None = None

    @property
    def in_use_bytes(self) -> int:
        """Host memory of the entries that are alive, in bytes."""
        self._take_back_dropped()
        return self.pool.in_use_bytes

    def save(self, tensors: Sequence[Tensor]) -> SavedTensors:
        """Start copying `tensors` to the host and return without waiting; see `ActivationStore`.

        Raises:
            HostMemoryError: The pool's limit is exceeded.
            ValueError: A tensor is not on the store's device.
        """
        self._take_back_dropped()
        wrong = [tensor.device for tensor in tensors if tensor.device != self.device]
        if wrong:
            raise ValueError(
                f"HostStore.save: got a tensor on {wrong[0]}, expected {self.device}; save it in a DeviceStore"
            )
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
        # The entry may be in a reference cycle that is collected at any time, on any thread, so the finalizer only
        # appends to a deque (atomic) and reclaiming happens at the next call.
        weakref.finalize(entry, self._dropped.append, contents).atexit = False
        return entry

    def wait_pending(self) -> None:
        """Make the compute stream wait for all outstanding copies and loads, and free their memory."""
        self._take_back_dropped()
        for contents in tuple(self._flying):
            self._wait_for_copy(contents)
        for contents in tuple(self._ahead):
            self._end_load(contents)

    def fetch(self, contents: _Contents[Event]) -> tuple[Tensor, ...]:
        """Return an entry's tensors (`SavedTensors.fetch`) and start loading the entry saved before it.

        That load is skipped if `loads_ahead` others are pending.
        """
        self._take_back_dropped()
        if contents.released:
            raise ReleasedError
        alive = tuple(tensor for tensor in (reference() for reference in contents.fetched) if tensor is not None)
        if contents.sources:  # the copy to the host is recent: its source is still on the device
            tensors = contents.sources
        elif alive and len(alive) == len(contents.shapes):  # fetched before and still in use
            tensors = alive
        else:
            load = contents.ahead or self._load(contents)
            self._end_load(contents)
            self._wait(load.done)
            contents.fetched = tuple(weakref.ref(tensor) for tensor in load.tensors)
            tensors = load.tensors
        before = contents.before and contents.before()
        if before and not (before.released or before.sources or before.ahead) and len(self._ahead) < self._loads_ahead:
            before.ahead = self._load(before)
            self._ahead.add(before)
        return tensors

    def release(self, contents: _Contents[Event]) -> None:
        """Free device and host memory of an entry. Idempotent."""
        self._take_back_dropped()
        self._take_back(contents)

    def _load(self, contents: _Contents[Event]) -> _Load[Event]:
        targets = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in contents.shapes)
        pairs = [(buffer, part) for part, buffer in _pairs(targets, contents.buffers)]
        return _Load(targets, self._copy(Channel.TO_DEVICE, pairs))

    def _copy(self, channel: Channel, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        """Queue copies (source, target) behind the work of the compute stream so far; return their completion event."""
        self._streams.hold(channel, self._streams.record(None))
        with self._streams.under(channel), self.times.transfer(channel, sum(source.nbytes for source, _ in pairs)):
            for source, target in pairs:
                self._streams.copy(source, target)
        return self._streams.record(channel)

    def _wait(self, event: Event) -> None:
        """Make the compute stream wait for a copy."""
        with self.times.wait():
            self._streams.hold(None, event)

    def _wait_for_copy(self, contents: _Contents[Event]) -> None:
        """Make the compute stream wait for the copy to the host, then drop its source."""
        self._wait(contents.stored)
        contents.sources = ()
        self._flying.remove(contents)

    def _end_load(self, contents: _Contents[Event]) -> None:
        """End the tracking of an early load, which was fetched or is freed; compute waits for it first.

        Freed memory goes back to the compute stream, so it must not be reused before the load has written it.
        """
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
        self._end_load(contents)
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
    """Build a HostStore for tensors on `device`; on a GPU with pinned memory and its own copy streams.

    On a CPU copies are synchronous and nothing is loaded early, since there is nothing to overlap.

    Args:
        device: Where the tensors are.
        limit_bytes: Most host memory of this rank; None: no limit.
    """
    if device.type == "cuda":
        streams = CudaStreams(device)
        return HostStore(device, streams, HostPool(limit_bytes, pinned=True), times=TransferTimes(streams))
    if is_fake_accelerator():  # buffers are rounded up as pinned ones are
        return HostStore(device, NoStreams(), HostPool(limit_bytes, pinned=True))
    return HostStore(device, NoStreams(), HostPool(limit_bytes), copies_in_flight=0, loads_ahead=0)


def _pairs(tensors: Sequence[Tensor], buffers: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of bytes of a contiguous tensor and the part of a buffer that holds them, uint8."""
    pairs = []
    for tensor, chunks in zip(tensors, buffers, strict=True):
        data, start = tensor.view(-1).view(torch.uint8), 0
        for chunk in chunks:
            part = data[start : start + chunk.numel()]
            pairs.append((part, chunk[: part.numel()]))
            start += chunk.numel()
    return pairs
