"""Activation stores: values come back, memory goes, whatever order forward and backward passes take."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.activations.store import (
    ActivationStore,
    DeviceStore,
    HostStore,
    ReleasedError,
    SavedTensors,
    host_store,
)
from engine.attention.streams import NoStreams
from engine.device.host_memory import HostMemoryError, HostPool

CPU = torch.device("cpu")
STORES = {
    "device": DeviceStore,
    "host": lambda: host_store(CPU),
    "host, overlapped": lambda: HostStore(CPU, NoStreams(), HostPool()),
}
every_store = pytest.mark.parametrize("make", list(STORES.values()), ids=list(STORES))
MakeStore = Callable[[], ActivationStore]


def numbers(count: int, start: float = 0.0) -> Tensor:
    return torch.arange(count, dtype=torch.float32) + start


@every_store
def test_fetched_tensors_are_equal_contiguous_copies(make: MakeStore) -> None:
    tensors = [
        (numbers(24).requires_grad_() * 2).view(2, 3, 4).transpose(0, 2),  # whose graph is not kept
        numbers(7).to(torch.bfloat16)[::2],
        torch.tensor([True, False, True]),
        torch.tensor(5),
        torch.empty(0, 3),
        numbers(1).expand(4, 3),
    ]
    store = make()
    kept = store.save(tensors)
    store.save([numbers(50)])
    for _ in range(2):
        fetched = kept.fetch()
        for got, want in zip(fetched, tensors, strict=True):
            assert got.dtype == want.dtype
            assert got.is_contiguous()
            assert got.requires_grad is False
            assert torch.equal(got, want)


@every_store
@pytest.mark.parametrize("part", [slice(2, 5), slice(None, None, 2)])
def test_a_saved_view_frees_its_base(make: MakeStore, part: slice) -> None:
    store, whole = make(), numbers(1000).view(10, 100)
    memory = weakref.ref(whole.untyped_storage())
    kept = store.save([whole[part]])
    del whole
    if isinstance(store, HostStore):
        store.wait_pending()
    assert memory() is None
    assert torch.equal(kept.fetch()[0], numbers(1000).view(10, 100)[part])
    (fetched,) = kept.fetch()  # fills its memory: nothing is copied
    assert fetched.data_ptr() == (DeviceStore().save([fetched]).fetch()[0]).data_ptr()


@every_store
def test_fetching_after_release_reports_a_second_backward(make: MakeStore) -> None:
    kept = make().save([numbers(3)])
    for _ in range(2):
        kept.release()
    with pytest.raises(ReleasedError, match="second time"):
        kept.fetch()
    assert issubclass(ReleasedError, RuntimeError)


def test_saved_tensor_of_a_cpu_is_freed() -> None:
    store, tensor = host_store(CPU), numbers(100)
    memory = weakref.ref(tensor.untyped_storage())
    entry = store.save([tensor])
    del tensor
    assert memory() is None
    assert store.in_use_bytes == 400
    entry.release()
    assert store.in_use_bytes == 0


def test_fetched_tensor_in_use_is_not_loaded_again() -> None:
    entry = host_store(CPU).save([numbers(100)])
    first = entry.fetch()
    assert entry.fetch()[0].data_ptr() == first[0].data_ptr()


def test_fetched_tensor_is_freed_after_use() -> None:
    entry = host_store(CPU).save([numbers(100)])
    first = entry.fetch()
    memory = weakref.ref(first[0].untyped_storage())
    del first
    assert memory() is None
    assert torch.equal(entry.fetch()[0], numbers(100))


def backward(kept: list[SavedTensors], start: float) -> None:
    """Fetches and releases in backward's order, and checks."""
    while kept:
        layer = len(kept) - 1
        entry = kept.pop()
        assert torch.equal(entry.fetch()[0], numbers(10, start + layer))
        entry.release()


@every_store
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_interleaved_passes_return_their_tensors(make: MakeStore, order: tuple[int, int]) -> None:
    store = make()
    passes = [[store.save([numbers(10, 100.0 * batch + layer)]) for layer in range(4)] for batch in range(2)]
    evaluation = [store.save([numbers(10, -1.0)]) for _ in range(4)]
    evaluation[2].fetch()
    del evaluation
    for batch in order:
        backward(passes[batch], 100.0 * batch)
    if isinstance(store, HostStore):
        assert store.in_use_bytes == 0


def test_after_an_exception_all_buffers_return() -> None:
    store = HostStore(CPU, NoStreams(), HostPool())

    def fails() -> None:
        entries = [store.save([numbers(10)]) for _ in range(5)]
        entries[2].release()
        for place in (4, 3):  # before the last is what is gone: it is not loaded
            entries[place].fetch()
        cycle = [entries]
        cycle.append(cycle)  # type: ignore[arg-type]
        raise ValueError("in the middle of backward")

    with pytest.raises(ValueError, match="in the middle"):
        fails()
    gc.collect()
    assert store.in_use_bytes == 0
    backward([store.save([numbers(10, float(layer))]) for layer in range(5)], 0.0)
    assert store.pool.idle_bytes == 200


def test_tensors_that_cannot_be_saved_are_refused_completely() -> None:
    store = HostStore(CPU, NoStreams(), HostPool(100))
    with pytest.raises(HostMemoryError):
        store.save([numbers(20), numbers(10)])
    assert store.in_use_bytes == 0
    backward([store.save([numbers(10)])], 0.0)
    with pytest.raises(ValueError, match="got a tensor on meta, expected cpu"):
        store.save([torch.empty(3, device="meta")])
