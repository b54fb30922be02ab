"""The controller of a detached run: `python -m burst_cli.launch.follow RUN start|take-over` (RUN/controller.log)."""

from __future__ import annotations

import sys
from pathlib import Path

from burst_cli import render
from burst_cli.launch.detach import START
from burst_cli.launch.launching import LaunchManner, lead_run
from cluster.control.attempt import StopRequests
from cluster.plan import read_launch_plan
from engine.config.errors import BurstError
from engine.runs.folder import open_run


def main(run_path: str, way: str) -> int:
    """The exit code of the run; an error that a person can mend is one line."""
    stop, console = StopRequests(), render.plain_stderr()
    with stop.listening():
        try:
            run = open_run(Path(run_path))
            plan = read_launch_plan(run.path)
            return lead_run(plan, run, stop, console, LaunchManner(detach=True), start=way == START)
        except BurstError as error:
            return render.fail(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
