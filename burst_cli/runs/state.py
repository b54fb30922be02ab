"""The state of a run as seen from outside: run.json, who controls it, and, where nobody does, what its nodes say."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from burst_cli.runs.read import UNREADABLE, is_lost
from cluster.control.attempt import Controller, find_controller
from cluster.control.link import NodeStatus
from engine.config.errors import BurstError
from engine.runs.folder import FINAL_STATES, RunFolder, RunFolderError

ASK_AGAIN_S = 10.0
UNKNOWN = 3
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
_EXIT_CODES = {"completed": 0, "failed": 1, "oom": 1, "cancelled": 130}


@dataclass(frozen=True)
class RunState:
    """document: content of run.json. problem: why nodes could not be asked, or did not answer.

    nodes: what nodes that were asked said; empty where the run folder is all that is known.
    """

    document: Mapping[str, Any]
    controller: Controller | None = None
    is_lost: bool = False
    problem: str | None = None
    nodes: tuple[NodeStatus, ...] = field(default=())

    @property
    def state(self) -> str:
        return str(self.document["state"])

    @property
    def goes_on(self) -> bool:
        """Whether nodes that were asked say that ranks run."""
        return any(status.phase in ("starting", "running", "stopping") for status in self.nodes)

    @property
    def shown(self) -> str:
        """The state in run.json; lost where nobody controls a run that has not ended, and no rank is seen to go on."""
        return "lost" if self.is_lost and not self.goes_on else self.state

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES

    @property
    def exit_code(self) -> int:
        """0 goes on or completed, 1 failed or out of memory, 130 cancelled, 3 nobody knows."""
        if self.is_final:
            return _EXIT_CODES[self.state]
        return UNKNOWN if self.problem is not None else 0


def look_at(run: RunFolder, *, ask: bool = True) -> RunState:
    """The state of `run`. ask: have the nodes of a run that nobody controls asked, and the run judged if it ended."""
    document = run.read_state()
    controller = find_controller(run)
    if controller is not None or not is_lost(run, document):
        return RunState(document, controller)
    if not ask:
        return RunState(document, is_lost=True)
    return _asked(run)


def glance_at(run: RunFolder) -> RunState:
    """The state by the run folder alone; of a run whose run.json cannot be read, that and why."""
    try:
        return look_at(run, ask=False)
    except RunFolderError as error:
        return RunState({"state": UNREADABLE}, problem=str(error))


def _asked(run: RunFolder) -> RunState:
    if not (run.path / "launch.json").is_file():
        text = "it was started without `burst launch`, and the process that said so in run.json is gone"
        return RunState(run.read_state(), is_lost=True, problem=text)
    from cluster.control.settle import settle

    try:
        settled = settle(run)
    except BurstError as error:
        return RunState(run.read_state(), find_controller(run), is_lost=True, problem=str(error))
    document = run.read_state()
    return RunState(
        document,
        find_controller(run),
        is_lost=document["state"] not in FINAL_STATES,
        problem=settled.problem,
        nodes=settled.nodes,
    )


class RunWatch:
    """`look_at` again and again; the nodes of a run that nobody controls are asked every ASK_AGAIN_S."""

    def __init__(self, run: RunFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._next_ask = 0.0
        self._asked: RunState | None = None

    def look(self) -> RunState:
        """The present state."""
        seen = look_at(self._run, ask=False)
        if not seen.is_lost:
            return seen
        if self._asked is None or self._clock() >= self._next_ask:
            self._asked = look_at(self._run)
            self._next_ask = self._clock() + ASK_AGAIN_S
        return self._asked

    def ended(self) -> int | None:
        """The exit code once the run has ended, or nothing can be known of it any more; None while it goes on."""
        seen = self.look()
        return seen.exit_code if seen.is_final or seen.problem is not None else None
