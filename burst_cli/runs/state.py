"""The state of a run as seen from outside: run.json, who controls it, and, where nobody does, what its nodes say."""

from __future__ import annotations

import time
from dataclasses import replace

from cluster.control.attempt import RunState, find_controller, glance
from engine.config.errors import BurstError
from engine.runs.folder import RunFolder, RunFolderError

ASK_AGAIN_S = 10.0
STATE_STYLES = {
    "planned": "dim",
    "starting": "cyan",
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "oom": "red",
    "cancelled": "yellow",
    "lost": "bold magenta",
    "unreadable": "bold red",
}


def look_at(run: RunFolder) -> RunState:
    """The state of `run`; the nodes of one that nobody controls are asked, and it is judged if it has ended."""
    seen = glance(run)
    if not seen.is_lost:
        return seen
    if not (run.path / "launch.json").is_file():
        text = "it was started without `burst launch`, and the process that said so in run.json is gone"
        return replace(seen, problem=text)
    from cluster.control.controller import settle

    try:
        return settle(run)
    except BurstError as error:
        return RunState(run.read_state(), find_controller(run), is_lost=True, problem=str(error))


def glance_at(run: RunFolder) -> RunState:
    """The state by the run folder alone; of a run whose run.json cannot be read, that and why."""
    try:
        return glance(run)
    except RunFolderError as error:
        return RunState({"state": "unreadable"}, problem=str(error))


class RunWatch:
    """`look_at` again and again; the nodes of a run that nobody controls are asked every ASK_AGAIN_S."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._next_ask = run, 0.0
        self._asked: RunState | None = None

    def look(self) -> RunState:
        """The present state."""
        seen = glance(self._run)
        if not seen.is_lost:
            return seen
        if self._asked is None or time.monotonic() >= self._next_ask:
            self._asked = look_at(self._run)
            self._next_ask = time.monotonic() + ASK_AGAIN_S
        return self._asked

    def ended(self) -> int | None:
        """The exit code once the run has ended, or nothing can be known of it any more; None while it goes on."""
        seen = self.look()
        return seen.exit_code if seen.is_final or seen.problem is not None else None
