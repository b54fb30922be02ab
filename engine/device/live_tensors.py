"""Counts the bytes of live tensors exactly, on any device: what a caching allocator's statistics are for a GPU."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from engine.device.host_memory import is_in_host_memory

_PLAIN = frozenset({Tensor, nn.Parameter, FakeTensor})


class Label(NamedTuple):
    """The component of a storage, and whether it counts as host memory."""

    component: str = "other"
    on_host: bool = False


# Called with the operation that first used a storage and the tensor, while the operation's Python frames exist.
Classifier = Callable[[Any, Tensor], Label]


@dataclass(frozen=True)
class Peak:
    """The most bytes alive at one time.

    Attributes:
        phase: When; "" outside of all phases.
        components: Bytes by component at that time; they add up to `total_bytes`.
    """

    total_bytes: int = 0
    phase: str = ""
    components: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    size: int
    label: Label
    number: int


class Memory:
    """Bytes alive on the device or on the host, by component, with the peak of every phase, in order of appearance."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.by_component: defaultdict[str, int] = defaultdict(int)
        self.phase = ""
        self.phase_peaks: dict[str, Peak] = {}

    def change(self, component: str, size: int) -> None:
        """Add `size` bytes, which may be negative."""
        self.live_bytes += size
        self.by_component[component] += size

    @property
    def is_new_peak(self) -> bool:
        """Whether more bytes are alive than ever before in this phase."""
        return self.phase not in self.phase_peaks or self.live_bytes > self.phase_peaks[self.phase].total_bytes

    def note(self) -> None:
        """Update the phase's peak."""
        if self.is_new_peak:
            components = {name: size for name, size in self.by_component.items() if size}
            self.phase_peaks[self.phase] = Peak(self.live_bytes, self.phase, components)

    @property
    def peak(self) -> Peak:
        """The highest peak of all phases."""
        return max(self.phase_peaks.values(), key=lambda peak: peak.total_bytes, default=Peak())


class LiveTensorTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts every storage which an operation reads or creates, once, until it is freed.

    Views share a storage and add nothing. Of a DTensor the local shard counts, of other wrappers what they wrap. Memory
    that a kernel allocates within one operation is not seen. Storages that exist already should be passed to `watch`,
    since they may be freed before an operation uses them. Works in backward on a CPU (autograd runs it in the calling
    thread) and under FakeTensorMode. Keeps no tensor alive. Costs about ten microseconds per operation.

    Tensors of `engine.device.host_memory.host_empty` are host memory, all others device memory; each has its own peak.
    With a `classify` function every storage has a component, and peaks are broken down by component.

        with LiveTensorTracker() as tracker:
            tracker.enter("forward")
            forward()
        tracker.peak_bytes, tracker.peak_host_bytes, tracker.device.peak.phase, tracker.device.phase_peaks["forward"]
    """

    def __init__(self, classify: Classifier | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._classify = classify or (lambda _, tensor: Label(on_host=is_in_host_memory(tensor)))
        self._storages: dict[int, _Storage] = {}  # by id of the storage, which lives as long as its memory does
        self._seen = 0
        self.device = Memory()
        self.host = Memory()

    @property
    def live_bytes(self) -> int:
        """Device bytes of the storages alive now."""
        self._recount()
        return self.device.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Most device bytes alive at the end of any operation since the start or the last `reset_peak`."""
        return self.device.peak.total_bytes

    @property
    def peak_host_bytes(self) -> int:
        """Most host bytes, likewise; not necessarily at the same time."""
        return self.host.peak.total_bytes

    def reset_peak(self) -> None:
        """Start new peaks at the bytes alive now."""
        self.device.phase_peaks, self.host.phase_peaks = {}, {}
        self.enter(self.device.phase)

    def enter(self, phase: str) -> None:
        """Enter phase `phase`; "" for none."""
        self._recount()
        for memory in (self.device, self.host):
            memory.phase = phase
            memory.note()

    def watch(self, tensors: Iterable[Tensor], label: Label | None = None) -> None:
        """Count existing tensors; with a `label` they get it."""
        for tensor in tensors:
            for part in _parts(tensor):
                self._see(None, part)
                storage = self._storages.get(id(part.untyped_storage()))
                if label is not None and storage is not None:
                    self._count(storage, storage.size, label)
        self._note_peaks()

    @property
    def moment(self) -> int:
        """Number of storages seen so far, a point in time for `relabel_since`."""
        return self._seen

    def relabel_since(self, moment: int, component: str, *, exclude: frozenset[str]) -> None:
        """Change the component of storages that were seen since `moment` and are alive, except those of `exclude`."""
        for storage in reversed(list(self._storages.values())):
            if storage.number < moment:
                break
            if storage.label.component not in exclude:
                self._count(storage, storage.size, storage.label._replace(component=component))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count its tensors."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            for part in _parts(tensor) if isinstance(tensor, Tensor) else ():
                self._see(func, part)
        self._note_peaks()
        return result

    def _see(self, func: Any, tensor: Tensor) -> None:
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        size = storage.nbytes()
        known = self._storages.get(key)
        if known is None:
            known = _Storage(weakref.ref(storage), 0, self._classify(func, tensor), self._seen)
            self._storages[key] = known
            self._seen += 1
            weakref.finalize(storage, self._remove, key).atexit = False
        if known.size != size:
            self._count(known, size, known.label)

    def _remove(self, key: int) -> None:
        storage = self._storages.pop(key)
        self._count(storage, 0, storage.label)

    def _count(self, storage: _Storage, size: int, label: Label) -> None:
        """Replace what a storage counts by its new size and label."""
        for of, change in ((storage.label, -storage.size), (label, size)):
            (self.host if of.on_host else self.device).change(of.component, change)
        storage.size, storage.label = size, label

    def _note_peaks(self) -> None:
        if self.device.is_new_peak or self.host.is_new_peak:
            # FSDP resizes storages without an operation, so recount before a sum becomes a peak.
            self._recount()
            self.device.note()
            self.host.note()

    def _recount(self) -> None:
        for storage in list(self._storages.values()):
            memory = storage.reference()
            if memory is not None and memory.nbytes() != storage.size:
                self._count(storage, memory.nbytes(), storage.label)


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """Return the tensors that hold the memory: the storage of a wrapper such as DTensor has a size and no memory."""
    if type(tensor) in _PLAIN:
        return (tensor,)
    if isinstance(tensor, DTensor):
        return _parts(tensor._local_tensor)
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        return (tensor,)
    return [part for name in wrapper.__tensor_flatten__()[0] for part in _parts(getattr(wrapper, name))]
