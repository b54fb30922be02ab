"""Host memory for activations: the one place that allocates it, and buffers that are used again, within a limit.

Pinned memory comes from torch's caching host allocator, which rounds every size up to a power of two
(CachingHostAllocator.h of torch 2.11 to 2.13; a setting ends that above a threshold, but then a cached block may be
given out for a request that it is too small for, pytorch#192722). 5 GiB in one piece would thus cost 8. So what is
stored is cut into pieces that are powers of two themselves, 4 + 1 GiB.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.device.row_blocks import is_fake_accelerator

MOST_PIECES = 4  # the last one is rounded up: less than an eighth is lost
SMALLEST_PIECE_BYTES = 1 << 16
_MARK = "_burst_host_memory"
_this_thread = threading.local()


class HostMemoryError(MemoryError):
    """Host memory for activations would exceed its limit; ends a run as `oom`.

    asked_bytes, in_use_bytes, limit_bytes   of the allocation that failed, of what there was, of all there may be
    """

    def __init__(self, asked_bytes: int, in_use_bytes: int, limit_bytes: int) -> None:
        self.asked_bytes, self.in_use_bytes, self.limit_bytes = asked_bytes, in_use_bytes, limit_bytes
        super().__init__(
            f"host memory for activations is used up: {asked_bytes:,} bytes more were asked for, {in_use_bytes:,} "
            f"bytes are in use, this rank's limit is {limit_bytes:,} bytes. Raise memory.host_bytes, choose a "
            "memory.activation_checkpoint that keeps less (seq_fraction, full), or set memory.activation_store=device."
        )


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Uninitialised tensor in host memory, known as such to `lies_in_host_memory`.

    All host memory of activations comes from here, so that it can be told from device memory on a CPU as well. Usable
    in training even if an evaluation in inference mode asks for it. `pinned` needs a GPU, or a rehearsal of one.
    """
    _this_thread.allocates = True  # whoever watches torch sees the tensor before it can be marked
    try:
        with torch.inference_mode(False):
            tensor = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned and not is_fake_accelerator())
    finally:
        _this_thread.allocates = False
    # Python's object of a storage lives as long as the memory, and all views find the same one.
    setattr(tensor.untyped_storage(), _MARK, True)
    return tensor


def lies_in_host_memory(tensor: Tensor) -> bool:
    """Whether the tensor's memory was allocated by `host_empty`, or is being so."""
    return getattr(_this_thread, "allocates", False) or getattr(tensor.untyped_storage(), _MARK, False) is True


def piece_sizes(size_bytes: int, *, pinned: bool) -> tuple[int, ...]:
    """Sizes of the allocations that hold `size_bytes` bytes one after the other; together at least as many.

    One of exactly this size if it is not pinned; else powers of two, the largest first, at most `MOST_PIECES`.
    """
    if not pinned or size_bytes == 0:
        return (size_bytes,) if size_bytes else ()
    sizes: list[int] = []
    rest = size_bytes
    while rest > SMALLEST_PIECE_BYTES and len(sizes) < MOST_PIECES - 1:
        sizes.append(1 << (rest.bit_length() - 1))
        rest -= sizes[-1]
    return (*sizes, 1 << (rest - 1).bit_length()) if rest else tuple(sizes)


class HostPool:
    """Buffers in host memory, by size; those given back are used again, because pinning memory is slow.

    Training asks for the same sizes at every step, so from the second step on nothing is allocated. The limit (None:
    there is none) counts idle buffers too; when there is no room for a new one, they are freed. A buffer may be written
    as soon as it is taken: whoever gives it back orders what comes after (see `HostStore`), so a pool has one user.
    """

    def __init__(self, limit_bytes: int | None = None, *, pinned: bool = False) -> None:
        self._limit_bytes = limit_bytes
        self._pinned = pinned
        self._idle: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.in_use_bytes = 0  # of the buffers that were taken and not given back

    @property
    def idle_bytes(self) -> int:
        """Bytes of the buffers that wait to be used again."""
        return sum(size * len(buffers) for size, buffers in self._idle.items())

    def take(self, *sizes_bytes: int) -> list[list[Tensor]]:
        """Of each size uninitialised buffers, uint8, that hold so much one after the other, see `piece_sizes`.

        HostMemoryError if the limit does not allow it; nothing is taken then.
        """
        taken: list[list[Tensor]] = []
        try:
            for size_bytes in sizes_bytes:
                taken.append([])
                for size in piece_sizes(size_bytes, pinned=self._pinned):
                    taken[-1].append(self._idle[size].pop() if self._idle[size] else self._new(size))
                    self.in_use_bytes += size
        except BaseException:
            self.give_back(taken)
            raise
        return taken

    def give_back(self, taken: Sequence[Sequence[Tensor]]) -> None:
        """The end of using what `take` gave."""
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
    """Makes torch give freed pinned memory back to the system; else it stays pinned in its cache."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        empty()
