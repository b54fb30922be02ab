"""How long the parts of a launch may take, and the clock that a controller goes by."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from cluster.agent.messages import STOP_GRACE_S


@dataclass(frozen=True)
class LaunchTiming:
    """How long things may take, in seconds; `lost_s` None: half of what a node's lease lasts."""

    poll_s: float = 0.1
    beat_s: float = 1.0
    stop_grace_s: float = STOP_GRACE_S  # between asking the ranks to stop and killing them, without checkpoints
    evidence_s: float = 1.0  # between the first sign of a failure and stopping the nodes that know nothing of it
    failure_grace_s: float = 3.0  # between the first sign of a failure and killing the ranks that go on
    early_exit_s: float = 30.0  # for rank 0 to say that training is complete, once the ranks of a node ended well
    finish_s: float = 60.0  # for all ranks to end, once training is complete
    lost_s: float | None = None  # a node that says nothing for so long is lost
    vanish_s: float = 3.0  # for news of the last step to arrive, once a rank has ended well
    kill_s: float = 15.0  # for a node to end once all of its processes were to be killed; then it is given up
    mute_s: float = 8.0  # at once if nothing was heard of it for so long
    sync_s: float = 30.0  # for the last lines of logs to arrive from a node that has ended
    stacks_s: float = 10.0  # for the ranks of a run that hangs to write their stacks


class Clock(Protocol):
    """Time as the controller sees it; tests have one that they move."""

    def monotonic(self) -> float:
        """Seconds that only go forward."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""


class SystemClock:
    """The time of this machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time_ns(self) -> int:
        return time.time_ns()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
