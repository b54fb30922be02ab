"""Host memory for activations: allocation, and a pool of reused buffers with a limit.

Pinned memory comes from torch's caching host allocator, which rounds every size up to a power of two
(CachingHostAllocator.h of torch 2.11 to 2.13; a setting disables that above a threshold, but then a cached block may be
returned for a request that is larger than it, pytorch/pytorch#192722). One allocation of 5 GiB would thus take 8. So a
tensor is split over buffers whose sizes are powers of two, here 4 + 1 GiB.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.device.row_blocks import is_fake_accelerator

MAX_CHUNKS = 4  # the last one is rounded up: less than an eighth is lost
SMALLEST_CHUNK_BYTES = 1 << 16
_MARK = "_burst_host_memory"
_this_thread = threading.local()


class HostMemoryError(MemoryError):
    """Host memory for activations would exceed its limit; a run that fails with it has status `oom`.

    Attributes:
        requested_bytes: Size of the allocation that failed.
        in_use_bytes: Size of the buffers in use.
        limit_bytes: This rank's limit.
    """

    def __init__(self, requested_bytes: int, in_use_bytes: int, limit_bytes: int) -> None:
        self.requested_bytes, self.in_use_bytes, self.limit_bytes = requested_bytes, in_use_bytes, limit_bytes
        super().__init__(
            f"host memory for activations is exhausted: {requested_bytes:,} more bytes were requested, "
            f"{in_use_bytes:,} bytes are in use, this rank's limit is {limit_bytes:,} bytes. Raise memory.host_bytes, "
            "choose a memory.activation_checkpoint that saves less (seq_fraction, full), or set "
            "memory.activation_store=device."
        )


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Return an uninitialised tensor in host memory, marked so that `is_in_host_memory` recognises it.

    All host memory of activations is allocated here, so that on a CPU it can be distinguished from device memory.

    Args:
        shape: Of the tensor.
        dtype: Of the tensor.
        pinned: Needs a GPU, or a fake run of one.
    """
    _this_thread.allocates = True  # a tracker of allocations sees the tensor before it can be marked
    try:
        with torch.inference_mode(False):  # an evaluation may allocate a buffer that training reuses
            tensor = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned and not is_fake_accelerator())
    finally:
        _this_thread.allocates = False
    # The Python object of a storage lives as long as the memory, and all views of it return the same object.
    setattr(tensor.untyped_storage(), _MARK, True)
    return tensor


def is_in_host_memory(tensor: Tensor) -> bool:
    """Return whether the tensor's memory was allocated by `host_empty`, or is being allocated by it."""
    return getattr(_this_thread, "allocates", False) or getattr(tensor.untyped_storage(), _MARK, False) is True


def chunk_sizes(size_bytes: int, *, pinned: bool) -> tuple[int, ...]:
    """Return the sizes of the buffers that together hold `size_bytes` bytes.

    Not pinned: one of exactly this size. Pinned: powers of two, the largest first, at most `MAX_CHUNKS`.
    """
    if not pinned or size_bytes == 0:
        return (size_bytes,) if size_bytes else ()
    sizes: list[int] = []
    rest = size_bytes
    while rest > SMALLEST_CHUNK_BYTES and len(sizes) < MAX_CHUNKS - 1:
        sizes.append(1 << (rest.bit_length() - 1))
        rest -= sizes[-1]
    return (*sizes, 1 << (rest - 1).bit_length()) if rest else tuple(sizes)


class HostPool:
    """Buffers in host memory by size, reused because pinning memory is slow.

    Training needs the same sizes at every step, so from the second step on nothing is allocated. A buffer may be
    written as soon as it is taken: the user orders its copies (see `HostStore`), so a pool has one user.

    Args:
        limit_bytes: Most memory of all buffers, idle ones included, which are freed first; None: no limit.
        pinned: Allocate pinned memory.
    """

    def __init__(self, limit_bytes: int | None = None, *, pinned: bool = False) -> None:
        self._limit_bytes = limit_bytes
        self._pinned = pinned
        self._idle: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.in_use_bytes = 0  # of the buffers taken and not given back

    @property
    def idle_bytes(self) -> int:
        """Bytes of the buffers that may be reused."""
        return sum(size * len(buffers) for size, buffers in self._idle.items())

    def take(self, *sizes_bytes: int) -> list[list[Tensor]]:
        """Return for each size the uint8 buffers that together hold it, uninitialised; see `chunk_sizes`.

        Raises:
            HostMemoryError: The limit is exceeded; then nothing is taken.
        """
        taken: list[list[Tensor]] = []
        try:
            for size_bytes in sizes_bytes:
                taken.append([])
                for size in chunk_sizes(size_bytes, pinned=self._pinned):
                    taken[-1].append(self._idle[size].pop() if self._idle[size] else self._new(size))
                    self.in_use_bytes += size
        except BaseException:
            self.give_back(taken)
            raise
        return taken

    def give_back(self, taken: Sequence[Sequence[Tensor]]) -> None:
        """Return buffers of `take` to the pool."""
        for buffer in itertools.chain(*taken):
            self._idle[buffer.numel()].append(buffer)
            self.in_use_bytes -= buffer.numel()

    def _new(self, size: int) -> Tensor:
        if self._limit_bytes is not None and self.in_use_bytes + self.idle_bytes + size > self._limit_bytes:
            self._idle.clear()
            if self._pinned:
                _empty_pinned_cache()
            if self.in_use_bytes + size > self._limit_bytes:
                raise HostMemoryError(size, self.in_use_bytes, self._limit_bytes)
        return host_empty((size,), torch.uint8, pinned=self._pinned)


def _empty_pinned_cache() -> None:
    """Make torch return freed pinned memory to the system; otherwise its cache keeps it pinned."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        empty()
