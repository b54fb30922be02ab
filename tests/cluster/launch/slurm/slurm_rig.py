"""What tests of launches through Slurm share: runs of fake ranks as real jobs of a testbed's Slurm, led for real."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from testkit import FAKE_PYTHON_PATH
from testkit.supervise_rig import is_gone
from testkit.waiting import wait_for

from cluster.control.attempt import begin_attempt
from cluster.launch.local import probe_local_node
from cluster.launch.slurm.client import CONF_VARIABLE, client_environment
from cluster.launch.slurm.job import SlurmJob
from cluster.launch.slurm.plan import build_slurm_plan
from cluster.plan import LaunchPlan
from cluster.testbed.slurm import controller_answers
from cluster.testbed.testbed import Node, Testbed
from engine.config.cluster import ClusterConfig
from engine.config.settings import CheckpointConfig, DataConfig, RunConfig, TrainConfig
from engine.runs.folder import RunFolder, create_run, new_run_path


def job_id(run: RunFolder) -> str:
    """Of the job that it was given."""
    return str(run.read_state()["job"])


@dataclass(frozen=True)
class SlurmBench:
    """Launches through the Slurm of `testbed`."""

    testbed: Testbed
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """With which Slurm's clients find it."""
        return {**client_environment(os.environ), CONF_VARIABLE: str(self.testbed.slurm_conf)}

    def client(self, *argv: str) -> str:
        """What a command of Slurm printed."""
        return subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=200, check=True
        ).stdout.strip()

    def plan(
        self, mode: str, nodes: int = 2, checkpoint: CheckpointConfig | None = None, **cluster: object
    ) -> LaunchPlan:
        """A run of fake ranks with one rank per node."""
        settings = ClusterConfig(
            launcher="slurm",
            num_nodes=nodes,
            ranks_per_node=1,
            backend="gloo",
            environment=(f"FAKE_MODE={mode}",),
            **cluster,  # type: ignore[arg-type]
        )
        config = RunConfig(
            data=DataConfig(format="text", paths=("/dev/null",)),
            train=TrainConfig(steps=5, seq_len=64, checkpoint=checkpoint or CheckpointConfig()),
            cluster=settings,
        )
        facts = replace(probe_local_node(), python_path=FAKE_PYTHON_PATH)
        path = new_run_path(self.folder / "runs", "tiny")
        return build_slurm_plan(config, facts, path, module="fake_rank", environment={})

    def leave_in_queue(self, plan: LaunchPlan) -> RunFolder:
        """The run of `plan`, whose launcher was killed as soon as the job was submitted."""
        run = create_run(Path(plan.run_path), dict(plan.files), world_size=plan.world_size)
        begin_attempt(plan, run, None)
        SlurmJob(run, environment=self.environment).begin(start=True)
        return run

    def lose(self, node: Node) -> None:
        """Power off: everything of Slurm and of its jobs on this node is gone at once."""
        space = node.namespace.stat().st_ino
        lost: list[psutil.Process] = []
        while found := [process for process in psutil.process_iter() if _is_slurms(process, space, lost)]:
            for process in found:  # until nobody is left who could start another one
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()  # none of them may see another one die
            lost += found
        for process in lost:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def kill_controller(self) -> None:
        """The controller is gone, and with the last of its threads the socket that listens."""
        controller = psutil.Process(int((self.testbed.slurm_conf.parent / "slurmctld.pid").read_text()))
        controller.kill()
        wait_for(lambda: is_gone(controller.pid) and not controller_answers(self.testbed))


def _is_slurms(process: psutil.Process, space: int, known: Sequence[psutil.Process]) -> bool:
    """Whether it is a daemon or a job of Slurm in the network namespace `space`, not among `known`."""
    folder = Path(f"/proc/{process.pid}")
    with contextlib.suppress(OSError, psutil.Error):
        if process in known or (folder / "ns" / "net").stat().st_ino != space:
            return False
        return process.name().startswith("slurm") or b"\0SLURM_JOB_ID=" in (folder / "environ").read_bytes()
    return False
