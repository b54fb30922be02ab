"""What a run has reported so far, gathered from its folder: the one reader of its steps and events. No drawing here."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from burst_cli.runs.read import RunFacts, read_facts
from cluster.control.hang import StepWatch
from cluster.remote_text import number
from engine.runs.folder import RunFolder

_TAIL_BYTES = 256 * 1024  # of records that were there before: many rows, whatever the length of the run
# A rank is called a straggler when it was the one in so many of the last steps, and they lost so many seconds by it:
# on a machine whose cores are shared some rank is always last, by little and never the same for long.
_STRAGGLER_STEPS, _STRAGGLER_LEAST_STEPS, _STRAGGLER_LOST_S = 10, 8, 10.0


class RunProgress:
    """The present state of one run. `poll()` reads what is new in metrics.jsonl and events.jsonl.

    Of what was there before, the end is read, so that hundreds of runs take a moment. total_steps: those of its
    configuration unless given. ran_s: seconds since the launch, for one who joins later.
    """

    def __init__(
        self,
        run: RunFolder,
        total_steps: int = 0,
        clock: Callable[[], float] = time.monotonic,
        *,
        ran_s: float = 0.0,
    ) -> None:
        self.run, self.clock, self._started = run, clock, clock() - ran_s
        self.total_steps = total_steps or self.facts.steps or 0
        self.latest: Mapping[str, Any] | None = None
        self.validation: Mapping[str, Any] | None = None
        self.losses: list[float] = []
        self.warnings: list[str] = []
        self._steps = StepWatch(run, clock, _TAIL_BYTES)
        self._figures: dict[str, Any] = {}
        self._stragglers: deque[tuple[int, float]] = deque(maxlen=_STRAGGLER_STEPS)  # rank or -1, seconds lost

    @cached_property
    def facts(self) -> RunFacts:
        """What the run was asked to do."""
        return read_facts(self.run)

    def poll(self) -> list[str]:
        """Take up what is new; the warnings among it."""
        rows, events = self._steps.poll()
        for row in rows:
            if isinstance(row.get("step"), int):
                self._add(row)
        news = [_warning(event) for event in events if event.get("kind") in ("warning", "dropped")]
        self.warnings += news
        return news

    @property
    def phase(self) -> str:
        """What the ranks do."""
        return self._steps.phase or "starting the ranks"

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._steps.step

    @property
    def straggler(self) -> int | None:
        """The rank that the others waited for in nearly all of the last steps, and for long enough to matter."""
        rank = statistics.mode([rank for rank, _ in self._stragglers] or [-1])
        lost = [seconds for late, seconds in self._stragglers if late == rank]
        matters = rank >= 0 and len(lost) >= _STRAGGLER_LEAST_STEPS and sum(lost) >= _STRAGGLER_LOST_S
        return rank if matters else None

    @property
    def silence_s(self) -> float:
        """Seconds in which no rank advanced."""
        return self._steps.silence_s

    @property
    def hang_limit_s(self) -> float:
        """After so many seconds of silence the controller has the ranks' stacks taken."""
        return self._steps.limits_s(self.facts.hang_timeout_s, self.total_steps)[0]

    def figure(self, name: str) -> float | None:
        """A figure of the latest step that has it, None when it is not known."""
        return number(self._figures, name)

    def elapsed_s(self) -> float:
        """Seconds since the launch."""
        return self.clock() - self._started

    def remaining_s(self) -> float | None:
        """Seconds left, from the median of the last steps; None before there are any."""
        if not self._steps.step_times:
            return None
        return statistics.median(self._steps.step_times) * max(0, self.total_steps - self.step)

    def _add(self, row: Mapping[str, Any]) -> None:
        self.latest = row
        self._figures |= {name: value for name, value in row.items() if value is not None}
        if (loss := number(row, "loss")) is not None:
            self.losses.append(loss)
        if row.get("validation_loss") is not None:
            self.validation = row
        rank = row.get("straggler_rank")
        least, most = (number(row, f"rank_wait_s_{end}") or 0.0 for end in ("min", "max"))
        self._stragglers.append((rank if isinstance(rank, int) else -1, most - least))


def _warning(event: Mapping[str, Any]) -> str:
    if event.get("kind") == "warning":
        return str(event.get("message"))
    return (
        f"step {event.get('step')} is dropped ({event.get('reaction')}): {event.get('reason')}; "
        f"samples {event.get('first_sample')} to {event.get('last_sample')}"
    )
