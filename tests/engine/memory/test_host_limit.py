"""The bound of activations in host memory: the node's, shared by its ranks, less the optimizer's part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from testkit.ranks import Pools
from testkit.tiny_training import own_part, random_batches, start_run, tiny_config

from engine.config.settings import MemoryConfig, RunConfig
from engine.memory.host import HostMemoryError
from engine.memory.predict import predict_memory
from engine.memory.store import HostStore
from engine.model.parallelize import activation_limit
from engine.planning.methods.topology import Topology

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


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


def test_without_a_setting_a_gpus_rank_is_bounded_by_its_machine_and_a_cpus_by_nothing() -> None:
    one, two = (activation_limit(MemoryConfig(), GPU, ranks, 0) for ranks in (1, 2))
    assert one is not None
    assert two == one // 2
    assert 1 << 28 < one < 1 << 46
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
def test_what_the_plan_says_is_enough_and_a_byte_less_than_needed_ends_the_step(ranks: Pools, policy: str) -> None:
    memory = {"activation_checkpoint": policy, "activation_store": "host"}
    free = tiny_config(memory=memory, attention={"preset": "single"})
    (used,) = (int(ranks(1).run(step_within, free)[0]),)
    planned = predict_memory(free, Topology(1, 1)).host_peak_bytes
    assert used <= planned <= 1.01 * used
    bounded = tiny_config(memory={**memory, "host_bytes": planned}, attention={"preset": "single"})
    assert ranks(1).run(step_within, bounded) == [str(used)]
    short = tiny_config(memory={**memory, "host_bytes": used - 1}, attention={"preset": "single"})
    (text,) = ranks(1).run(step_within, short)
    assert f"this rank's limit is {used - 1:,} bytes. Raise memory.host_bytes, choose a" in text
