"""The controller of a detached run: `python -m burst_cli.launch.follow RUN start|take-over` (RUN/controller.log)."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from burst_cli.figures import clean
from burst_cli.launch.detach import START
from burst_cli.launch.launching import conclude
from burst_cli.launch.next_attempt import lead_attempts
from cluster.control.controller import Manner, control
from cluster.control.link import NodeStatus
from cluster.control.outcome import LaunchObserver, StopRequests
from cluster.launch.runner import open_links
from cluster.plan_record import read_launch_plan
from engine.config.errors import BurstError
from engine.runs.folder import open_run
from engine.runs.records import utc_now


class LogObserver(LaunchObserver):
    """Leaves a line for everything that a person may want to know afterwards; figures are in metrics.jsonl."""

    def __init__(self) -> None:
        self._phases: dict[str, str] = {}

    def nodes(self, statuses: Sequence[NodeStatus]) -> None:
        """A line per node that entered another phase, or cannot be heard."""
        for status in statuses:
            now = f"{status.phase}{f', {clean(status.problem)}' if status.problem else ''}"
            if self._phases.get(status.node) != now:
                self._phases[status.node] = now
                say(f"{status.node}: {now}")

    def stopping(self, cause: str, grace_s: float) -> None:
        """One line."""
        say(f"{clean(cause)}: stopping the ranks, killing what is left after {grace_s:g} s")

    def note(self, text: str) -> None:
        """One line."""
        say(clean(text))


def say(text: str) -> None:
    """One line with the time."""
    print(f"{utc_now()} {text}", flush=True)


def main(run_path: str, way: str) -> int:
    """The exit code of the run; an error that a person can mend is one line."""
    stop = StopRequests()
    begin = time.monotonic()
    with stop.listening():
        try:
            run = open_run(Path(run_path))
            plan = read_launch_plan(run.path)
            observer = LogObserver()
            outcome = lead_attempts(
                plan,
                run,
                (observer, stop),
                lambda plan, manner: control(plan, run, open_links(plan, run), observer, stop, manner),
                Manner(start=way == START, detached=True),
            )
        except BurstError as error:
            say(f"error: {clean(str(error))}")
            return error.exit_code
        conclude(run, outcome, time.monotonic() - begin, as_json=False)
        return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
