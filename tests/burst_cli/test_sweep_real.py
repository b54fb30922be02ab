"""A sweep of the demo model, killed once: lengths x methods, and a rank that runs out of memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from testkit.waiting import wait_for

from engine.runs import RunFolder, list_runs

pytestmark = [pytest.mark.thorough, pytest.mark.alone, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parent.parent.parent
LENGTHS = (128, 256)
METHODS = ("burst", "loongtrain")
WORDS = (
    "exp=tiny",
    "train.steps=3",
    "train.eval_samples=1",
    "train.warmup_metric_steps=1",
    "optimizer.warmup_steps=0",
    "data=text",
    "data.tokenizer=bytes",
    "data.validation_fraction=0.2",
    "model.num_layers=1",
    "cluster.ranks_per_node=2",
    "cluster.threads_per_rank=1",
    "train.peak_flops_per_device=1e11",  # else every rank measures it for a second
    f"attention={','.join(METHODS)}",
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "corpus.txt").write_text("to be or not to be that is the question\n" * 2000)
    return {
        **os.environ,
        "BURST_RUNS_DIR": str(tmp_path / "runs"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "COLUMNS": "200",
    }


def command(tmp_path: Path) -> list[str]:
    data, grid = f"data.paths=[{tmp_path / 'corpus.txt'}]", f"train.seq_len={','.join(map(str, LENGTHS))}"
    return [sys.executable, "-m", "burst_cli", "sweep", *WORDS, grid, data]


def test_sweep_killed_at_work_runs_each_cell_exactly_once(tmp_path: Path, environment: dict[str, str]) -> None:
    begun, runs_dir, count = command(tmp_path), tmp_path / "runs", len(LENGTHS) * len(METHODS)
    # Of the first cell a rank runs out of memory: what a fault in this environment makes it do.
    fault = {"BURST_FAULT": "oom_device;1;2"}
    process = subprocess.Popen(begun, cwd=ROOT, env={**environment, **fault}, stderr=subprocess.DEVNULL)
    wait_for(lambda: process.poll() is not None or _ended(runs_dir), "the end of a cell")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    done = subprocess.run([*begun, "--json"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = json.loads(done.stdout)["cells"]
    states = [cell["state"] for cell in cells]
    assert states == ["oom"] + ["completed"] * (count - 1)
    paths = [cell["run_path"] for cell in cells]
    assert len(set(paths)) == count == len(list_runs(runs_dir))
    for path in paths[1:]:
        run = RunFolder(Path(path))
        assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
        assert [move["state"] for move in run.read_state()["history"]].count("completed") == 1
    wait_for(lambda: not _strays(runs_dir), "the launch of the killed sweep, which ends a moment after its run")
    _report_has_every_cell(tmp_path, environment, json.loads(done.stdout)["sweep_id"])


def _report_has_every_cell(tmp_path: Path, environment: dict[str, str], sweep_id: str) -> None:
    target = tmp_path / "report.html"
    words = ["report", "--sweep", sweep_id, "--format", "html", "--output", str(target)]
    made = [sys.executable, "-m", "burst_cli", *words]
    subprocess.run(made, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=200)
    text = target.read_text()
    assert "<svg" in text
    assert "oom" in text.lower()
    for method in METHODS:
        assert method in text


def _ended(runs_dir: Path) -> bool:
    """Whether a cell has ended."""
    return any(run.read_state()["state"] in ("completed", "oom") for run in list_runs(runs_dir))


def _strays(runs_dir: Path) -> list[int]:
    """Processes of this sweep's runs."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(runs_dir) in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
