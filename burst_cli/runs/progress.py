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
from cluster.values import number
from engine.runs.folder import RunFolder
from engine.runs.records import JsonLinesTail

_RECENT_STEPS = 20
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
    phase: str = "starting the ranks"
    latest: Mapping[str, Any] | None = None
    losses: list[float] = field(default_factory=list)
    validation: Mapping[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    ran_s: float = 0.0

    def __post_init__(self) -> None:
        self.total_steps = self.total_steps or self.facts.steps or 0
        self._metrics, self._events = (
            JsonLinesTail(self.run.path / f"{name}.jsonl", _TAIL_BYTES) for name in ("metrics", "events")
        )
        self._figures: dict[str, Any] = {}
        self._step_times: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._stragglers: deque[tuple[int, float]] = deque(maxlen=_STRAGGLER_STEPS)  # rank or -1, seconds lost
        self._started = self.clock() - self.ran_s
        self._news_at: float | None = None

    @cached_property
    def facts(self) -> RunFacts:
        """What the run was asked to do."""
        return read_facts(self.run)

    def poll(self) -> bool:
        """Whether there was anything new."""
        events, rows = self._events.poll(), self._metrics.poll()
        for event in events:
            if event.get("kind") == "phase":
                self.phase = str(event.get("phase"))
            elif event.get("kind") == "warning":
                self.warnings.append(str(event.get("message")))
            elif event.get("kind") == "dropped":
                self.warnings.append(_dropped_text(event))
        for row in rows:
            self._add(row)
        if self._news_at is None:
            self._news_at = self.clock() - self._age_of_news()
        elif events or rows:
            self._news_at = self.clock()
        return bool(events or rows)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.latest["step"]) if self.latest else 0

    @property
    def straggler(self) -> int | None:
        """The rank that the others waited for in nearly all of the last steps, and for long enough to matter."""
        rank, _ = Counter(rank for rank, _ in self._stragglers).most_common(1)[0] if self._stragglers else (-1, 0)
        lost = [seconds for late, seconds in self._stragglers if late == rank]
        matters = rank >= 0 and len(lost) >= _STRAGGLER_LEAST_STEPS and sum(lost) >= _STRAGGLER_LOST_S
        return rank if matters else None

    @property
    def silence_s(self) -> float:
        """Seconds without a step or a new phase."""
        return 0.0 if self._news_at is None else self.clock() - self._news_at

    @property
    def hang_limit_s(self) -> float:
        """After so many seconds of silence the controller has the ranks' stacks taken."""
        from cluster.control.hang import TRAINING_PHASE, hang_limits_s

        makes_steps = self._step_times and self.phase == TRAINING_PHASE and self.step < self.total_steps
        return hang_limits_s(self.facts.hang_timeout_s, max(self._step_times) if makes_steps else None)[0]

    def figure(self, name: str) -> float | None:
        """A figure of the latest step that has it, None when it is not known."""
        return number(self._figures, name)

    def elapsed_s(self) -> float:
        """Seconds since the launch."""
        return self.clock() - self._started

    def remaining_s(self) -> float | None:
        """Seconds left, from the median of the last steps; None before there are any."""
        if not self._step_times:
            return None
        return statistics.median(self._step_times) * max(0, self.total_steps - self.step)

    def _add(self, row: Mapping[str, Any]) -> None:
        if not isinstance(row.get("step"), int):
            return
        self.latest = row
        self._figures |= {name: value for name, value in row.items() if value is not None}
        if (loss := number(row, "loss")) is not None:
            self.losses.append(loss)
        if (step_time_s := number(row, "step_time_s")) is not None:
            self._step_times.append(step_time_s)
        if row.get("validation_loss") is not None:
            self.validation = row
        rank = row.get("straggler_rank")
        least, most = (number(row, f"rank_wait_s_{end}") or 0.0 for end in ("min", "max"))
        self._stragglers.append((rank if isinstance(rank, int) else -1, most - least))

    def _age_of_news(self) -> float:
        """Seconds since the run last wrote; 0 for one that has only begun."""
        written = [tail.path.stat().st_mtime for tail in (self._metrics, self._events) if tail.path.exists()]
        return max(0.0, time.time() - max(written)) if written else 0.0


def _dropped_text(event: Mapping[str, Any]) -> str:
    return (
        f"step {event.get('step')} is dropped ({event.get('reaction')}): {event.get('reason')}; "
        f"samples {event.get('first_sample')} to {event.get('last_sample')}"
    )
