"""What autograd saves, put into an activation store by hooks: policy `none` with its activations in host memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.activations.store import ActivationStore, SavedTensors
from engine.device.host_memory import lies_in_host_memory

MINIMUM_BYTES = 1 << 20  # on an accelerator a copy has a price of its own


@contextlib.contextmanager
def offloaded(store: ActivationStore, *, leave: Iterable[Tensor] = ()) -> Iterator[None]:
    """Context in which every tensor that autograd saves goes to `store`, and comes back when backward asks for it.

    Once only, however many operations save it, reshaped or transposed; where its elements fill their memory, it comes
    back with the same strides. Left where they are: parameters, their views and DTensors; tensors of less than
    1 MiB, but on a CPU; those in host memory already; those that share memory with one of `leave`: what lives on
    anyway, such as tables, and weights in a form that does not show that they are parameters.
    """
    packer = _Packer(store, leave)
    with torch.autograd.graph.saved_tensors_hooks(packer.pack, _unpack):
        yield


class _View(NamedTuple):
    """A tensor in terms of the elements that were kept, in the order of their memory."""

    kept: SavedTensors
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    (elements,) = packed.kept.fetch()
    return elements.as_strided(packed.shape, packed.stride)


class _Known(NamedTuple):
    """Something that was kept before. The storage says whether its key still means the same memory."""

    storage: weakref.ref[torch.UntypedStorage]
    kept: weakref.ref[SavedTensors]


class _Packer:
    """Pack hook of one context."""

    def __init__(self, store: ActivationStore, leave: Iterable[Tensor]) -> None:
        self._store = store
        own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in leave)
        self._left = [tensor.untyped_storage() for tensor in own]  # alive, so that no other has their id
        self._left_ids = {id(storage) for storage in self._left}
        self._known: dict[tuple[object, ...], _Known] = {}

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """What autograd holds instead of `tensor`."""
        if self._stays(tensor):
            # Without its graph: an output that its own node refers to would never be freed.
            return tensor.detach()
        if _fills_memory(tensor):
            elements = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
            return _View(self._kept(elements, tensor._version), tuple(tensor.shape), tensor.stride())
        elements = tensor.detach().contiguous()
        return _View(self._store.save([elements.view(-1)]), tuple(tensor.shape), elements.stride())

    def _stays(self, tensor: Tensor) -> bool:
        if isinstance(tensor, DTensor) or tensor.layout != torch.strided:
            return True
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, (nn.Parameter, DTensor)):
            return True
        storage, minimum = tensor.untyped_storage(), 1 if tensor.device.type == "cpu" else MINIMUM_BYTES
        if not minimum <= tensor.nbytes <= storage.nbytes():  # elements of a broadcast tensor share their memory
            return True
        return id(storage) in self._left_ids or lies_in_host_memory(tensor)

    def _kept(self, elements: Tensor, version: int) -> SavedTensors:
        storage = elements.untyped_storage()
        key = (id(storage), elements.storage_offset(), elements.numel(), elements.dtype, version)
        known = self._known.get(key)
        kept = known.kept() if known is not None and known.storage() is storage else None
        if kept is None:
            kept = self._store.save([elements])
            self._known[key] = _Known(weakref.ref(storage), weakref.ref(kept))
        return kept


def _fills_memory(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
