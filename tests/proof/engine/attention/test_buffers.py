"""The buffer pool: nothing is allocated once it knows what is needed, and open leases share nothing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.buffers import BufferLocation, BufferPool, allocate_bytes

CPU = BufferLocation(torch.device("cpu"))
HOST = BufferLocation(torch.device("cpu"), stream=1)  # another location in the same memory
SHAPES = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([torch.bfloat16, torch.float32])), max_size=6)


class Counting:
    """An allocator that counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0

    def __call__(self, location: BufferLocation, size: int) -> Tensor:
        self.calls += 1
        self.bytes += size
        return allocate_bytes(location, size)


def fill(pool: BufferPool, shapes, location: BufferLocation = CPU) -> None:
    lease = pool.lease()
    for rows, dtype in shapes:
        lease.empty((rows, 2, 8), dtype, location).zero_()
    lease.close()


@given(st.lists(SHAPES, min_size=1, max_size=4))
def test_repeated_runs_of_any_shapes_stop_allocating_after_two_rounds(runs) -> None:
    allocate = Counting()
    pool = BufferPool(allocate=allocate)
    for _ in range(2):
        for shapes in runs:
            fill(pool, shapes)
    before = allocate.calls
    for shapes in runs:
        fill(pool, shapes)
    # The first round sees every size, the second allocates blocks of the largest; the last of them stays.
    assert allocate.calls == before


@given(st.lists(st.tuples(st.booleans(), SHAPES), min_size=1, max_size=5))
def test_buffers_of_open_leases_are_disjoint(runs) -> None:
    pool = BufferPool()
    taken: dict[int, list[tuple[int, int]]] = {}
    leases = []
    for number, (close, shapes) in enumerate(runs):
        lease = pool.lease()
        taken[number] = []
        for rows, dtype in shapes:
            tensor = lease.empty((rows, 3), dtype, CPU)
            assert tensor.shape == (rows, 3)
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
            start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
            assert all(stop <= other or end <= start for spans in taken.values() for other, end in spans)
            taken[number].append((start, stop))
            leases.append(tensor)  # keeps memory that the pool dropped from being handed out by the allocator
        if close:
            lease.close()
            taken[number] = []
        else:
            leases.append(lease)


def test_buffers_of_device_or_host_do_not_share_blocks() -> None:
    pool = BufferPool()
    fill(pool, [(8, torch.float32)], CPU)
    fill(pool, [(8, torch.float32)], HOST)
    assert pool.idle_bytes == 2 * 8 * 2 * 8 * 4


def test_memory_first_used_in_an_evaluation_serves_training() -> None:
    pool = BufferPool()
    with torch.inference_mode():
        fill(pool, [(8, torch.float32)])
    pool.lease().empty((8, 2, 8), torch.float32, CPU).add_(torch.ones(8, 2, 8, requires_grad=True).detach())


def test_one_idle_block_of_sufficient_size_is_cached_per_location() -> None:
    pool = BufferPool()
    leases = [pool.lease() for _ in range(3)]
    for rows, lease in zip((64, 32, 64), leases, strict=True):
        lease.empty((rows, 8), torch.float32, CPU)
    for lease in leases:
        lease.close()
    assert pool.idle_bytes == 64 * 8 * 4
    pool.lease().empty((64, 8), torch.float32, CPU)  # never closed: its run broke off
    assert pool.idle_bytes == 0
