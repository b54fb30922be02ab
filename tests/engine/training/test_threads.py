"""A rank that updates weights on the CPU has its share of the cores that it may run on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from testkit.tiny_training import tiny_config

from engine.parallel.mesh import Placement
from engine.training.trainer import set_threads

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    yield
    torch.set_num_threads(before)


def threads(device: torch.device, store: str, ranks: int = 1, asked: int | None = None) -> int:
    config = tiny_config(memory={"optimizer_store": store}, cluster={"threads_per_rank": asked})
    set_threads(config, device, Placement(0, ranks, 0, ranks))
    return torch.get_num_threads()


def test_a_rank_that_computes_or_updates_on_the_cpu_takes_its_share_of_the_cores_it_may_use() -> None:
    everything = os.sched_getaffinity(0)
    cores = len(everything)
    assert threads(GPU, "device") == 7  # as it was started
    assert threads(CPU, "device") == cores
    assert threads(GPU, "host") == max(1, cores * 3 // 4)  # the rest feeds the GPU
    assert threads(GPU, "host", ranks=2 * cores) == 1
    assert threads(GPU, "host", asked=3) == 3
    os.sched_setaffinity(0, {min(everything)})
    try:
        assert threads(CPU, "device") == 1
    finally:
        os.sched_setaffinity(0, everything)
