"""Ways to run the same training, interrupted by a checkpoint or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from testkit.saved_checkpoints import checkpointing, state_hash, take_all
from testkit.tiny_training import TinyRun, own_part, random_batches, start_run, tiny_config

from engine.checkpoint.checkpointer import Snapshot
from engine.checkpoint.state import training_tensors
from engine.config.settings import AttentionConfig, MemoryConfig, ParallelConfig, RunConfig

SEQUENCES = 4
STEPS = 3
MORE = 2
LONG = 50


@dataclass(frozen=True)
class Case:
    """A way to run the same training."""

    name: str
    world_size: int
    config: RunConfig


def case(name: str, world_size: int, **changes: Any) -> Case:
    """With dropout: what is random must go on where it was."""
    return Case(name, world_size, tiny_config(train={"dropout": 0.1}, **changes))


CASES = [
    case("one rank", 1),
    case("two rings", 2, parallel=ParallelConfig(cp_size=2), attention=AttentionConfig(preset="ring")),
    case("two data-parallel", 2, parallel=ParallelConfig(dp_shard_size=2, cp_size=1)),
    case("three ranks", 3, parallel=ParallelConfig(cp_size=3), attention=AttentionConfig(preset="striped")),
    case("burst on four", 4, parallel=ParallelConfig(cp_size=4), attention=AttentionConfig(preset="burst")),
    case(
        "replicated",
        4,
        parallel=ParallelConfig(dp_replicate_size=2, dp_shard_size=1, cp_size=2),
        attention=AttentionConfig(preset="ring"),
    ),
    case(
        "tensor parallel",
        2,
        parallel=ParallelConfig(tp_size=2, cp_size=1),
        attention=AttentionConfig(preset="megatron_tp"),
    ),
    case(
        "recomputed",
        2,
        parallel=ParallelConfig(cp_size=2),
        attention=AttentionConfig(preset="ring"),
        memory=MemoryConfig(activation_checkpoint="full"),
    ),
]
NAMES = [one.name for one in CASES]


def train(
    config: RunConfig, root: str, saves: int | None, restores: bool, background: bool = False, more: int = MORE
) -> dict[str, Any]:
    """Losses of all steps, hashes of the state where a save is and at the end; saves after step `saves`, or restores.

    more: steps after the saved ones.
    """
    run, first = start_run(config), 0
    losses, hashes = {}, {}
    with checkpointing(run, root, in_background=background) as (checkpointer, before):
        if restores:
            manifest = checkpointer.restore(before, take_all)
            assert manifest is not None
            first = manifest.step
            hashes[first] = hash_now(run)
        for step in range(first, STEPS + more):
            losses[step] = run.train_step(step, own_part(random_batches(step, sequences=SEQUENCES), run.mesh)).loss
            if step + 1 in (saves, STEPS + more):
                hashes[step + 1] = hash_now(run)
            if step + 1 == saves:
                tensors = training_tensors(run.model, run.train_step.optimizer)
                checkpointer.save(Snapshot(step + 1, tensors.tensors, {"updates": tensors.updates}))
    return {"losses": losses, "hashes": hashes}


def hash_now(run: TinyRun) -> str:
    """Of all that a checkpoint would hold."""
    return state_hash(training_tensors(run.model, run.train_step.optimizer).tensors)
