"""Memory for the buffers of plans: one reusable block per location instead of an allocation per buffer and call."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.device.host_memory import host_empty

ALIGNMENT_BYTES = 256  # of every buffer inside a block; vector loads of kernels need 16


class BufferLocation(NamedTuple):
    """Where bytes lie, and the stream whose order makes it safe to use them again (0 where there is one only).

    host   a host buffer: memory of the host that serves as such, on a CPU as well
    """

    device: torch.device
    pinned: bool = False
    stream: int = 0
    host: bool = False


def buffer_location(device: torch.device, where: str = "device") -> BufferLocation:
    """Where a buffer for work on `device` lives: in its memory, or (where = host) in host memory, pinned for a GPU.

    A block handed out again is written by the stream that runs plans now, and nothing but that stream's order says
    that its last user is done: blocks of different streams are kept apart.
    """
    on_cuda = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if on_cuda else 0
    if where == "host":
        return BufferLocation(torch.device("cpu"), on_cuda, stream, host=True)
    return BufferLocation(device, False, stream)


def allocate_bytes(location: BufferLocation, size: int) -> Tensor:
    """Uninitialised bytes, uint8 [size]; usable in training even if an evaluation in inference mode asks for them."""
    with torch.inference_mode(False):
        return allocate_tensor((size,), torch.uint8, location)


def allocate_tensor(shape: tuple[int, ...], dtype: torch.dtype, location: BufferLocation) -> Tensor:
    """Uninitialised tensor of its own memory."""
    if location.host:
        return host_empty(shape, dtype, pinned=location.pinned)
    return torch.empty(shape, dtype=dtype, device=location.device, pin_memory=location.pinned)


class BufferPool:
    """Hands out buffers for one run of a plan at a time, and takes them back.

    A lease cuts its buffers from one block. When the block was too small, the next lease of the location gets one of
    the size that was needed, so a training loop allocates in its first calls only; forward and backward passes use the
    same block in turn. Leases that are open at the same time never share memory. One idle block per location stays.

    Not for tensors that outlive the run (outputs, what backward saves): those belong to the caller.
    """

    def __init__(self, allocate: Callable[[BufferLocation, int], Tensor] = allocate_bytes) -> None:
        self.allocate = allocate
        self._idle: dict[BufferLocation, Tensor] = {}
        self._needed: defaultdict[BufferLocation, int] = defaultdict(
            int
        )  # bytes that the largest lease so far asked for

    @property
    def idle_bytes(self) -> int:
        """Bytes that the pool holds while nothing runs."""
        return sum(block.numel() for block in self._idle.values())

    def lease(self) -> Lease:
        """An empty lease."""
        return Lease(self)

    def take(self, location: BufferLocation, at_least: int) -> Tensor:
        """A block for a lease: the idle one if there is one, else a new one of the size that leases need."""
        if location in self._idle:
            return self._idle.pop(location)
        return self.allocate(location, max(at_least, self._needed[location]))

    def give_back(self, location: BufferLocation, block: Tensor, used: int) -> None:
        """The end of a lease that asked for `used` bytes in all; a block that is too small now is dropped."""
        self._needed[location] = max(self._needed[location], used)
        for kept in (self._idle.pop(location, block), block):
            if kept.numel() >= self._needed[location]:
                self._idle[location] = kept


@dataclass
class _Cut:
    block: Tensor
    used: int = 0  # bytes asked for so far, in this block or beyond it


class Lease:
    """Buffers of one run. Close it when nothing will touch them any more; one that is not closed, because a run broke
    off while transfers may be in flight, leaves its memory to nobody.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._cuts: dict[BufferLocation, _Cut] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, location: BufferLocation) -> Tensor:
        """Uninitialised contiguous tensor."""
        size = math.prod(shape) * dtype.itemsize
        padded = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        cut = self._cuts.get(location)
        if cut is None:
            cut = self._cuts[location] = _Cut(self._pool.take(location, padded))
        start, cut.used = cut.used, cut.used + padded
        if cut.used <= cut.block.numel():
            memory = cut.block[start : start + size]
        else:
            memory = self._pool.allocate(location, padded)[:size]  # not kept
        return memory.view(dtype).view(shape)

    def close(self) -> None:
        """Give the memory back to the pool. The tensors must not be used any more."""
        for location, cut in self._cuts.items():
            self._pool.give_back(location, cut.block, cut.used)
        self._cuts.clear()
