"""A sweep over lengths on two nodes whose launcher is killed twice: taken over by the same words, and reported."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from testkit import ROOT
from testkit.fault_rig import FaultRig
from testkit.testbed_fixture import Testbeds
from testkit.waiting import wait_for

from engine.runs.folder import RunFolder, list_runs

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(2400)]

LENGTHS = (128, 256, 512, 1024)
STEPS, WARMUP = 5, 3  # medians leave the first three out
END_S = 900.0


def test_sweep_of_a_killed_launcher_is_taken_over(testbeds: Testbeds, tmp_path: Path) -> None:
    rig = FaultRig(testbeds.make(nodes=2), testbeds.config_dir, tmp_path)
    settings = [word for word in rig.words(f"train.steps={STEPS}") if not word.startswith("train.seq_len=")]
    lengths = f"train.seq_len={','.join(map(str, LENGTHS))}"
    words = ("sweep", *settings, lengths, "cluster.ranks_per_node=2", "--parallel", "2")
    for ended in (1, 2):
        _killed_once(rig, words, ended)
    done = rig.burst(*words, "--json", timeout_s=END_S)
    assert done.returncode == 0, done.stderr
    sweep = json.loads(done.stdout)
    runs = [RunFolder(Path(cell["run_path"])) for cell in sweep["cells"]]
    assert [cell["state"] for cell in sweep["cells"]] == ["completed"] * len(LENGTHS)
    assert sorted(run.path for run in runs) == sorted(run.path for run in list_runs(rig.runs_dir))
    for run in runs:
        assert [row["step"] for row in run.read_metrics()] == list(range(1, STEPS + 1))
        assert [move["state"] for move in run.read_state()["history"]].count("completed") == 1
        rig.wait_until_gone(run.run_id)
    _report_agrees_with_the_metrics(rig, sweep["sweep_id"])


def _killed_once(rig: FaultRig, words: tuple[str, ...], ended: int) -> None:
    """The sweep, killed when so many cells have ended and two more have begun."""
    with rig.output.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "burst_cli", *words], cwd=ROOT, env=rig.environment, stdout=output, stderr=output
        )

    def is_in_the_middle() -> bool:
        assert process.poll() is None, rig.output.read_text()
        states = [run.read_state()["state"] for run in list_runs(rig.runs_dir)]
        return states.count("completed") >= ended and len(states) > ended + 1

    wait_for(is_in_the_middle, rig.output.read_text, END_S)
    process.send_signal(signal.SIGKILL)
    process.wait()
    states = [run.read_state()["state"] for run in list_runs(rig.runs_dir)]
    assert states.count("completed") < len(LENGTHS), "it was killed too late to show anything"


def _report_agrees_with_the_metrics(rig: FaultRig, sweep_id: str) -> None:
    document = _reported(rig, sweep_id)
    assert document["sweep"]["states"] == {"completed": len(LENGTHS)}
    found = {run["seq_len"]: run for run in document["runs"]}
    assert sorted(found) == sorted(LENGTHS)
    for run in found.values():
        rows = [json.loads(line) for line in (Path(run["path"]) / "metrics.jsonl").read_text().splitlines()]
        measured = [row["tokens_per_s"] for row in rows[WARMUP:]]
        assert run["tokens_per_s"] == pytest.approx(statistics.median(measured))
        assert run["tokens_per_s_n"] == len(measured)
        assert run["final_train_loss"] == rows[-1]["loss"]
        assert run["final_validation_loss"] == rows[-1]["validation_loss"]
        assert run["peak_memory_bytes"] == max(row["peak_memory_bytes"] for row in rows)
    shown = rig.burst("report", "--sweep", sweep_id).stdout
    assert all(f" {length} " in shown for length in LENGTHS), shown
    page = rig.folder / "report.html"
    assert rig.burst("report", "--sweep", sweep_id, "--output", str(page)).returncode == 0
    assert "data:image/svg+xml" in page.read_text()


def _reported(rig: FaultRig, sweep_id: str) -> dict[str, Any]:
    done = rig.burst("report", "--sweep", sweep_id, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document
