"""Copies of the host store beside compute: no order that the events allow gives a race or a wrong number."""

from __future__ import annotations

import functools
import itertools
import random
import weakref

import pytest
import torch
from testkit.stream_machine import Access, Machine, MachineStreams, access, host_waits_are_errors
from torch import Tensor

from engine.activations.store import HostStore, SavedTensors, host_store
from engine.device.host_memory import HostPool
from engine.planning.program.ops import Channel

CPU = torch.device("cpu")
COMPUTE = (0, None)
ELEMENTS = 16


class Rig:
    """A store on the stand-in machine, and a compute stream that makes what is kept and reads what is fetched."""

    def __init__(self, streams=MachineStreams, **bounds: int) -> None:
        self.machine = Machine()
        self.pool = HostPool()
        self.streams = streams(self.machine, 0)
        self.store = HostStore(CPU, self.streams, self.pool, **bounds)
        self.read: list[tuple[float, float]] = []

    def save(self, value: float) -> SavedTensors:
        """An entry whose tensor compute has still to make."""
        tensor = torch.full((ELEMENTS,), torch.nan)
        self.compute("make", tensor, lambda: tensor.fill_(value))
        return self.store.save([tensor])

    def use(self, kept: SavedTensors, value: float) -> None:
        """What a layer's backward pass does with an entry."""
        (tensor,) = kept.fetch()
        self.compute("use", tensor, lambda: self.read.append((tensor.sum().item(), value * ELEMENTS)))

    def compute(self, what: str, tensor: Tensor, body) -> None:
        self.machine.enqueue(COMPUTE, what, access([tensor], writes=what == "make"), body)

    def check(self, seed: int) -> None:
        uses = sum(op.what == "use" for op in self.machine.ops)
        assert self.machine.races() == []
        self.machine.run(seed)
        assert len(self.read) == uses > 0
        assert all(got == want for got, want in self.read), self.read


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("copies", "loads"), [(0, 0), (1, 1), (2, 1), (9, 2)])
def test_copies_of_the_host_store_are_free_of_races(seed: int, copies: int, loads: int) -> None:
    rig = Rig(copies_in_flight=copies, loads_ahead=loads)
    order = random.Random(seed)
    values = itertools.count(1.0)
    for _ in range(3):  # later steps use the buffers of earlier ones
        passes = [[(rig.save(value), value) for value in itertools.islice(values, 3)] for _ in range(2)]
        order.shuffle(passes)
        for entries in passes:
            for kept, value in reversed(entries):
                rig.use(kept, value)
                if order.random() < 0.3:
                    rig.use(kept, value)
                kept.release()
            entries.clear()
        rig.save(next(values))  # dropped at once
    assert rig.pool.in_use_bytes + rig.pool.idle_bytes <= 7 * 4 * ELEMENTS
    rig.check(seed)


class FreeingStreams(MachineStreams):
    """Notes copies without holding their tensors, and when device memory goes back to the compute stream."""

    def __init__(self, machine: Machine, rank: int) -> None:
        super().__init__(machine, rank)
        self.machine = machine
        self.watched: set[int] = set()

    def copy(self, source: Tensor, target: Tensor) -> None:
        channel = self.machine.current[0]
        accesses = [*access([source], writes=False), *access([target], writes=True)]
        issued = max((op.number for op in self.machine.ops if op.stream == COMPUTE), default=0)
        copy = self.machine.enqueue((0, channel), f"{channel} copy", accesses, lambda: None)
        # Memory of a load may be what compute, so far as it was given work, has still to read.
        assert copy.clock.get(COMPUTE, 0) >= issued
        storage = (source if channel is Channel.TO_HOST else target).untyped_storage()
        if id(storage) not in self.watched:
            self.watched.add(id(storage))
            memory = Access(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), True)
            weakref.finalize(storage, self._freed, id(storage), memory)

    def _freed(self, key: int, memory: Access) -> None:
        self.watched.remove(key)
        self.machine.enqueue(COMPUTE, "free", [memory], lambda: None)


class ComputeAtOnce(Rig):
    """A rig whose compute holds no tensor."""

    def compute(self, what: str, tensor: Tensor, body) -> None:
        super().compute(what, tensor, lambda: None)


@pytest.mark.parametrize("leave", ["backward", "drop", "settle", "release"])
@pytest.mark.parametrize(("copies", "loads"), [(0, 0), (0, 1), (2, 1), (3, 2)])
def test_device_memory_is_freed_only_after_the_copies_that_touch_it(copies: int, loads: int, leave: str) -> None:
    rig = ComputeAtOnce(FreeingStreams, copies_in_flight=copies, loads_ahead=loads)
    entries = [rig.save(float(layer)) for layer in range(6)]
    assert sum(op.what == "free" for op in rig.machine.ops) == 6 - copies
    for place in (3, 2):
        rig.use(entries[place], float(place))
    while leave == "backward" and entries:
        kept = entries.pop()
        rig.use(kept, float(len(entries)))
        kept.release()
    for kept in entries if leave == "release" else ():
        kept.release()
    if leave == "drop":
        entries.clear()
    if leave in ("drop", "settle"):
        rig.store.wait_pending()
    assert not rig.machine.races()
    assert not rig.streams.watched  # all of it is free


