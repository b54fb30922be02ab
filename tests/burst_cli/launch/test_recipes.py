"""From 1K to 8K, as docs/recipes.md has it: the second half goes on from the weights of the first."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from burst_cli.compose import compose
from engine.runs.folder import list_runs

ROOT = Path(__file__).resolve().parents[3]
QUICK = ("train.steps=1", "train.eval_samples=1", "optimizer.warmup_steps=0")
TEXT = re.search(r"## From 1K to 8K on a laptop\n\n```sh\n(.*?)```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL)


def test_the_second_half_stretches_the_model_of_the_first_to_its_own_length() -> None:
    first, second = (compose([f"exp={name}"], []).config for name in ("toy_1k", "toy_8k"))
    stretch = second.model.rope_scaling
    assert replace(second.model, rope_scaling=first.model.rope_scaling, require_init_from=False) == first.model
    assert second.model.require_init_from
    assert stretch.original_seq_len == first.train.seq_len
    assert second.train.seq_len == stretch.factor * first.train.seq_len
    assert replace(second.data, echo_tokens=first.data.echo_tokens) == first.data
    assert [config.data.echo_tokens for config in (first, second)] == [512, 4096]  # half of a sequence


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_the_recipe_runs_as_it_is_written(tmp_path: Path) -> None:
    """Few steps and less text; all else as typed."""
    assert TEXT is not None
    less = {"launch": (*QUICK, "data.max_bytes=2000000"), "eval": ("train.eval_samples=1",), "checkpoint": ()}
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "BURST_RUNS_DIR": str(tmp_path / "runs"),
        "BURST_CACHE_DIR": str(tmp_path / "cache"),
    }
    for line in TEXT[1].splitlines():
        _, *words = shlex.split(line.replace("$PWD", str(tmp_path)), comments=True)
        command = [sys.executable, "-m", "burst_cli", *words, *less[words[0]]]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
    runs = {run.exp: run.read_summary() for run in list_runs(tmp_path / "runs")}
    assert {exp: (summary or {})["status"] for exp, summary in runs.items()} == dict.fromkeys(
        ("toy_1k", "toy_8k", "toy_8k-eval"), "completed"
    )
