"""Real training through `burst launch ... cluster.launcher=slurm`: ranks in jobs compute what ranks here compute."""

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
from engine.runs.folder import RunFolder

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

_ON_TWO_NODES = ("cluster.launcher=slurm", "cluster.num_nodes=2", "cluster.slurm.gpus_per_node=0")


def words(folder: Path, name: str, *settings: str) -> tuple[str, ...]:
    """The command line of a launch whose run lies in folder `name`."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        corpus.write_text("it was the best of times, it was the worst of times\n" * 400)
    data = (f"data.paths=[{corpus}]", f"data.prepared_dir={folder / 'prepared'}")
    where = ("--plain", "--runs-dir", str(folder / name))
    return (sys.executable, "-m", "burst_cli", "launch", *SMALL, *data, *settings, *where)


def launch(folder: Path, name: str, *settings: str, **environment: str) -> RunFolder:
    """The run of a launch that completed."""
    command = words(folder, name, "train.steps=4", *settings)
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr + done.stdout
    return run_in(folder / name)


def run_in(folder: Path) -> RunFolder:
    (path,) = (folder / "tiny").glob("2*")
    return RunFolder(path)


def test_a_job_on_two_nodes_computes_the_losses_of_two_ranks_on_this_machine(slurm_testbed, tmp_path):
    conf = str(slurm_testbed.slurm_conf)
    far = launch(tmp_path, "far", *_ON_TWO_NODES, SLURM_CONF=conf)
    here = launch(tmp_path, "here", "cluster.ranks_per_node=2")

    losses = [row["loss"] for row in far.read_metrics()]
    assert len(losses) == 4
    # The same tiles in the same order: only the order of two summands in a reduction may differ.
    assert losses == pytest.approx([row["loss"] for row in here.read_metrics()], abs=1e-5)
    assert far.read_state()["nodes"] == list(slurm_testbed.node_names[:2])


def test_near_its_time_limit_a_job_without_a_launcher_saves_and_goes_on_as_a_new_job(slurm_testbed, tmp_path):
    environment = {**os.environ, "SLURM_CONF": str(slurm_testbed.slurm_conf)}
    saving = ("train.steps=40", "train.checkpoint.every_steps=20", "cluster.max_restarts=1")
    slow = 'cluster.environment=["BURST_FAULT=slow:1;1;4"]'
    command = [*words(tmp_path, "run", *_ON_TWO_NODES, *saving, slow), "--detach"]
    subprocess.run(command, env=environment, check=True, timeout=570)
    run = run_in(tmp_path / "run")
    wait_for(lambda: any(row["step"] == 4 for row in run.read_metrics()), timeout_s=300)
    controller = find_controller(run)
    assert controller is not None
    os.kill(controller.pid or 0, signal.SIGKILL)
    job = str(run.read_state()["job"])
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], env=environment, check=True)
    wait_for(lambda: run.read_state()["attempt"] == 2, timeout_s=300)
    wait_for(lambda: [event for event in run.read_events() if event["kind"] == "restored"], timeout_s=300)

    assert run.read_state()["job"] not in (None, job)
