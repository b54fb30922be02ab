"""A run of fake ranks on this machine, led by a process of its own, as `burst launch` would lead it.

python living_run.py RUNS_DIR MODE [--detached]: creates the run and leads it to its end; nothing is shown.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from cluster.control.controller import Manner, control
from cluster.control.outcome import LaunchTiming, SilentObserver, StopRequests
from cluster.launch.runner import open_links
from cluster.plan import LaunchPlan
from engine.config.cluster import ClusterConfig
from engine.config.settings import RunConfig, TrainConfig
from engine.runs.folder import RunFolder, create_run, list_runs, new_run_path
from testkit import PYTHON_PATH
from testkit.fake_plan import fake_plan
from testkit.link_rig import swept
from testkit.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 200.0
TIMING = LaunchTiming(poll_s=0.05, stop_grace_s=2.0, failure_grace_s=1.0)


class LivingRun:
    """One such run; `kill` ends its controller without a word, `clear` whatever is left."""

    def __init__(self, runs_dir: Path, mode: str = "wait", *flags: str) -> None:
        before = set(list_runs(runs_dir))
        environment = {**os.environ, "FAKE_MODE": mode, "PYTHONPATH": PYTHON_PATH}
        command = [sys.executable, __file__, str(runs_dir), mode, *flags]
        self.controller = subprocess.Popen(command, env=environment, start_new_session=True)
        wait_for(lambda: bool(set(list_runs(runs_dir)) - before), "the run folder")
        (self.run,) = set(list_runs(runs_dir)) - before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def wait_steps(self, count: int = 5) -> None:
        """Returns once so many steps are recorded."""
        wait_for(lambda: len(self.run.read_metrics()) >= count, f"{count} steps")

    def kill(self) -> None:
        """SIGKILL for the controller; its ranks go on until their lease ends."""
        self.controller.kill()
        self.controller.wait()

    def clear(self) -> None:
        """Nothing of the run is left."""
        if self.controller.poll() is None:
            self.controller.send_signal(signal.SIGINT)
            try:
                self.controller.wait(WAIT_S / 2)
            except subprocess.TimeoutExpired:
                self.kill()
        for link in open_links(_plan(self.run.path), self.run):
            link.stop("test", 0.0)
            swept(link)
            link.close()


def _plan(path: Path) -> LaunchPlan:
    config = RunConfig(train=TrainConfig(steps=5, seq_len=64), cluster=ClusterConfig(ranks_per_node=2))
    return fake_plan(path, config)


def main() -> int:
    path = new_run_path(Path(sys.argv[1]), "tiny")
    plan = _plan(path)
    stop = StopRequests()
    with stop.listening():
        run: RunFolder = create_run(path, dict(plan.files), world_size=plan.world_size)
        manner = Manner(detached="--detached" in sys.argv[3:], timing=TIMING)
        return control(plan, run, open_links(plan, run), SilentObserver(), stop, manner).exit_code


if __name__ == "__main__":
    sys.exit(main())
