"""Loss and every gradient of transformers' decoders in the trainer are those of one process of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from testkit.covering import covering_cases
from testkit.hub_models import FAMILIES, assert_equal_facts, hub_config, step_facts
from testkit.ranks import Pools
from testkit.tiny_training import random_batches

from engine.config.settings import RunConfig
from engine.data.sampler import Batch

pytestmark = pytest.mark.thorough  # every worker imports transformers, which takes seconds
ROWS = 30
DOCUMENTS = np.array([0, 11, 23])


def one_sequence(*, packed: bool) -> Batch:
    """One sequence with ignored labels at its start, of several documents if `packed`."""
    batch = random_batches(0, sequences=1, seq_len=ROWS, ignored=(3,))
    return replace(batch, documents=(DOCUMENTS,)) if packed else batch


def check(ranks: Pools, world_size: int, config: RunConfig) -> None:
    batch = one_sequence(packed=config.attention.documents)
    assert_equal_facts(ranks(world_size).run(step_facts, config, batch)[0], config, batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_on_two_ranks(ranks: Pools, family: str) -> None:
    memory = {"activation_checkpoint": "attn_out"}
    check(ranks, 2, hub_config(family, attention={"preset": "burst"}, memory=memory, parallel={"cp_size": 2}))


AXES = {
    "preset": ("burst", "ring", "ulysses", "megatron_allgather"),
    "policy": ("none", "full", "attn_out", "seq_fraction"),
    "store": ("device", "host"),
    "family": ("qwen3", "gemma3_text", "qwen3_moe", "qwen3_next", "lfm2"),
    "ranks": ("1", "2", "4"),
    "documents": ("plain", "packed"),
}
CASES = covering_cases(AXES, lambda case: True)


@pytest.mark.parametrize("case", CASES, ids=["-".join(case.values()) for case in CASES])
def test_presets_and_memory_policies(ranks: Pools, case: dict[str, str]) -> None:
    world_size, packed = int(case["ranks"]), case["documents"] == "packed"
    config = hub_config(
        case["family"],
        attention={"preset": case["preset"] if world_size > 1 else "single", "documents": packed},
        memory={"activation_checkpoint": case["policy"], "activation_store": case["store"]},
        parallel={"cp_size": world_size},
    )
    check(ranks, world_size, config)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_auxiliary_loss_of_data_parallel_ranks_is_that_of_one_batch(ranks: Pools, family: str) -> None:
    batch = random_batches(0, sequences=2, seq_len=ROWS, ignored=(3, 0))
    parallel: Any = {"cp_size": 2, "dp_shard_size": 2}
    config = hub_config(family, attention={"preset": "ring"}, parallel=parallel)
    assert_equal_facts(ranks(4).run(step_facts, config, batch)[0], config, batch)
