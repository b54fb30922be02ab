"""Offloads what autograd saves to an activation store, by saved-tensor hooks: policy `none` with host activations."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.activations.store import ActivationStore, SavedTensors
from engine.device.host_memory import is_in_host_memory

MINIMUM_BYTES = 1 << 20  # smaller tensors stay on an accelerator: a copy has a fixed cost


@contextlib.contextmanager
def offloaded(store: ActivationStore, *, leave: Iterable[Tensor] = ()) -> Iterator[None]:
    """Inside the body, tensors that autograd saves go to `store` and are fetched when backward needs them.

    A tensor is saved once however many operations save it, reshaped or transposed. If its elements fill their memory it
    comes back with the same strides. These stay where they are: parameters, their views, DTensors, tensors below 1 MiB
    (except on a CPU), tensors already in host memory, and tensors that share memory with one of `leave`.

    Args:
        store: Where to save.
        leave: Tensors that stay alive anyway, such as rotary tables, and weights that are no nn.Parameter (FSDP2's
            gathered ones).
    """
    packer = _Packer(store, leave)
    with torch.autograd.graph.saved_tensors_hooks(packer.pack, _unpack):
        yield


class _View(NamedTuple):
    """A tensor as a view of its saved elements, which are in memory order."""

    saved: SavedTensors
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    (elements,) = packed.saved.fetch()
    return elements.as_strided(packed.shape, packed.stride)


class _Known(NamedTuple):
    """An earlier save. Its key contains an id, which a new storage may reuse, so the storage is compared as well."""

    storage: weakref.ref[torch.UntypedStorage]
    saved: weakref.ref[SavedTensors]


class _Packer:
    """The pack hook of one `offloaded` context."""

    def __init__(self, store: ActivationStore, leave: Iterable[Tensor]) -> None:
        self._store = store
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in leave)
        self._left = [tensor.untyped_storage() for tensor in local]  # kept alive so that their ids are not reused
        self._left_ids = {id(storage) for storage in self._left}
        self._known: dict[tuple[object, ...], _Known] = {}

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Return what autograd holds instead of `tensor`."""
        if self._is_exempt(tensor):
            # Detached: a node that holds its own output with the graph would be a cycle that is never freed.
            return tensor.detach()
        if _fills_memory(tensor):
            elements = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
            return _View(self._save_once(elements, tensor._version), tuple(tensor.shape), tensor.stride())
        elements = tensor.detach().contiguous()
        return _View(self._store.save([elements.view(-1)]), tuple(tensor.shape), elements.stride())

    def _is_exempt(self, tensor: Tensor) -> bool:
        if isinstance(tensor, DTensor) or tensor.layout != torch.strided:
            return True
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, (nn.Parameter, DTensor)):
            return True
        storage, minimum = tensor.untyped_storage(), 1 if tensor.device.type == "cpu" else MINIMUM_BYTES
        if not minimum <= tensor.nbytes <= storage.nbytes():  # more bytes than storage: an expanded tensor
            return True
        return id(storage) in self._left_ids or is_in_host_memory(tensor)

    def _save_once(self, elements: Tensor, version: int) -> SavedTensors:
        """Save `elements`, or return the entry of an earlier save of the same memory; a write changes the version."""
        storage = elements.untyped_storage()
        key = (id(storage), elements.storage_offset(), elements.numel(), elements.dtype, version)
        known = self._known.get(key)
        saved = known.saved() if known is not None and known.storage() is storage else None
        if saved is None:
            saved = self._store.save([elements])
            self._known[key] = _Known(weakref.ref(storage), weakref.ref(saved))
        return saved


def _fills_memory(tensor: Tensor) -> bool:
    """Return whether the elements are adjacent in memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
