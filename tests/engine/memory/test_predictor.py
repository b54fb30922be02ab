"""The prediction in a process of its own: what comes back, how often it is asked, what is said when nothing comes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError, RunError
from engine.config.settings import DataConfig, OptimizerConfig, RunConfig, TrainConfig
from engine.planning.memory.predictor import MemoryPrediction, Predictor
from engine.planning.methods.topology import Topology

HERE = Path(__file__).parent
WORLD = Topology(2, 3)


@pytest.fixture
def predictor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Predictor]:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    predictor = Predictor("fake_predict_server", timeout_s=60.0)
    yield predictor
    predictor.close()


def run_of(seq_len: int) -> RunConfig:
    return RunConfig(train=TrainConfig(seq_len=seq_len))


def test_prediction_comes_back_whole(predictor: Predictor) -> None:
    found = predictor.predict(run_of(8), WORLD)
    assert isinstance(found, MemoryPrediction)
    assert (found.world_size, found.needed_bytes) == (6, found.device_peak_bytes + 5)
    assert (Path(found.phase) / "engine/memory/predict.py").is_file()  # code that is not installed is found
    assert found.to_dict()["components"] == {"device": {"loss": 7}, "host": {}}


def test_one_process_answers_all_and_the_same_is_asked_once(predictor: Predictor) -> None:
    first, again, other = (predictor.predict(run_of(length), WORLD) for length in (8, 8, 9))
    assert (first.rank, again.rank, other.rank) == (1, 1, 2)
    assert first.device_peak_bytes == other.device_peak_bytes


def test_what_takes_no_memory_makes_no_other_question(predictor: Predictor) -> None:
    base = run_of(8)
    alike = [
        replace(base, seed=7, exp="other", data=DataConfig(echo_tokens=5)),
        replace(base, train=replace(base.train, steps=7), optimizer=OptimizerConfig(learning_rate=1.0)),
        replace(base, memory=replace(base.memory, device_bytes=9, host_bytes=9)),
    ]
    assert {predictor.predict(config, WORLD).rank for config in (base, *alike)} == {1}
    unlike = [
        replace(base, optimizer=OptimizerConfig(max_grad_norm=None)),
        replace(base, memory=replace(base.memory, tile_tokens=4)),
        replace(base, cluster=ClusterConfig(backend="gloo")),
    ]
    assert [predictor.predict(config, WORLD).rank for config in unlike] == [2, 3, 4]
    assert predictor.predict(base, Topology(1, 6)).rank == 5


def test_configuration_that_cannot_run_is_a_configuration_error(predictor: Predictor) -> None:
    with pytest.raises(ConfigError, match="attention=single is wrong"):
        predictor.predict(run_of(1), WORLD)


def test_failed_process_is_named_by_its_last_words_and_started_anew(predictor: Predictor) -> None:
    with pytest.raises(RunError, match=r"exit code 3; its last words: the last word\."):
        predictor.predict(run_of(2), WORLD)
    assert predictor.predict(run_of(8), WORLD).rank == 1


def test_one_that_ends_just_when_it_is_asked_is_asked_again(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDED_BEFORE", str(tmp_path / "ended"))
    assert predictor.predict(run_of(4), WORLD).rank == 1


def test_silent_process_is_stopped(predictor: Predictor) -> None:
    hasty = Predictor("fake_predict_server", timeout_s=0.5)
    with pytest.raises(RunError, match="did not end within"):
        hasty.predict(run_of(3), WORLD)
