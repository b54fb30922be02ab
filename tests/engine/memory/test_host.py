"""Host memory for activations: counted exactly, bounded, used again, and told from device memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.buffers import BufferPool, allocate_tensor, compute_place
from engine.memory.host import HostMemoryError, HostPool, host_empty, lies_in_host_memory, piece_sizes
from engine.row_blocks import Rehearsal, rehearse
from engine.runs.folder import describe_error

CPU = torch.device("cpu")
KIB = 1 << 10


def test_host_memory_is_known_by_all_its_views_and_by_nothing_else() -> None:
    with torch.inference_mode():  # an evaluation's: it serves training, too
        memory = host_empty((4, 6), torch.float32, pinned=False)
    memory.add_(torch.ones(6, requires_grad=True).detach())
    view = memory[1:].t().view(torch.int32)
    assert (memory.shape, memory.dtype) == ((4, 6), torch.float32)
    assert lies_in_host_memory(view)
    assert not lies_in_host_memory(memory.clone())


def test_host_slots_of_plans_are_host_memory_on_a_cpu_too() -> None:
    for where, expected in (("host", True), ("device", False)):
        place = compute_place(CPU, where)
        assert lies_in_host_memory(BufferPool().lease().empty((3, 2), torch.float32, place)) is expected
        assert lies_in_host_memory(allocate_tensor((3, 2), torch.float32, place)) is expected


@given(st.integers(0, 1 << 44))
def test_pieces_of_pinned_memory_waste_less_than_an_eighth_where_one_allocation_would_double(size: int) -> None:
    pieces = piece_sizes(size, pinned=True)
    assert len(pieces) <= 4
    assert list(pieces) == sorted(pieces, reverse=True)
    assert all(piece.bit_count() == 1 for piece in pieces)  # nothing is rounded
    assert size <= sum(pieces)
    assert sum(pieces) - size < max(size / 8, 64 * KIB)
    assert sum(pieces[:-1]) < size or not pieces  # no piece is superfluous


@pytest.mark.parametrize("pinned", [False, True])
def test_a_step_like_the_last_one_allocates_nothing(pinned: bool) -> None:
    pool, seen = HostPool(pinned=pinned), []
    with rehearse(Rehearsal(as_accelerator=True)):  # whose pinned memory needs no GPU
        for _ in range(3):
            taken = pool.take(300 * KIB, 300 * KIB, 64 * KIB, 5)
            pieces = [piece.data_ptr() for buffers in taken for piece in buffers]
            assert len(set(pieces)) == len(pieces)  # what is in use is never handed out again
            pool.give_back(taken)
            seen.append((pool.in_use_bytes, pool.idle_bytes))
    assert len(set(seen)) == 1
    assert seen[0][0] == 0


def test_beyond_the_limit_the_error_says_how_much_and_what_to_do_and_ends_a_run_as_oom() -> None:
    pool = HostPool(1000)
    pool.take(700)
    with pytest.raises(HostMemoryError) as caught:
        pool.take(400)
    text = str(caught.value)
    named = ["400 bytes more", "700 bytes", "1,000 bytes", "memory.host_bytes", "memory.activation_store=device"]
    assert [words for words in named if words not in text] == []
    assert describe_error(caught.value)["kind"] == "oom"
    assert pool.in_use_bytes == 700
    idle = pool.take(300)
    pool.give_back(idle)
    assert (pool.idle_bytes, pool.in_use_bytes) == (300, 700)
    assert pool.take(200)[0][0].numel() == 200  # idle buffers make way
    assert (pool.idle_bytes, pool.in_use_bytes) == (0, 900)


def test_pieces_taken_before_the_limit_is_hit_go_back() -> None:
    pool = HostPool(300 * KIB, pinned=True)
    with rehearse(Rehearsal(as_accelerator=True)):
        for sizes in ([384 * KIB], [256 * KIB, 128 * KIB]):
            with pytest.raises(HostMemoryError):
                pool.take(*sizes)  # 256 fit, 128 do not
            assert pool.in_use_bytes == 0
        assert len(pool.take(256 * KIB)[0]) == 1
