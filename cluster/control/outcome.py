"""What a controller tells while it works, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.control.link import NodeStatus
from cluster.failure import Failure

INTERRUPTED = 130


@dataclass(frozen=True)
class Leftover:
    """What may still run on `node`: processes that would not die, or, without pids, all that cannot be seen there."""

    node: str
    pids: tuple[int, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        pids = f"processes {' '.join(map(str, self.pids))}" if self.pids else ""
        return f"{self.node}: {'; '.join(filter(None, [pids, self.reason])) or 'not known'}"


@dataclass(frozen=True)
class LaunchOutcome:
    """How a run ended: final state, exit code for the shell, the first failure, and what could not be cleared away."""

    status: str
    exit_code: int
    failure: Failure | None = None
    leftover: tuple[Leftover, ...] = ()


class LaunchObserver(Protocol):
    """Whoever shows a launch to a person."""

    def tick(self) -> None:
        """Called several times a second while the run lives."""

    def nodes(self, statuses: Sequence[NodeStatus]) -> None:
        """What is known of every node, in their order; called before every `tick`."""

    def stopping(self, cause: str, grace_s: float) -> None:
        """The run is being stopped; after `grace_s` seconds what remains is killed."""

    def note(self, text: str) -> None:
        """Something that a person should know, in one line."""


class SilentObserver:
    """Shows nothing to nobody."""

    def tick(self) -> None:
        pass

    def nodes(self, statuses: Sequence[NodeStatus]) -> None:
        pass

    def stopping(self, cause: str, grace_s: float) -> None:
        pass

    def note(self, text: str) -> None:
        pass
