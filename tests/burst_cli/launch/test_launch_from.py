"""`--from FOLDER`: model, weights, windows and tokenizer of a Hugging Face folder in one word."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testkit.saved_checkpoints import MODEL, hugging_face_folder

from engine.config.settings import RunConfig, config_from_dict

GEMMA = {
    "model_type": "gemma3_text",
    **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256},
    **{"sliding_window": 6, "sliding_window_pattern": 3, "query_pre_attn_scalar": 8},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hugging_face_folder(tmp_path / "my model")


def composed(done: Any) -> RunConfig:
    assert done.code == 0, done.err
    return config_from_dict(done.document["config"])


def test_a_folder_gives_model_weights_tokenizer(burst, folder: Path) -> None:
    config = composed(burst("config", "exp=tiny", "--from", str(folder), "--json"))
    assert config.model == replace(MODEL, name="my model", init_from=str(folder))
    assert config.data.tokenizer == str(folder)


def test_overrides_change_what_a_folder_gives(burst, folder: Path) -> None:
    words = ("model.init_from=null", "data.tokenizer=bytes", "model.vocab_size=256")
    config = composed(burst("config", "exp=tiny", "--from", str(folder), *words, "--json"))
    assert (config.model.init_from, config.data.tokenizer) == (None, "bytes")


@pytest.mark.thorough  # predicts memory
def test_a_launch_takes_a_folder(burst, folder: Path, tmp_path: Path) -> None:
    words = ("launch", "exp=tiny", "--from", str(folder), "model.init_from=null", "--dry-run", "--json")
    done = burst(*words, "--runs-dir", str(tmp_path / "runs"))
    assert done.code == 0, done.err
    assert done.document["files"]["config.yaml"].count(f"tokenizer: {folder}") == 1


@pytest.mark.parametrize("words", [("launch", "--yes"), ("plan",), ("sweep", "--dry-run"), ("config",)])
def test_a_folder_beside_another_model_is_refused(burst, folder: Path, words: tuple[str, ...]) -> None:
    done = burst(*words, "exp=tiny", "model=small", "--from", str(folder))
    assert done.code == 2
    assert f"--from {folder} and model=small both choose the model" in done.err


def test_an_evaluation_is_of_a_run_or_of_a_folder(burst, folder: Path) -> None:
    done = burst("eval", "tiny", "--from", str(folder))
    assert done.code == 2
    assert "both say what is evaluated" in done.err


def test_a_folder_without_a_model_is_refused(burst, tmp_path: Path) -> None:
    done = burst("launch", "exp=tiny", "--from", str(tmp_path))
    assert done.code == 2
    assert "config.json" in done.err


@pytest.mark.thorough  # transformers takes long to import
def test_another_family_runs_by_the_code_of_transformers(burst, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    done = burst("config", "exp=tiny", "--from", str(tmp_path), "data.tokenizer=bytes", "--json")
    config = composed(done)
    assert config.model.implementation == "hf"
    assert config.attention.mask_layers == ("window", "window", "causal"), "its layer_types are not stated in the file"
    assert "this engine has no decoder of model_type=gemma3_text" in done.err


@pytest.mark.thorough
def test_a_family_that_nobody_knows_is_refused(burst, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA, "model_type": "nonsense"}))
    done = burst("config", "exp=tiny", "--from", str(tmp_path))
    assert done.code == 2
    assert "cannot load it" in done.err
    assert "nonsense" in done.err


@pytest.mark.thorough
def test_own_families_run_by_either_implementation(burst, folder: Path) -> None:
    config = composed(burst("config", "exp=tiny", "--from", str(folder), "model.implementation=hf", "--json"))
    assert config.model.hf_config is not None
    assert config.model.hf_config["model_type"] == "qwen2"