def test_compute_waits_for_the_oldest_copy_when_too_many_are_in_flight() -> None:
    rig = Rig(FreeingStreams, copies_in_flight=2)
    memory: list[weakref.ref[torch.UntypedStorage]] = []
    entries: list[SavedTensors] = []
    for _ in range(5):
        tensor = torch.zeros(ELEMENTS)
        memory.append(weakref.ref(tensor.untyped_storage()))
        entries.append(rig.store.save([tensor]))
        del tensor
        copies = [op for op in rig.machine.ops if op.what == "d2h copy"]
        now = rig.machine.enqueue(COMPUTE, "now", [], lambda: None)
        assert [copy.before(now) for copy in copies] == [True] * (len(copies) - 2) + [False] * min(2, len(copies))
    assert [reference() is not None for reference in memory] == [False, False, False, True, True]
    entries[4].fetch()
    assert not [op for op in rig.machine.ops if op.what == "h2d copy"]  # still on the device


def entries_of_sizes(count: int, loads_ahead: int) -> tuple[list[SavedTensors], Machine, HostStore]:
    machine = Machine()
    streams = MachineStreams(machine, 0)
    store = HostStore(CPU, streams, HostPool(), copies_in_flight=0, loads_ahead=loads_ahead)
    return [store.save([torch.zeros(size, dtype=torch.uint8)]) for size in range(1, count + 1)], machine, store


def loaded(machine: Machine) -> list[int]:
    """Sizes of what was loaded, in order."""
    targets = [op.accesses[1] for op in machine.ops if op.what == "h2d copy"]
    return [target.stop - target.start for target in targets]


def test_next_entry_is_loaded_one_ahead() -> None:
    entries, machine, _ = entries_of_sizes(4, 1)
    seen = []
    while entries:
        entry = entries.pop()
        entry.fetch()
        seen.append(loaded(machine))
        entry.release()
    assert seen == [[4, 3], [4, 3, 2], [4, 3, 2, 1], [4, 3, 2, 1]]


def test_entry_that_is_dropped_is_not_loaded_ahead() -> None:
    entries, machine, store = entries_of_sizes(5, 1)
    entries[4].fetch()
    assert loaded(machine) == [5, 4]
    del entries[3]
    entries[1].fetch()
    assert loaded(machine) == [5, 4, 2, 1]
    assert store.in_use_bytes == 5 + 3 + 2 + 1


def test_no_more_is_loaded_ahead_than_allowed() -> None:
    entries, machine, store = entries_of_sizes(7, 2)
    for place in (6, 4, 2):
        entries[place].fetch()
    assert loaded(machine) == [7, 6, 5, 4, 3]
    store.wait_pending()
    entries[2].fetch()
    assert loaded(machine) == [7, 6, 5, 4, 3, 3, 2]


@pytest.mark.gpu
def test_on_a_gpu_offloading_overlaps_compute() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    store, elements, layers = host_store(device), 1 << 22, 6
    make = functools.partial(torch.full, (elements,), device=device)
    for kept in [store.save([make(0.0)]) for _ in range(layers)]:  # pins memory, which makes the host wait
        kept.release()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sums = []
    with host_waits_are_errors():
        for start in (1.0, 101.0):
            entries = []
            for layer in range(layers):
                torch.cuda._sleep(10_000_000)  # copies that do not wait for compute come too early
                entries.append(store.save([make(start + layer)]))
                make(-1.0)  # overwrites memory that was freed too early
            store.wait_pending()
            while entries:
                kept = entries.pop()
                (tensor,) = kept.fetch()
                sums.append(tensor.mean())
                kept.release()
                del tensor
                make(-2.0)
    assert [round(value.item()) for value in sums] == [6, 5, 4, 3, 2, 1, 106, 105, 104, 103, 102, 101]
    assert torch.cuda.max_memory_allocated() - before < 5.5 * 4 * elements
    assert store.in_use_bytes == 0


@pytest.mark.gpu
def test_on_a_gpu_exposed_share_measures_what_compute_hides() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    store = host_store(device)
    tensor = torch.zeros(1 << 26, device=device)  # 256 MiB: some milliseconds
    store.save([tensor]).release()  # pins the memory
    torch.cuda.synchronize()
    store.times.start()
    store.save([tensor]).release()
    store.wait_pending()
    torch.cuda.synchronize()
    wire_s = store.times.read().transfer_s  # nothing else ran
    assert wire_s is not None
    store.times.start()
    kept = store.save([tensor])
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    store.wait_pending()
    torch.cuda.synchronize()
    hidden = store.times.read()
    store.times.start()
    kept.fetch()
    torch.cuda.synchronize()
    exposed = store.times.read()
    assert hidden.exposed_share(wire_s) == pytest.approx(0.0, abs=0.05)
    assert exposed.exposed_share(wire_s) == pytest.approx(1.0, abs=0.25)


@pytest.mark.gpu
def test_buffers_of_a_pinned_pool_are_pinned() -> None:
    (buffers,) = HostPool(pinned=True).take(5 << 20)
    assert [buffer.is_pinned() for buffer in buffers] == [True, True]


@pytest.mark.gpu
def test_buffers_of_a_pinned_pool_are_not_rounded_up() -> None:
    pool = HostPool(pinned=True)
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    _buffers = pool.take(5 << 20)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] - before <= 5 << 20
