"""The demo as a user runs it: four local ranks learn real text through BurstAttention, then a report shows the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from burst_cli.app import main
from burst_cli.compose import compose
from burst_cli.run_records import run_record
from engine.data import prepare, unigram_bits_per_byte
from engine.runs import list_runs

ROOT = Path(__file__).parent.parent
END_S = 900.0  # two minutes on two idle cores
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.alone,
    pytest.mark.timeout(END_S),
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Facts of the run that `make demo` leaves."""
    folder = tmp_path_factory.mktemp("demo")
    places = {"BURST_RUNS_DIR": str(folder / "runs"), "BURST_CACHE_DIR": str(folder / "cache"), "COLUMNS": "200"}
    command = ["make", "demo", f"PY={sys.executable}"]
    done = subprocess.run(command, env=os.environ | places, cwd=ROOT, capture_output=True, text=True, timeout=END_S)
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = list_runs(folder / "runs")
    assert run.run_id in done.stdout  # in the report at its end
    return {**run_record(run), "runs_dir": str(folder / "runs"), "cache": str(folder / "cache")}


def test_validation_falls_well_below_a_byte_unigram(demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURST_CACHE_DIR", demo["cache"])
    baseline = unigram_bits_per_byte(prepare(compose(["exp=tiny"], []).config.data))
    assert baseline > 4  # bytes of Python source have about 4.6 bits each without context
    assert demo["final_validation_bits_per_byte"] < 0.75 * baseline


def test_the_demo_runs_burst_attention_on_four_ranks(demo: dict[str, Any]) -> None:
    assert (demo["status"], demo["attention_preset"], demo["world_size"]) == ("completed", "burst", 4)
    assert demo["comm_intra_bytes"] > 0


def test_the_report_shows_the_demo(demo: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "tiny", "--latest", "--json", "--runs-dir", demo["runs_dir"]]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["run_id"] == demo["run_id"]
    assert run["tokens_per_s_per_device"] == demo["tokens_per_s_per_device"]
