"""Memory for the buffers of plans: one reusable block per place instead of an allocation per buffer and call."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engine.memory.host import host_empty

ALIGNMENT_BYTES = 256  # of every buffer inside a block; vector loads of kernels need 16


class Place(NamedTuple):
    """Where bytes lie, and the stream whose order makes it safe to use them again (0 where there is one only).

    host   a host slot: memory of the host that serves as such, on a CPU as well
    """

    device: torch.device
    pinned: bool = False
    stream: int = 0
    host: bool = False


def compute_place(device: torch.device, where: str = "device") -> Place:
    """Place of a slot for work on `device`: its memory, or (where = host) host memory, pinned if it is a GPU.

    A block handed out again is written by the stream that runs plans now, and nothing but that stream's order says
    that its last user is done: blocks of different streams are kept apart.
    """
    on_cuda = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if on_cuda else 0
    if where == "host":
        return Place(torch.device("cpu"), on_cuda, stream, host=True)
    return Place(device, False, stream)


def allocate_bytes(place: Place, size: int) -> Tensor:
    """Uninitialised bytes, uint8 [size]; usable in training even if an evaluation in inference mode asks for them."""
    with torch.inference_mode(False):
        return allocate_tensor((size,), torch.uint8, place)


def allocate_tensor(shape: tuple[int, ...], dtype: torch.dtype, place: Place) -> Tensor:
    """Uninitialised tensor of its own memory."""
    if place.host:
        return host_empty(shape, dtype, pinned=place.pinned)
    return torch.empty(shape, dtype=dtype, device=place.device, pin_memory=place.pinned)


@dataclass
class _Shelf:
    """What is kept of one place: blocks nobody uses, and the bytes that the largest lease so far asked for."""

    idle: list[Tensor] = field(default_factory=list)
    needed: int = 0


class BufferPool:
    """Hands out buffers for one run of a plan at a time, and takes them back.

    A lease cuts its buffers from one block. When the block was too small, the next lease of the place gets one of the
    size that was needed, so a training loop allocates in its first calls only; forward and backward passes use the
    same block in turn. Leases that are open at the same time never share memory. At most `max_idle` blocks per place
    are kept, the largest ones; `release` drops all.

    Not for tensors that outlive the run (outputs, what backward saves): those belong to the caller.
    """

    def __init__(self, max_idle: int = 1, allocate: Callable[[Place, int], Tensor] = allocate_bytes) -> None:
        self._max_idle = max_idle
        self._allocate = allocate
        self._shelves: defaultdict[Place, _Shelf] = defaultdict(_Shelf)

    @property
    def idle_bytes(self) -> int:
        """Bytes that the pool holds while nothing runs."""
        return sum(block.numel() for shelf in self._shelves.values() for block in shelf.idle)

    def lease(self) -> Lease:
        """An empty lease."""
        return Lease(self)

    def release(self) -> None:
        """Drop all idle blocks and forget their sizes; open leases are unaffected."""
        self._shelves.clear()

    def take(self, place: Place, at_least: int) -> Tensor:
        """A block for a lease: an idle one if there is one, else a new one of the size that leases need."""
        shelf = self._shelves[place]
        if shelf.idle:
            return shelf.idle.pop()
        return self._allocate(place, max(at_least, shelf.needed))

    def extend(self, place: Place, size: int) -> Tensor:
        """A further block of `size` bytes for a lease whose first one is full; it is not kept."""
        return self._allocate(place, size)

    def give_back(self, place: Place, block: Tensor, used: int) -> None:
        """The end of a lease that asked for `used` bytes in all; a block that was too small is dropped."""
        shelf = self._shelves[place]
        shelf.needed = max(shelf.needed, used)
        if block.numel() >= shelf.needed and len(shelf.idle) < self._max_idle:
            shelf.idle.append(block)
            return
        shelf.idle = [kept for kept in shelf.idle if kept.numel() >= shelf.needed]


@dataclass
class _Cut:
    block: Tensor
    used: int = 0  # bytes asked for so far, in this block or beyond it


class Lease:
    """Buffers of one run. Close it when nothing will touch them any more; as a context manager it discards them when
    the body raises, because transfers may then still be in flight.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._cuts: dict[Place, _Cut] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, place: Place) -> Tensor:
        """Uninitialised contiguous tensor."""
        size = math.prod(shape) * dtype.itemsize
        padded = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        cut = self._cuts.get(place)
        if cut is None:
            cut = self._cuts[place] = _Cut(self._pool.take(place, padded))
        start, cut.used = cut.used, cut.used + padded
        if cut.used <= cut.block.numel():
            memory = cut.block[start : start + size]
        else:
            memory = self._pool.extend(place, padded)[:size]
        return memory.view(dtype).view(shape)

    def close(self) -> None:
        """Give the memory back to the pool. The tensors must not be used any more."""
        for place, cut in self._cuts.items():
            self._pool.give_back(place, cut.block, cut.used)
        self._cuts.clear()

    def discard(self) -> None:
        """Forget the memory without reusing it; it is freed when the last tensor in it is."""
        self._cuts.clear()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()
