"""What a run has reported so far, gathered from its folder: the one reader of its steps and events. No drawing here."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from burst_cli.runs.read import RunFacts, read_facts
from cluster.control.hang import StepWatch
from cluster.values import number
from engine.runs.folder import RunFolder

_TAIL_BYTES = 256 * 1024  # of records that were there before: many rows, whatever the length of the run
# A rank is called a straggler when it was the one in so many of the last steps, and they lost so many seconds by it:
# on a machine whose cores are shared some rank is always last, by little and never the same for long.
_STRAGGLER_STEPS, _STRAGGLER_LEAST_STEPS, _STRAGGLER_LOST_S = 10, 8, 10.0


@dataclass
class RunProgress:
    """The present state of one run. `poll()` reads what is new in metrics.jsonl and events.jsonl.

    Of what was there before, the end is read, so that hundreds of runs take a moment. total_steps: those of its
    configuration unless given. ran_s: seconds since the launch, for one who joins later.
    """

    run: RunFolder
    total_steps: int = 0
    clock: Callable[[], float] = time.monotonic
    latest: Mapping[str, Any] | None = None
    losses: list[float] = field(default_factory=list)
    validation: Mapping[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    ran_s: float = 0.0

    def __post_init__(self) -> None:
        self.total_steps = self.total_steps or self.facts.steps or 0
        self._steps = StepWatch(self.run, self.clock, _TAIL_BYTES)
        self._figures: dict[str, Any] = {}
        self._stragglers: deque[tuple[int, float]] = deque(maxlen=_STRAGGLER_STEPS)  # rank or -1, seconds lost
        self._started = self.clock() - self.ran_s

    @cached_property
    def facts(self) -> RunFacts:
        """What the run was asked to do."""
        return read_facts(self.run)

    def poll(self) -> None:
        """Take up what is new."""
        rows, events = self._steps.poll()
        for event in events:
            if event.get("kind") == "warning":
                self.warnings.append(str(event.get("message")))
            elif event.get("kind") == "dropped":
                self.warnings.append(_dropped_text(event))
        for row in rows:
            self._add(row)

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
        rank, _ = Counter(rank for rank, _ in self._stragglers).most_common(1)[0] if self._stragglers else (-1, 0)
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
        if not isinstance(row.get("step"), int):
            return
        self.latest = row
        self._figures |= {name: value for name, value in row.items() if value is not None}
        if (loss := number(row, "loss")) is not None:
            self.losses.append(loss)
        if row.get("validation_loss") is not None:
            self.validation = row
        rank = row.get("straggler_rank")
        least, most = (number(row, f"rank_wait_s_{end}") or 0.0 for end in ("min", "max"))
        self._stragglers.append((rank if isinstance(rank, int) else -1, most - least))


def _dropped_text(event: Mapping[str, Any]) -> str:
    return (
        f"step {event.get('step')} is dropped ({event.get('reaction')}): {event.get('reason')}; "
        f"samples {event.get('first_sample')} to {event.get('last_sample')}"
    )
