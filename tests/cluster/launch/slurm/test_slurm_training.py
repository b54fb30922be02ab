"""Real training in jobs of Slurm that goes on when its time is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from testkit.fault_rig import SMALL
from testkit.waiting import wait_for

from cluster.control.attempt import find_controller
from cluster.testbed.testbed import Testbed
from engine.runs.folder import RunFolder

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

JOB = ("cluster.launcher=slurm", "cluster.num_nodes=2", "cluster.slurm.gpus_per_node=0", "cluster.max_restarts=1")
SLOW = 'cluster.environment=["BURST_FAULT=slow:1;1;4"]'


def test_near_its_time_limit_a_job_without_a_launcher_saves_and_goes_on_as_a_new_job(
    slurm_testbed: Testbed, tmp_path: Path
) -> None:
    environment = {**os.environ, "SLURM_CONF": str(slurm_testbed.slurm_conf)}
    (tmp_path / "corpus.txt").write_text("it was the best of times, it was the worst of times\n" * 400)
    data = (f"data.paths=[{tmp_path}/corpus.txt]", f"data.prepared_dir={tmp_path}/prepared")
    words = (*SMALL, *JOB, *data, SLOW, "train.steps=40", "train.checkpoint.every_steps=20")
    command = [sys.executable, "-m", "burst_cli", "launch", *words, "--detach", "--runs-dir", str(tmp_path / "runs")]
    subprocess.run(command, env=environment, check=True, timeout=570)
    (run,) = map(RunFolder, tmp_path.glob("runs/tiny/2*"))
    wait_for(lambda: any(row["step"] == 4 for row in run.read_metrics()), timeout_s=300)
    controller = find_controller(run)
    assert controller is not None
    os.kill(controller.pid or 0, signal.SIGKILL)
    job = str(run.read_state()["job"])
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], env=environment, check=True)
    wait_for(lambda: run.read_state()["attempt"] == 2, timeout_s=300)
    wait_for(lambda: [event for event in run.read_events() if event["kind"] == "restored"], timeout_s=300)

    assert run.read_state()["job"] not in (None, job)
