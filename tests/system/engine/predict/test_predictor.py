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
from engine.planning.methods.presets import AttentionMethod
from engine.planning.topology import Topology
from engine.predict.memory import MemoryPrediction, Predictor

HERE = Path(__file__).parent
WORLD, METHOD = Topology(2, 3), AttentionMethod()


@pytest.fixture
def predictor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Predictor]:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("ENDED_BEFORE", str(tmp_path / "ended"))
    predictor = Predictor("fake_predict_server", timeout_s=60.0)
    yield predictor
    predictor.close()


def run_of(seq_len: int) -> RunConfig:
    return RunConfig(train=TrainConfig(seq_len=seq_len))


def test_a_prediction_round_trips(predictor: Predictor) -> None:
    found = predictor.predict(run_of(8), METHOD, WORLD)
    assert isinstance(found, MemoryPrediction)
    assert found.world_size == 6
    assert found.needed_bytes == found.device_peak_bytes + 5
    assert (Path(found.phase) / "engine/training/fake_run/memory.py").is_file()  # code that is not installed is found
    assert found.to_dict()["components"] == {"device": {"loss": 7}, "host": {}}


def test_equal_questions_are_predicted_once(predictor: Predictor) -> None:
    base = run_of(8)
    alike = [
        base,
        replace(base, seed=7, exp="other", data=DataConfig(echo_tokens=5)),
        replace(base, train=replace(base.train, steps=7), optimizer=OptimizerConfig(learning_rate=1.0)),
        replace(base, memory=replace(base.memory, device_bytes=9, host_bytes=9)),
    ]
    unlike = [
        replace(base, optimizer=OptimizerConfig(max_grad_norm=None)),
        replace(base, memory=replace(base.memory, tile_tokens=4)),
        replace(base, cluster=ClusterConfig(backend="gloo")),
        run_of(9),
    ]
    striped = replace(METHOD, layout="striped")
    first = predictor.predict(base, METHOD, WORLD)
    assert {predictor.predict(config, METHOD, WORLD).rank for config in alike} == {first.rank} == {1}
    found = [
        *(predictor.predict(config, METHOD, WORLD) for config in unlike),
        predictor.predict(base, METHOD, Topology(1, 6)),
    ]
    found.append(predictor.predict(base, striped, WORLD))
    assert [one.rank for one in found] == [2, 3, 4, 5, 6, 7]
    assert {one.device_peak_bytes for one in found} == {first.device_peak_bytes}  # of one process


def test_a_configuration_that_cannot_run_is_an_error(predictor: Predictor) -> None:
    with pytest.raises(ConfigError, match="attention=single is wrong"):
        predictor.predict(run_of(1), METHOD, WORLD)


def test_a_failed_process_is_replaced(predictor: Predictor) -> None:
    """Also one that ends just when it gets a request."""
    with pytest.raises(RunError, match=r"exit code 3: the last word\."):
        predictor.predict(run_of(2), METHOD, WORLD)
    assert predictor.predict(run_of(4), METHOD, WORLD).rank == 1


@pytest.mark.usefixtures("predictor")  # which makes the fake server importable
def test_a_silent_process_is_an_error() -> None:
    hasty = Predictor("fake_predict_server", timeout_s=0.5)
    with pytest.raises(RunError, match="did not end within"):
        hasty.predict(run_of(3), METHOD, WORLD)
