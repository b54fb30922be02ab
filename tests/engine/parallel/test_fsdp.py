"""Sharded training gives what one rank gives: initial weights, gradients, norm and weights after steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from testkit.ranks import Pools
from testkit.tiny_training import (
    PRESETS,
    TINY_MODEL,
    full_weights,
    own_part,
    random_batches,
    start_run,
    tiny_config,
    whole,
)
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import ModelConfig, ParallelConfig
from engine.optim import clip_gradients
from engine.parallel.shard import shard_batch
from engine.train_step import count_labels, sequence_loss

# fp32 sums in another order: a few units in the last place of 2^-24.
FP32_TOLERANCE = 1e-6
# Absolute, a thousandth of one Adam update (learning rate 3e-3): Adam divides a gradient by its own size, so the
# rounding of gradients near zero enters the update at full weight. Seen: 6e-7.
WEIGHT_TOLERANCE = 3e-6
SEQUENCES = 4
STEPS = 3

MESHES = {
    "2 shards": (2, ParallelConfig(dp_shard_size=2)),
    "4 shards": (4, ParallelConfig(dp_shard_size=4)),
    "2 replicas of 2 shards": (4, ParallelConfig(dp_replicate_size=2, dp_shard_size=2)),
    "2 dp x 2 cp": (4, ParallelConfig(dp_shard_size=2, cp_size=2)),
    "2 replicas of 2 cp": (4, ParallelConfig(dp_replicate_size=2, cp_size=2)),
}


@dataclass(frozen=True)
class Facts:
    """What a run gives: weights at the start, gradients and norm of the first step, weights after some steps."""

    initial: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    norm: float
    trained: dict[str, torch.Tensor]


def training_facts(parallel: ParallelConfig, model: ModelConfig) -> Facts | None:
    """Facts of this rank's run; None on ranks other than 0, which would repeat them."""
    config = tiny_config(parallel=parallel, model=model, attention=PRESETS["burst"])
    run = start_run(config)
    initial = full_weights(run.model)
    batch = own_part(random_batches(0, sequences=SEQUENCES), run.mesh)[0]
    place: dict[str, Any] = {"layout": run.attention.layout, "cp_rank": run.mesh.cp_rank, "device": run.mesh.device}
    local = shard_batch(batch.tokens, batch.labels, **place)
    loss = sequence_loss(run.model, local, run.attention) / count_labels([local], run.mesh.device)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: whole(p.grad) for name, p in run.model.named_parameters()}
    norm = clip_gradients(run.model.parameters(), None).item()
    run.model.zero_grad()
    for step in range(STEPS):
        run.train_step(step, own_part(random_batches(step, sequences=SEQUENCES), run.mesh))
    facts = Facts(initial, gradients, norm, full_weights(run.model))
    return facts if run.mesh.rank == 0 else None


def assert_gradients_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (found[name] - tensor).abs().max().item()
        assert difference <= FP32_TOLERANCE * tensor.abs().max().item(), f"{name}: {difference}"


def assert_weights_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (found[name] - tensor).abs().max().item()
        assert difference <= WEIGHT_TOLERANCE, f"{name}: {difference}"


@pytest.fixture(scope="module")
def one_rank(ranks: Pools) -> Facts:
    facts: Facts = ranks(1).run(training_facts, ParallelConfig(), TINY_MODEL)[0]
    return facts


@pytest.mark.parametrize("name", MESHES)
def test_ranks_give_the_gradients_norm_and_weights_of_one(ranks: Pools, one_rank: Facts, name: str) -> None:
    world_size, parallel = MESHES[name]
    facts = ranks(world_size).run(training_facts, parallel, TINY_MODEL)[0]
    for parameter, tensor in one_rank.initial.items():
        assert torch.equal(facts.initial[parameter], tensor), f"{parameter} depends on the world size"
    assert_gradients_equal(facts.gradients, one_rank.gradients)
    assert facts.norm == pytest.approx(one_rank.norm, rel=FP32_TOLERANCE)
    assert_weights_equal(facts.trained, one_rank.trained)


def test_tied_embeddings_stay_one_weight_under_sharding(ranks: Pools) -> None:
    model = ModelConfig(**{**TINY_MODEL.__dict__, "tie_embeddings": True})
    expected = ranks(1).run(training_facts, ParallelConfig(), model)[0]
    found = ranks(2).run(training_facts, ParallelConfig(), model)[0]
    assert "head.weight" not in expected.initial
    assert_gradients_equal(found.gradients, expected.gradients)
    assert_weights_equal(found.trained, expected.trained)


def test_weights_that_stay_gathered_are_not_stale_after_a_step(ranks: Pools) -> None:
    kept = ParallelConfig(dp_shard_size=2, reshard_after_forward=False)
    freed = ParallelConfig(dp_shard_size=2, reshard_after_forward=True)
    found, expected = (ranks(2).run(training_facts, parallel, TINY_MODEL)[0] for parallel in (kept, freed))
    for name, tensor in expected.trained.items():
        assert torch.equal(found.trained[name], tensor)


class Reductions(TorchDispatchMode):
    """Counts the collectives that sum and divide gradients."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def reductions(micro_steps: int) -> int:
    """How many of them one step of so many micro-steps takes."""
    run = start_run(tiny_config(parallel=ParallelConfig(dp_shard_size=2)))
    batch = random_batches(0, sequences=2 * micro_steps)
    with Reductions() as reductions:
        run.train_step(0, own_part(batch, run.mesh, micro_steps=micro_steps))
    return reductions.count


def test_gradients_are_reduced_once_a_step_however_many_micro_steps_it_has(ranks: Pools) -> None:
    units = TINY_MODEL.num_layers + 3  # the layers, the embedding, the head, and what is left at the root
    assert [ranks(2).run(reductions, micro_steps)[0] for micro_steps in (1, 3)] == [units, units]
