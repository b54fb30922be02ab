"""Real training through `burst launch ... cluster.launcher=slurm`: ranks in jobs compute what ranks here compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from testkit.fault_rig import SMALL

from engine.runs.folder import RunFolder

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

_ON_TWO_NODES = ("cluster.launcher=slurm", "cluster.num_nodes=2", "cluster.ranks_per_node=1")


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
