"""`burst launch --detach`: the launcher returns, the run goes on, and other terminals look at it and stop it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from testkit import PYTHON_PATH
from testkit.process_table import kill_run, run_processes, wait_until_gone
from testkit.waiting import wait_for

from burst_cli.launch.detach import CONTROLLER_LOG
from cluster.control.attempt import find_controller
from cluster.control.controller import request_cancel, settle
from engine.runs.folder import RunFolder, list_runs
from engine.runs.process import process_start

DRIVER = Path(__file__).parent / "launch_driver.py"
END_S = 60.0
GONE_S = 10.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where runs are made; afterwards neither their processes nor their controllers may be left."""
    yield tmp_path
    runs = list_runs(tmp_path / "runs")
    left = [process for run in runs for process in wait_until_gone(run.run_id, GONE_S)]
    for run in runs:
        controller = find_controller(run)
        if controller is not None and controller.pid is not None:
            psutil.Process(controller.pid).kill()
            left.append(psutil.Process(controller.pid))
        kill_run(run.run_id)
    assert left == []


def detach(folder: Path, mode: str, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FAKE_MODE": mode, "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, str(DRIVER), str(folder / "runs"), "--detach", *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=END_S, check=False)


def the_run(folder: Path) -> RunFolder:
    (run,) = list_runs(folder / "runs")
    return run


def ended(run: RunFolder) -> str:
    """The state of a run once nobody leads it any more."""
    wait_for(lambda: find_controller(run) is None)
    return str(run.read_state()["state"])


def test_launcher_returns_once_the_ranks_run_which_outlive_it_and_can_still_be_stopped(folder: Path) -> None:
    done = detach(folder, "wait")
    run, controller = the_run(folder), find_controller(the_run(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"burst {verb} {run.run_id}" for verb in ("status", "logs", "cancel")]
    assert controller is not None
    assert done.stderr.splitlines()[-1] == f"it goes on in the background, led by process {controller.pid}"
    assert run.read_state()["lease_s"] is None
    assert controller.pid is not None
    wait_for(lambda: run.read_state()["state"] == "running")
    os.kill(controller.pid, signal.SIGKILL)
    assert ended(run) == "running"
    settled = settle(run)
    assert (settled.state, [status.phase for status in settled.nodes]) == ("running", ["running"])
    assert request_cancel(run, grace_s=0.5).state == "cancelled"
    assert run_processes(run.run_id) == []


def test_detached_run_comes_to_its_end_alone(folder: Path) -> None:
    document = json.loads(detach(folder, "gate", "--json").stdout)
    run = the_run(folder)
    assert (document["run_id"], document["detached"]) == (run.run_id, True)
    (run.path / "gate").touch()
    assert ended(run) == "completed"
    wait_for(lambda: process_start(document["controller_pid"]) is None)  # it says how it went once it leads no more
    log = (run.path / CONTROLLER_LOG).read_text()
    assert re.search(r"^20\S+Z starting the ranks$", log, re.MULTILINE)
    assert re.search(r"^20\S+Z step 5/5  loss 0\.8000 ", log, re.MULTILINE)
    assert "\ncompleted tiny/" in log
    assert "\x1b" not in log


def test_failure_of_the_start_is_shown_in_the_foreground(folder: Path) -> None:
    done = detach(folder, "ok", "--broken")
    run = the_run(folder)
    assert (done.returncode, done.stdout, run.read_state()["state"]) == (1, "", "failed")
    assert "FAILED" in done.stderr
    assert "/no/such/python" in done.stderr
