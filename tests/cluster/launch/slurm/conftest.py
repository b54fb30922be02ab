"""Launches on a Slurm of this machine, and Slurm's commands as scripts."""

from __future__ import annotations

import pytest
from slurm_rig import SlurmBench
from testkit import write_program
from testkit.waiting import wait_for

from cluster.launch.slurm.job import SlurmJob
from engine.runs.folder import RunFolder


@pytest.fixture
def bench(slurm_testbed, tmp_path, monkeypatch):
    """Launches on the shared testbed, which is idle again afterwards."""
    bench = SlurmBench(slurm_testbed, tmp_path)
    monkeypatch.setenv("SLURM_CONF", bench.environment["SLURM_CONF"])
    yield bench
    for job in bench.client("squeue", "-h", "-o", "%A").split():
        bench.client("scancel", job)
    wait_for(lambda: set(bench.client("sinfo", "-h", "-o", "%T").split()) == {"idle"})


@pytest.fixture
def fake(tmp_path):
    """Puts a shell script in the place of a command of Slurm; an environment in which it is found. `bin/asked`: how."""

    def lay(name: str, script: str) -> dict[str, str]:
        noting = f'echo "${{0##*/}} $*" >>{tmp_path}/bin/asked\n{script}'
        return {"PATH": f"{write_program(tmp_path / 'bin' / name, noting).parent}:/usr/bin:/bin"}

    return lay


@pytest.fixture
def job(fake, tmp_path):
    """A job numbered 5 whose scontrol is a script; of a run of its own, with more in its environment."""

    def make(
        script: str = "", token: str = "abc", job_id: str | None = "5", number: int = 3, **environment: str
    ) -> SlurmJob:
        run = RunFolder(tmp_path / f"20260131-120000-abc12{number}")
        run.path.mkdir()
        (run.path / "run.json").write_text("{}")
        return SlurmJob(run, token, job_id, environment={**fake("scontrol", script), **environment}, poll_s=0.05)

    return make
