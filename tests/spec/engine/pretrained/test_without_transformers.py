"""A launcher without transformers: what works there, and what is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from testkit import PYTHON_PATH

WHOLE: dict[str, Any] = {
    "model_type": "mine",
    **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "tie_word_embeddings": False},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(WHOLE))
    return tmp_path


def burst_without_transformers(*words: str) -> subprocess.CompletedProcess[str]:
    """The command line in a Python that has no transformers."""
    code = (
        "import sys; sys.modules['transformers'] = None; from burst_cli.app import main; "
        f"sys.exit(main({list(words)!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


def test_a_config_that_leaves_nothing_out_is_read(folder: Path) -> None:
    done = burst_without_transformers("config", "exp=tiny", "--from", str(folder), "data.tokenizer=bytes", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["config"]["model"]["implementation"] == "hf"


def test_a_config_that_leaves_something_out_is_refused_by_key(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({key: WHOLE[key] for key in WHOLE if key != "head_dim"}))
    done = burst_without_transformers("config", "exp=tiny", "--from", str(folder))
    assert done.returncode == 2
    assert "head_dim: not stated" in done.stderr


def test_ranks_on_this_machine_are_refused(folder: Path) -> None:
    done = burst_without_transformers("launch", "exp=tiny", "--from", str(folder), "data.tokenizer=bytes", "--dry-run")
    assert done.returncode == 2
    assert "model.implementation=hf runs transformers' own code, which is not installed" in done.stderr


def test_time_is_predicted_without_memory(folder: Path) -> None:
    words = ("--from", str(folder), "data.tokenizer=bytes", "memory=full", "--device", "h100", "--ranks", "4")
    done = burst_without_transformers("plan", "exp=small", *words)
    assert "is predicted with transformers, which is not installed here" in done.stdout + done.stderr
    assert "step " in done.stdout
