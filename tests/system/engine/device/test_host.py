"""Host memory for activations: counted exactly, bounded, used again, and told from device memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.ranks import Pools
from testkit.resolved import method_of
from testkit.tiny_training import own_part, random_batches, start_run, tiny_config

from engine.activations.store import HostStore
from engine.attention.buffers import BufferPool, allocate_tensor, buffer_location
from engine.config.settings import MemoryConfig, RunConfig
from engine.device.host_memory import HostMemoryError, HostPool, chunk_sizes, host_empty, is_in_host_memory
from engine.device.row_blocks import FakeRun, use_fake_run
from engine.parallel.parallelize import activation_limit
from engine.planning.topology import Topology
from engine.runs.folder import describe_error
from engine.training.fake_run.memory import predict_memory

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
KIB = 1 << 10


def test_views_of_host_memory_are_recognised() -> None:
    with torch.inference_mode():  # an evaluation's: it serves training, too
        memory = host_empty((4, 6), torch.float32, pinned=False)
    memory.add_(torch.ones(6, requires_grad=True).detach())
    view = memory[1:].t().view(torch.int32)
    assert memory.shape == (4, 6)
    assert memory.dtype == torch.float32
    assert is_in_host_memory(view)
    assert not is_in_host_memory(memory.clone())


def test_host_slots_of_plans_are_host_memory_on_a_cpu_too() -> None:
    for where, expected in (("host", True), ("device", False)):
        place = buffer_location(CPU, where)
        assert is_in_host_memory(BufferPool().lease().empty((3, 2), torch.float32, place)) is expected
        assert is_in_host_memory(allocate_tensor((3, 2), torch.float32, place)) is expected


@given(st.integers(0, 1 << 44))
def test_chunks_of_pinned_memory_waste_less_than_an_eighth(size: int) -> None:
    pieces = chunk_sizes(size, pinned=True)
    assert len(pieces) <= (4 if size > 64 * KIB else 1)
    assert list(pieces) == sorted(pieces, reverse=True)
    assert all(piece.bit_count() == 1 for piece in pieces)  # nothing is rounded
    assert size <= sum(pieces)
    assert sum(pieces) - size < max(size / 8, 64 * KIB)
    assert sum(pieces[:-1]) < size or not pieces  # no piece is superfluous


@pytest.mark.parametrize("pinned", [False, True])
def test_a_step_like_the_last_one_allocates_nothing(pinned: bool) -> None:
    pool, seen = HostPool(pinned=pinned), []
    with use_fake_run(FakeRun(as_accelerator=True)):  # whose pinned memory needs no GPU
        for _ in range(3):
            taken = pool.take(300 * KIB, 300 * KIB, 64 * KIB, 5)
            pieces = [piece.data_ptr() for buffers in taken for piece in buffers]
            assert len(set(pieces)) == len(pieces)  # what is in use is never handed out again
            pool.give_back(taken)
            seen.append((pool.in_use_bytes, pool.idle_bytes))
    assert len(set(seen)) == 1
    assert seen[0][0] == 0


def exhausted() -> tuple[HostPool, HostMemoryError]:
    """A pool of 1,000 bytes with 700 in use, and its refusal of 400 more."""
    pool = HostPool(1000)
    pool.take(700)
    with pytest.raises(HostMemoryError) as caught:
        pool.take(400)
    return pool, caught.value


@pytest.mark.parametrize(
    "words", ["400 more bytes", "700 bytes", "1,000 bytes", "memory.host_bytes", "memory.activation_store=device"]
)
def test_exceeded_host_memory_is_reported(words: str) -> None:
    assert words in str(exhausted()[1])


def test_exceeded_host_memory_ends_a_run_as_out_of_memory() -> None:
    assert describe_error(exhausted()[1])["kind"] == "oom"


def test_refused_request_takes_nothing_from_the_pool() -> None:
    assert exhausted()[0].in_use_bytes == 700


def test_idle_buffers_are_released_before_the_limit_is_exceeded() -> None:
    pool, _ = exhausted()
    pool.give_back(pool.take(300))
    assert pool.idle_bytes == 300
    assert pool.take(200)[0][0].numel() == 200
    assert pool.idle_bytes == 0
    assert pool.in_use_bytes == 900


def test_chunks_taken_before_the_limit_is_hit_are_returned() -> None:
    pool = HostPool(300 * KIB, pinned=True)
    with use_fake_run(FakeRun(as_accelerator=True)):
        for sizes in ([384 * KIB], [256 * KIB, 128 * KIB]):
            with pytest.raises(HostMemoryError):
                pool.take(*sizes)  # 256 fit, 128 do not
            assert pool.in_use_bytes == 0
        assert len(pool.take(256 * KIB)[0]) == 1


@pytest.mark.parametrize(
    ("memory", "parameters", "limit"),
    [
        ({}, 10, 250),
        ({"optimizer_store": "host"}, 10, 250 - 10 * (4 + 4 + 8)),  # takes its part first
        ({"optimizer_store": "host", "moments_dtype": "int8"}, 10, 250 - 10 * (4 + 4 + 2)),
        ({"optimizer_store": "host", "optimizer_in_backward": True}, 10, 250 - 10 * (4 + 8)),  # without gradients
        ({"optimizer_store": "host"}, 1000, 0),
    ],
)
def test_ranks_of_a_node_share_its_host_memory(memory: dict[str, Any], parameters: int, limit: int) -> None:
    assert activation_limit(MemoryConfig(host_bytes=1000, **memory), GPU, 4, parameters) == limit


def test_default_host_limit_of_a_gpu_rank_is_its_share_of_the_machine() -> None:
    one, two = (activation_limit(MemoryConfig(), GPU, ranks, 0) for ranks in (1, 2))
    assert one is not None
    assert two == one // 2
    assert 1 << 28 < one < 1 << 46


def test_a_cpu_rank_has_no_default_host_limit() -> None:
    assert activation_limit(MemoryConfig(), CPU, 1, 10) is None


def step_within(config: RunConfig) -> str:
    """What a training step says, or the bytes that its store allocated."""
    run = start_run(config)
    batch = random_batches(0, sequences=1, seq_len=config.train.seq_len, vocab_size=config.model.vocab_size)
    try:
        run.train_step(0, own_part(batch, run.mesh))
    except HostMemoryError as error:
        return str(error)
    store = run.model.activation_store
    assert isinstance(store, HostStore)
    return str(store.in_use_bytes + store.pool.idle_bytes)


@pytest.mark.parametrize("policy", ["full", "attn_out", "none"])
def test_predicted_host_memory_is_sufficient(ranks: Pools, policy: str) -> None:
    memory = {"activation_checkpoint": policy, "activation_store": "host"}
    free = tiny_config(memory=memory, attention={"preset": "single"})
    (used,) = (int(ranks(1).run(step_within, free)[0]),)
    planned = predict_memory(free, method_of(free, Topology(1, 1)), Topology(1, 1)).host_peak_bytes
    assert used <= planned <= 1.01 * used
    bounded = tiny_config(memory={**memory, "host_bytes": planned}, attention={"preset": "single"})
    assert ranks(1).run(step_within, bounded) == [str(used)]


@pytest.mark.parametrize("policy", ["full", "attn_out", "none"])
def test_a_byte_less_than_needed_ends_the_step(ranks: Pools, policy: str) -> None:
    memory = {"activation_checkpoint": policy, "activation_store": "host"}
    used = int(ranks(1).run(step_within, tiny_config(memory=memory, attention={"preset": "single"}))[0])
    short = tiny_config(memory={**memory, "host_bytes": used - 1}, attention={"preset": "single"})
    (text,) = ranks(1).run(step_within, short)
    assert f"this rank's limit is {used - 1:,} bytes. Raise memory.host_bytes, choose a" in text
