"""Peak bytes of live tensors, counted exactly: what a caching allocator's statistics are for a GPU, also for a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveTensorTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which every storage that an operation reads or makes is counted once, until it is freed.

    Views share a storage and add nothing; a DTensor counts as this rank's part; what a kernel allocates inside one
    operation is not seen. Storages that live already, and may be freed while no operation has touched them yet, can be
    named with `watch`. Works in backward on a CPU (autograd runs it in the calling thread). Costs some ten microseconds
    per operation.

        with LiveTensorTracker() as tracker:
            step()
        tracker.peak_bytes
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}  # by key of the storage
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._live_bytes = 0
        self._peak_bytes = 0

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages that are alive now."""
        self._recount()
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at the end of any operation since the start or the last `reset_peak`."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Begins a new peak at what is alive now."""
        self._peak_bytes = self.live_bytes

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that live already."""
        for tensor in tensors:
            self._see(tensor)
        self._note_peak()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, then counts."""
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs or {}, result)):
            self._see(tensor)
        self._note_peak()
        return result

    def _see(self, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor  # the wrapper names a storage that has a size and no memory
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = id(storage)  # the storage object lives as long as its memory, so no other has its id
        size = storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            self._storages[key] = weakref.ref(storage)
            weakref.finalize(storage, self._forget, key).atexit = False
        if known != size:
            self._sizes[key] = size
            self._live_bytes += size - (known or 0)

    def _forget(self, key: int) -> None:
        self._live_bytes -= self._sizes.pop(key)
        del self._storages[key]

    def _note_peak(self) -> None:
        if self._live_bytes > self._peak_bytes:
            # FSDP resizes storages without an operation: trust no sum before it makes a new peak.
            self._recount()
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def _recount(self) -> None:
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is not None:
                self._sizes[key] = storage.nbytes()
        self._live_bytes = sum(self._sizes.values())


def _tensors(values: Any) -> Iterator[Tensor]:
    """Every tensor in nested arguments."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
