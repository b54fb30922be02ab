"""A run of fake ranks on this machine, led by a process of its own, as `burst launch` would lead it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from engine.config.cluster import ClusterConfig
from engine.config.settings import RunConfig, TrainConfig
from engine.runs.folder import create_run, new_run_path
from testkit import KIT, PYTHON_PATH
from testkit.fake_plan import fake_plan
from testkit.process_table import kill_run
from testkit.waiting import wait_for


class LivingRun:
    """One such run; `kill` ends its controller without a word, `clear` whatever is left."""

    def __init__(self, runs_dir: Path, mode: str = "wait", *flags: str) -> None:
        path = new_run_path(runs_dir, "tiny")
        config = RunConfig(train=TrainConfig(steps=5, seq_len=64), cluster=ClusterConfig(ranks_per_node=2))
        plan = fake_plan(path, config)
        self.run = create_run(path, dict(plan.files), world_size=plan.world_size)
        environment = {**os.environ, "FAKE_MODE": mode, "PYTHONPATH": PYTHON_PATH}
        command = [sys.executable, str(KIT / "fake_run.py"), str(path), *flags]
        self.controller = subprocess.Popen(command, env=environment, start_new_session=True)

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
        self.kill()
        kill_run(self.run.run_id)
