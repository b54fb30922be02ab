"""The demo as a user runs it: four local ranks learn real text through BurstAttention, then a report shows the run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burst_cli.app import main
from burst_cli.compose import compose
from engine.data.prepare import PreparedData, prepare
from engine.runs.folder import create_run, list_runs

ROOT = Path(__file__).parent.parent
END_S = 900.0  # two minutes on two idle cores
README = (ROOT / "README.md").read_text()
pytestmark = pytest.mark.timeout(END_S)


def commands() -> list[list[str]]:
    """The words after `burst` of what `make demo` runs."""
    words = ["make", "-n", "--no-print-directory", "demo", "PY=python"]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    return [shlex.split(line.removeprefix("python -m burst_cli ")) for line in listed.stdout.splitlines()]


def test_make_demo_runs_what_the_readme_shows() -> None:
    assert commands() == [shlex.split(line) for line in re.findall(r"^\$ burst (.*)$", README, re.MULTILINE)][:3]


def test_what_make_demo_runs_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small text, the training only planned."""
    monkeypatch.setenv("BURST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("BURST_RUNS_DIR", str(tmp_path / "runs"))
    (tmp_path / "text").write_text("to be or not to be that is the question\n" * 500)
    create_run(tmp_path / "runs/tiny/20260101-000000-abcdef", {})
    text = ("data=text", f"data.paths=[{tmp_path / 'text'}]", "data.tokenizer=bytes", "data.validation_fraction=0.2")
    less = {"data": text, "launch": ("--dry-run", "--skip-checks"), "report": ()}
    assert [main([*words, *less[words[0]]]) for words in commands()] == [0, 0, 0]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Summary of the run of `make demo`, and what was printed."""
    folder = tmp_path_factory.mktemp("demo")
    places = {"BURST_RUNS_DIR": str(folder / "runs"), "BURST_CACHE_DIR": str(folder / "cache")}
    environment = {**os.environ, **places, "PYTHONPATH": str(ROOT)}
    command = ["make", "demo", f"PY={sys.executable}"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=END_S)
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = list_runs(folder / "runs")
    summary = run.read_summary()
    assert summary is not None
    return {**summary, **places, "run_id": run.run_id, "printed": done.stdout}


def unigram_bits_per_byte(prepared: PreparedData) -> float:
    """Bits per byte of the validation text under a model that knows only how frequent each byte is in training."""
    train, validation = (
        np.bincount(shards.read(0, shards.token_count), minlength=256)[: shards.manifest.eod_id]
        for shards in (prepared.train, prepared.validation)
    )
    probability = (train + 1) / (train + 1).sum()
    return float(-(validation * np.log2(probability)).sum() / validation.sum())


@pytest.mark.thorough
def test_validation_falls_well_below_a_byte_unigram(demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURST_CACHE_DIR", demo["BURST_CACHE_DIR"])
    baseline = unigram_bits_per_byte(prepare(compose(["exp=tiny", "data.tokenizer=bytes"], []).config.data))
    assert baseline > 4  # bytes of Python source have about 4.6 bits each without context
    assert demo["final_validation_bits_per_byte"] < 0.75 * baseline


@pytest.mark.thorough
def test_the_demo_runs_burst_attention_on_four_ranks(demo: dict[str, Any]) -> None:
    assert (demo["status"], demo["attention_preset"], demo["world_size"]) == ("completed", "burst", 4)
    assert demo["comm_intra_bytes"] > 0


@pytest.mark.thorough
def test_the_report_shows_the_demo(demo: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "tiny", "--latest", "--json", "--runs-dir", demo["BURST_RUNS_DIR"]]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["run_id"] == demo["run_id"]
    assert demo["run_id"] in demo["printed"]
    assert run["tokens_per_s_per_device"] == demo["tokens_per_s_per_device"]
