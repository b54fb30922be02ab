"""The same run on 1, 2 and 4 ranks, by every preset, gives the same losses; so do its divisions into micro-steps."""

from __future__ import annotations

from typing import Any

import pytest
from testkit.ranks import Pools
from testkit.tiny_training import TINY, own_part, random_batches, start_run, tiny_config, train_losses

from engine.config import AttentionConfig, ParallelConfig, RunConfig
from engine.config_cluster import ClusterConfig

RELATIVE = 1e-5  # fp32 over some steps, as the project promises; seen: 5e-8
BF16_RELATIVE = 2e-2  # bf16 has 8 bits of mantissa; differences grow over the steps
STEPS = 3
STEPS_UNTIL_LEARNT = 20  # of one rank: what is compared is a model that learns
SEQUENCES = 2

BURST_2X2 = AttentionConfig(preset="burst", ring_inner_size=2, ring_outer_size=2, backward_circulates="q")

CASES: dict[str, tuple[int, RunConfig]] = {
    "single on 2 data-parallel ranks": (2, tiny_config(parallel=ParallelConfig(dp_shard_size=2))),
    "ring on 2": (2, tiny_config(attention=AttentionConfig(preset="ring"))),
    "ring on 4": (4, tiny_config(attention=AttentionConfig(preset="ring"))),
    "striped on 2": (2, tiny_config(attention=AttentionConfig(preset="striped"))),
    "striped on 4": (4, tiny_config(attention=AttentionConfig(preset="striped"))),
    "burst flat on 2": (2, tiny_config(attention=AttentionConfig(preset="burst", backward_circulates="q"))),
    "burst flat on 4": (4, tiny_config(attention=AttentionConfig(preset="burst", backward_circulates="q"))),
    "burst 2x2 on 4": (4, tiny_config(attention=BURST_2X2)),
    "burst auto on a topology of 2 nodes": (
        4,
        tiny_config(attention=AttentionConfig(preset="burst"), cluster=ClusterConfig(backend="gloo", topology_nodes=2)),
    ),
    "burst on 2 with 2 data-parallel ranks": (
        4,
        tiny_config(attention=AttentionConfig(preset="burst"), parallel=ParallelConfig(dp_shard_size=2)),
    ),
}


@pytest.fixture(scope="module")
def one_rank(ranks: Pools) -> list[float]:
    losses: list[float] = ranks(1).run(train_losses, TINY, SEQUENCES, STEPS_UNTIL_LEARNT)[0]
    return losses


def test_the_loss_falls(one_rank: list[float]) -> None:
    assert one_rank[-1] < 0.8 * one_rank[0]


@pytest.mark.parametrize("name", CASES)
def test_three_steps_give_the_losses_of_one_rank(ranks: Pools, one_rank: list[float], name: str) -> None:
    world_size, config = CASES[name]
    for losses in ranks(world_size).run(train_losses, config, SEQUENCES, STEPS):
        assert losses == pytest.approx(one_rank[:STEPS], rel=RELATIVE)


def test_bf16_follows_fp32(ranks: Pools, one_rank: list[float]) -> None:
    config = tiny_config(attention=AttentionConfig(preset="burst"), train={"compute_dtype": "bfloat16"})
    losses = ranks(2).run(train_losses, config, SEQUENCES, STEPS)[0]
    assert losses == pytest.approx(one_rank[:STEPS], rel=BF16_RELATIVE)
    assert losses != pytest.approx(one_rank[:STEPS], rel=RELATIVE)  # else it did not run in bf16


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (1, {}),
        (2, {}),
        (2, {"reduce_gradients": "step"}),
    ],
    ids=str,
)
def test_micro_steps_give_the_losses_of_the_large_batch(
    ranks: Pools, one_rank: list[float], world_size: int, parallel: dict[str, Any]
) -> None:
    config = tiny_config(attention=AttentionConfig(preset="burst" if world_size > 1 else "single"), parallel=parallel)
    losses = ranks(world_size).run(train_losses, config, SEQUENCES, STEPS, micro_steps=2)[0]
    assert losses == pytest.approx(one_rank[:STEPS], rel=RELATIVE)


@pytest.mark.parametrize("reduced", ["micro_step", "step"])
def test_copies_of_the_model_sum_what_their_micro_steps_have_added_up(ranks: Pools, reduced: str) -> None:
    config = tiny_config(attention={"preset": "burst"}, parallel={"dp_replicate_size": 2, "reduce_gradients": reduced})
    expected = ranks(1).run(train_losses, TINY, 4, 5)[0]
    assert ranks(4).run(train_losses, config, 4, 5, micro_steps=2)[0] == pytest.approx(expected, rel=RELATIVE)


def test_checkpointing_changes_nothing(ranks: Pools) -> None:
    config = tiny_config(attention=AttentionConfig(preset="burst"))
    kept = tiny_config(attention=AttentionConfig(preset="burst"), memory={"activation_checkpoint": "none"})
    assert ranks(2).run(train_losses, kept, SEQUENCES, 5) == ranks(2).run(train_losses, config, SEQUENCES, 5)


def losses_with_uneven_labels(config: RunConfig, micro_steps: int) -> list[tuple[float, int]]:
    """(loss, labels) of steps whose first sequence has one label left and whose second has all."""
    run = start_run(config)
    results = []
    for step in range(5):
        batch = random_batches(step, sequences=2, ignored=(29, 0))
        result = run.train_step(step, own_part(batch, run.mesh, micro_steps=micro_steps))
        results.append((result.loss, result.label_tokens))
    return results


@pytest.mark.parametrize(
    ("world_size", "parallel", "micro_steps"),
    [(2, {"dp_shard_size": 2}, 1), (1, {}, 2), (2, {}, 2), (4, {"dp_replicate_size": 2}, 1)],
)
def test_tokens_weigh_the_same_wherever_they_lie(
    ranks: Pools, world_size: int, parallel: dict[str, Any], micro_steps: int
) -> None:
    expected = ranks(1).run(losses_with_uneven_labels, TINY, 1)[0]
    preset = "single" if world_size == parallel.get("dp_shard_size", 1) else "burst"
    config = tiny_config(parallel=parallel, attention={"preset": preset})
    found = ranks(world_size).run(losses_with_uneven_labels, config, micro_steps)[0]
    assert [labels for _, labels in found] == [31] * 5
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=RELATIVE)
