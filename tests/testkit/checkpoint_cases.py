"""Ways to run the same training, interrupted by a checkpoint or not, and to save and restore without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from engine.checkpoint.checkpointer import Snapshot
from engine.checkpoint.state import training_tensors
from engine.config.settings import RunConfig
from engine.runs.checkpoints import CheckpointError
from testkit.saved_checkpoints import checkpointing, state_hash, take_all
from testkit.tiny_training import TinyRun, own_part, random_batches, start_run, tiny_config

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


def case(name: str, world_size: int, preset: str = "single", cp_size: int = 1, **changes: Any) -> Case:
    """With dropout: what is random must go on where it was."""
    parallel = {"cp_size": cp_size, **changes.pop("parallel", {})}
    attention = {} if preset == "single" else {"preset": preset}
    return Case(
        name, world_size, tiny_config(train={"dropout": 0.1}, parallel=parallel, attention=attention, **changes)
    )


CASES = [
    case("one rank", 1),
    case("two rings", 2, "ring", 2),
    case("two data-parallel", 2, parallel={"dp_shard_size": 2}),
    case("three ranks", 3, "striped", 3),
    case("burst on four", 4, "burst", 4),
    case("replicated", 4, "ring", 2, parallel={"dp_replicate_size": 2}),
    case("tensor parallel", 2, "megatron_tp", parallel={"tp_size": 2}),
    case("recomputed", 2, "ring", 2, memory={"activation_checkpoint": "full"}),
]
NAMES = [one.name for one in CASES]


def own(roots: str | Sequence[str]) -> str:
    """The folder as this rank's node has it."""
    return roots if isinstance(roots, str) else roots[dist.get_rank()]


def train(
    config: RunConfig,
    roots: str | Sequence[str],
    saves: int | None,
    restores: bool,
    background: bool = False,
    more: int = MORE,
) -> dict[str, Any]:
    """Losses of all steps, hashes of the state where a save is and at the end; saves after step `saves`, or restores.

    more: steps after the saved ones.
    """
    run, first = start_run(config), 0
    losses, hashes = {}, {}
    with checkpointing(run, own(roots), in_background=background) as (checkpointer, before):
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


def save(config: RunConfig, root: str, *steps: int, broken_rank: int | None = None, **how: Any) -> str:
    """Saves an untrained state again and again, the last time without one tensor on a rank; the error, or nothing."""
    run = start_run(config)
    try:
        with checkpointing(run, root, **({"keep_last": 5} | how)) as (checkpointer, training):
            for step in steps:
                is_broken = (run.mesh.rank, step) == (broken_rank, steps[-1])
                broken: dict[str, Any] = {"model.norm.weight": "no tensor"} if is_broken else {}
                checkpointer.save(Snapshot(step, {**training.tensors, **broken}, {"updates": 0}))
            checkpointer.finish()
    except CheckpointError as error:
        return str(error)
    return ""


def restore(
    config: RunConfig, roots: str | Sequence[str], sources: str | Sequence[str] | None = None
) -> tuple[int | None, str, str]:
    """(step or None, hash of the state then, what was told or what went wrong) of going on from there, or from another
    run's checkpoints.
    """
    run, told, step = start_run(config), list[str](), None
    with checkpointing(run, own(roots), told.append) as (checkpointer, training):
        try:
            if sources is None:
                manifest = checkpointer.restore(training, take_all)
            else:
                manifest = checkpointer.restore_from(Path(own(sources)), training, take_all)
            step = None if manifest is None else manifest.step
        except CheckpointError as error:
            told.append(str(error))
    return step, hash_now(run), " ".join(told)


def hash_now(run: TinyRun) -> str:
    """Of all that a checkpoint would hold."""
    return state_hash(training_tensors(run.model, run.train_step.optimizer).tensors)
