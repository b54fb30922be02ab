"""A run that goes on from a checkpoint sees the data that come next, and refuses to go on with other data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testkit.ranks import Pools
from testkit.whole_runs import create_run_of, train_until_error, trained, whole_config

from engine.config.settings import CheckpointConfig, DataConfig, ParallelConfig, RunConfig

STEPS, HALF = 4, 2


def config_of(corpus: DataConfig, checkpoint: CheckpointConfig, *, steps: int = STEPS, **changes: Any) -> RunConfig:
    return whole_config(corpus, train={"steps": steps, "checkpoint": checkpoint}, **changes)


def test_another_seed_is_refused_with_both_values(
    ranks: Pools, corpus: DataConfig, untaught: tuple[Path, list[float]], tmp_path: Path
) -> None:
    config = config_of(corpus, CheckpointConfig(resume_from=str(untaught[0])), seed=4)
    run = create_run_of(config, tmp_path)
    (error,) = ranks(1).run(train_until_error, str(run.path), config)
    assert "is of other data: seed was 3, is 4" in error


@pytest.fixture(scope="module")
def untaught(ranks: Pools, corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run of one sample a step whose weights stay as they are, saved after two; the losses of its first samples."""
    config = still(config_of(corpus, CheckpointConfig(every_steps=HALF, keep_last=10), steps=3 * HALF))
    run = trained(ranks, 1, config, tmp_path_factory.mktemp("untaught"))
    return run.path / "checkpoints" / f"step-{HALF:08}", [row["loss"] for row in run.read_metrics()]


def still(config: RunConfig) -> RunConfig:
    """With a rate below every rounding: the loss of a step then says which samples it read."""
    return replace(config, optimizer=replace(config.optimizer, learning_rate=1e-30))


@pytest.mark.parametrize(
    ("world_size", "train"),
    [(1, {"micro_batch_size": 2}), (1, {"grad_accum_steps": 2}), (2, {})],
    ids=["rows", "micro-steps", "ranks"],
)
def test_a_resume_with_another_batch_repeats_and_omits_no_sample(
    ranks: Pools, corpus: DataConfig, untaught: tuple[Path, list[float]], tmp_path: Path, world_size: int, train: Any
) -> None:
    source, losses = untaught
    parallel = ParallelConfig(dp_shard_size=world_size)
    config = still(config_of(corpus, CheckpointConfig(resume_from=str(source)), parallel=parallel))
    config = replace(config, train=replace(config.train, **train))
    run = trained(ranks, world_size, config, tmp_path)
    found = {row["step"]: row["loss"] for row in run.read_metrics()}
    expected = {step: (losses[first] + losses[first + 1]) / 2 for step, first in ((3, 2), (4, 4))}
    assert found == pytest.approx(expected, rel=1e-6)  # fp32 sums in another order
    assert len({round(loss, 3) for loss in losses}) == len(losses)
