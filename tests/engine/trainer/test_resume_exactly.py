"""A run that goes on from a checkpoint sees the data that come next, and refuses to go on with other data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from testkit.ranks import Pools
from testkit.tiny_training import tiny_config
from testkit.whole_runs import create_run_of, small_corpus, train_on_rank, train_until_error

from engine.config import DataConfig, RunConfig
from engine.config_checkpoint import CheckpointConfig

STEPS, HALF = 4, 2


def config_of(data: DataConfig, checkpoint: CheckpointConfig, *, steps: int = STEPS, **changes: Any) -> RunConfig:
    train = {
        "steps": steps,
        "warmup_metric_steps": 1,
        "eval_samples": 1,
        "peak_flops_per_device": 1e12,
        "checkpoint": checkpoint,
    }
    return tiny_config(train=train, model={"vocab_size": 320}, data=data, **changes)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return small_corpus(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def begun(ranks: Pools, data: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of half of the steps, saved at its end."""
    config = config_of(data, CheckpointConfig(every_steps=HALF), steps=HALF)
    run = create_run_of(config, tmp_path_factory.mktemp("begun"))
    assert ranks(1).run(train_on_rank, str(run.path), config) == [0]
    return run.path


def test_the_data_after_a_resume_are_those_that_come_next(
    ranks: Pools, data: DataConfig, begun: Path, tmp_path: Path
) -> None:
    losses = {}
    for name, source in (("aaaaaa", None), ("bbbbbb", str(begun))):
        config = config_of(data, CheckpointConfig(resume_from=source))
        run = create_run_of(config, tmp_path, name)
        assert ranks(1).run(train_on_rank, str(run.path), config) == [0]
        losses[name] = {row["step"]: row["loss"] for row in run.read_metrics()}
    assert sorted(losses["bbbbbb"]) == [3, 4]
    assert losses["bbbbbb"] == {step: losses["aaaaaa"][step] for step in (3, 4)}
    assert len(set(losses["aaaaaa"].values())) == STEPS


def test_another_seed_is_refused_with_both_values(ranks: Pools, data: DataConfig, begun: Path, tmp_path: Path) -> None:
    config = config_of(data, CheckpointConfig(resume_from=str(begun)), seed=4)
    run = create_run_of(config, tmp_path)
    (error,) = ranks(1).run(train_until_error, str(run.path), config)
    assert "is of other data: seed was 3, is 4" in error
