"""The prediction in a process of its own: what comes back, and what is said when nothing does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError, RunError
from engine.config.settings import AttentionConfig, ModelConfig, RunConfig, TrainConfig
from engine.memory.predict_apart import PredictedMemory, predict_apart
from engine.planning.methods.topology import Topology

HERE = Path(__file__).parent
WORLD = Topology(2, 3)


@pytest.fixture(autouse=True)
def fake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def ask(seed: int, timeout_s: float = 60.0) -> PredictedMemory:
    return predict_apart(RunConfig(seed=seed), WORLD, module="fake_predict_target", timeout_s=timeout_s)


def test_prediction_comes_back_whole() -> None:
    found = ask(0)
    assert (found.device_peak_bytes, found.needed_bytes, found.phase) == (6, 9, "loss")
    assert found.to_dict()["components"] == {"device": {"loss": 7}, "host": {}}


def test_configuration_that_cannot_run_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="attention=single is wrong"):
        ask(1)


def test_failed_process_is_named_by_its_last_words() -> None:
    with pytest.raises(RunError, match=r"exit code 3; its last words: the last word\."):
        ask(2)


def test_silent_process_is_stopped() -> None:
    with pytest.raises(RunError, match="did not end within"):
        ask(3, timeout_s=0.5)


@pytest.mark.thorough
def test_real_prediction_grows_with_the_sequence() -> None:
    def peak(seq_len: int) -> int:
        config = RunConfig(
            model=ModelConfig(
                hidden_size=64, ffn_hidden_size=128, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32
            ),
            attention=AttentionConfig(preset="ring"),
            train=TrainConfig(seq_len=seq_len, compute_dtype="float32"),
            cluster=ClusterConfig(backend="gloo", ranks_per_node=2),
        )
        found = predict_apart(config, Topology(1, 2))
        assert sum(found.components["device"].values()) == found.device_peak_bytes
        return found.device_peak_bytes

    assert peak(8192) > 1.5 * peak(2048)
