"""Runs that are asked to stop where no step runs: before training, in a validation, in an evaluation."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from testkit.ranks import Pools
from testkit.waiting import wait_for
from testkit.whole_runs import create_run_of, small_corpus, trained, whole_config

from engine.config.settings import CheckpointConfig, DataConfig, RunConfig
from engine.runs.checkpoints import list_checkpoints
from engine.runs.folder import RunFolder
from engine.training.rank.process import RankStatus
from engine.training.trainer import run_training


class AskedStatus(RankStatus):
    """Sends this process SIGTERM when phase `at` goes on for the `time`th time."""

    def __init__(self, at: str, time: int) -> None:
        super().__init__()
        self._at, self._left = at, time

    def advance(self) -> None:
        """As `RankStatus`."""
        super().advance()
        self._left -= self.phase == self._at
        if self._left == 0:
            self._left -= 1
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: self.stop.requested)


def run_until_stopped(path: str, config: RunConfig, at: str, time: int, asked: int) -> bool:
    """Whether this rank was stopped; rank `asked` is asked to."""
    status = AskedStatus(at, time) if int(os.environ["RANK"]) == asked else RankStatus()
    try:
        run_training(config, RunFolder(Path(path)), status)
    except KeyboardInterrupt:
        return True
    return False


def stopped(ranks: Pools, size: int, config: RunConfig, folder: Path, *, at: str, time: int) -> RunFolder:
    """The folder of a run whose last rank was asked to stop."""
    run = create_run_of(config, folder)
    assert ranks(size).run(run_until_stopped, str(run.path), config, at, time, size - 1) == [True] * size
    assert run.read_state()["state"] == "cancelled"
    assert run.read_state()["exit_code"] == 130
    return run


def saving_config(corpus: DataConfig) -> RunConfig:
    """Two samples are validated after step 3 of 6."""
    train = {"steps": 6, "eval_interval_steps": 3, "eval_samples": 2, "checkpoint": CheckpointConfig(at_end=True)}
    return whole_config(corpus, train=train, attention={"preset": "burst"})


def test_a_run_stops_while_it_prepares_data(ranks: Pools, tmp_path: Path) -> None:
    run = stopped(ranks, 1, saving_config(small_corpus(tmp_path)), tmp_path, at="prepare data", time=1)
    assert run.read_summary() is None
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"texts", "test"}


@pytest.mark.parametrize(("time", "is_whole"), [(1, False), (2, False), (3, True)])
def test_a_run_stops_during_validation(
    ranks: Pools, corpus: DataConfig, tmp_path: Path, time: int, is_whole: bool
) -> None:
    run = stopped(ranks, 2, saving_config(corpus), tmp_path, at="evaluate", time=time)
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert ("validation_loss" in rows[-1]) == is_whole
    assert [checkpoint.step for checkpoint in list_checkpoints(run.path / "checkpoints")] == [3]


def test_a_stopped_evaluation_has_no_figures(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    config = saving_config(corpus)
    train = replace(config.train, steps=1, eval_samples=1)
    source = trained(ranks, 1, replace(config, train=train), tmp_path, "bbbbbb")
    train = replace(train, evaluate_only=True, checkpoint=CheckpointConfig(resume_from=str(source.path)))
    run = stopped(ranks, 1, replace(config, train=train), tmp_path, at="evaluate", time=1)
    assert run.read_metrics() == []
    assert run.read_summary() is None
