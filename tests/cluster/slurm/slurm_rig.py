"""What tests of launches through Slurm share: runs of fake ranks as real jobs of a testbed's Slurm, led for real."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from testkit import FAKE_PYTHON_PATH
from testkit.fake_run import Observer
from testkit.waiting import wait_for

from cluster.control.attempt import begin_attempt
from cluster.control.controller import Manner, control
from cluster.control.outcome import LaunchOutcome, LaunchTiming, StopRequests
from cluster.facts import probe_local_node
from cluster.launch.runner import open_links
from cluster.plan import LaunchPlan
from cluster.slurm.client import CONF_VARIABLE, client_environment
from cluster.slurm.plan import build_slurm_plan
from cluster.slurm.submit import submit_job
from cluster.testbed.build import Testbed
from cluster.testbed.node import Node
from engine.config.cluster import ClusterConfig
from engine.config.settings import CheckpointConfig, DataConfig, RunConfig, TrainConfig
from engine.runs.folder import RunFolder, create_run, new_run_path


@dataclass
class Led:
    """A run that is being led in a thread of this process."""

    plan: LaunchPlan
    run: RunFolder
    observer: Observer
    stop: StopRequests
    outcome: LaunchOutcome | None = None
    error: BaseException | None = None
    thread: threading.Thread | None = None

    def wait(self, timeout_s: float = 200.0) -> LaunchOutcome:
        """Its outcome."""
        assert self.thread is not None
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), self.describe()
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        return self.outcome

    def wait_for_step(self, step: int = 3) -> None:
        """Return once rank 0 is that far, which waits for nobody, and every other rank has begun to work."""
        wait_for(lambda: len(self.run.read_metrics()) >= step and self._has_begun(), self.describe)

    def _has_begun(self) -> bool:
        logs = self.run.path.glob("logs/*/rank*.log")
        return len([log for log in logs if " in mode " in log.read_text()]) == self.plan.world_size

    def describe(self) -> str:
        """What is known, for a test that waits in vain."""
        logs = [path.read_text(errors="replace")[-2000:] for path in self.run.path.glob("slurm-*.log")]
        return "\n".join([*self.observer.notes, str(self.observer.stops), str(self.observer.statuses), *logs])

    @property
    def job_id(self) -> str:
        """Of the job that it was given."""
        return str(json.loads((self.run.path / "slurm.json").read_text())["job_id"])


@dataclass(frozen=True)
class SlurmBench:
    """Launches through the Slurm of `testbed`."""

    testbed: Testbed
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """With which Slurm's clients find it."""
        return {**client_environment(os.environ), CONF_VARIABLE: str(self.testbed.folder.slurm_conf)}

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

    def lead(
        self,
        plan: LaunchPlan,
        *,
        start: bool = True,
        folder: RunFolder | None = None,
        timing: LaunchTiming | None = None,
    ) -> Led:
        """Begin to lead the run of `plan` in a thread; folder: one that is there already."""
        run = folder or create_run(Path(plan.run_path), dict(plan.files), world_size=plan.world_size)
        led = Led(plan, run, Observer(), StopRequests())

        def work() -> None:
            try:
                manner = Manner(start=start, timing=timing or LaunchTiming(stop_grace_s=3.0))
                led.outcome = control(plan, run, open_links(plan, run), led.observer, led.stop, manner)
            except BaseException as error:
                led.error = error

        led.thread = threading.Thread(target=work, daemon=True)
        led.thread.start()
        return led

    def leave_in_queue(self, plan: LaunchPlan) -> RunFolder:
        """The run of `plan`, whose launcher was killed as soon as the job was submitted."""
        run = create_run(Path(plan.run_path), dict(plan.files), world_size=plan.world_size)
        begin_attempt(plan, run, None)
        submit_job(run, plan.config.cluster.slurm, self.environment)
        return run

    def on_node(self, node: Node, *argv: str, make: Path | None = None) -> None:
        """Run a command on a node; make: a folder that must be there before."""
        if make is not None:
            make.mkdir(parents=True, exist_ok=True)
        subprocess.run(node.inside(*argv), check=True, timeout=200)

    def lose(self, node: Node) -> None:
        """Power off: everything of Slurm and of its jobs on this node is gone at once."""
        space = Path(f"/proc/{node.holder()}/ns/net").stat().st_ino
        lost: list[psutil.Process] = []
        while found := [process for process in psutil.process_iter() if _is_slurms(process, space, lost)]:
            for process in found:  # until nobody is left who could start another one
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()  # none of them may see another one die
            lost += found
        for process in lost:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def mark_down(self, node: Node) -> None:
        """As an administrator does: Slurm ends what runs there, and takes the node back when its daemon next speaks."""
        self.client("scontrol", "update", f"NodeName={node.name}", "State=DOWN", "Reason=test")

    def processes(self, run: RunFolder) -> list[str]:
        """Live processes that bear the mark of `run`, on any node."""
        found = []
        mark = f"BURST_RUN_ID={run.run_id}".encode()
        for process in psutil.process_iter(["pid", "status"]):
            with contextlib.suppress(OSError, psutil.Error):
                environment = Path(f"/proc/{process.info['pid']}/environ").read_bytes().split(b"\0")
                if mark in environment and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.info['pid']} {' '.join(process.cmdline())}")
        return found

    def kill_controller(self) -> None:
        """The controller is gone, and with the last of its threads the socket that listens."""
        controller = psutil.Process(int((self.testbed.folder.slurm_conf.parent / "slurmctld.pid").read_text()))
        controller.kill()
        slurm = self.testbed.slurm
        assert slurm is not None
        wait_for(lambda: has_ended(controller) and not slurm.controller_answers())

    def wait_idle(self) -> None:
        """Return once Slurm has cleared all nodes."""
        wait_for(lambda: set(self.client("sinfo", "-h", "-o", "%T").split()) == {"idle"})


def has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or only its parent has yet to notice."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _is_slurms(process: psutil.Process, space: int, known: Sequence[psutil.Process]) -> bool:
    """Whether it is a daemon or a job of Slurm in the network namespace `space`, not among `known`."""
    folder = Path(f"/proc/{process.pid}")
    with contextlib.suppress(OSError, psutil.Error):
        if process in known or (folder / "ns" / "net").stat().st_ino != space:
            return False
        return process.name().startswith("slurm") or b"\0SLURM_JOB_ID=" in (folder / "environ").read_bytes()
    return False


@contextlib.contextmanager
def slurm_environment(bench: SlurmBench) -> Iterator[None]:
    """SLURM_CONF of this process names the bench's Slurm."""
    before = os.environ.get(CONF_VARIABLE)
    os.environ[CONF_VARIABLE] = bench.environment[CONF_VARIABLE]
    try:
        yield
    finally:
        os.environ.pop(CONF_VARIABLE)
        if before is not None:
            os.environ[CONF_VARIABLE] = before
