"""What a running run has reported so far, gathered from its folder; no drawing here."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.run.records import JsonLinesTail
from engine.runs import RunFolder

_RECENT_STEPS = 20


@dataclass
class RunProgress:
    """The present state of one run. `poll()` reads what is new in metrics.jsonl and events.jsonl."""

    run: RunFolder
    total_steps: int
    clock: Callable[[], float] = time.monotonic
    phase: str = "starting the ranks"
    latest: Mapping[str, Any] | None = None
    losses: list[float] = field(default_factory=list)
    validation: Mapping[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._metrics = JsonLinesTail(self.run.path / "metrics.jsonl")
        self._events = JsonLinesTail(self.run.path / "events.jsonl")
        self._step_times: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._started = self.clock()

    def poll(self) -> bool:
        """Whether there was anything new."""
        events, rows = self._events.poll(), self._metrics.poll()
        for event in events:
            if event.get("kind") == "phase":
                self.phase = str(event.get("phase"))
            elif event.get("kind") == "warning":
                self.warnings.append(str(event.get("message")))
        for row in rows:
            self._add(row)
        return bool(events or rows)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.latest["step"]) if self.latest else 0

    def figure(self, name: str) -> float | None:
        """A figure of the latest step, None when it is not known."""
        value = self.latest.get(name) if self.latest else None
        return value if isinstance(value, int | float) else None

    def elapsed_s(self) -> float:
        """Seconds since the launch."""
        return self.clock() - self._started

    def remaining_s(self) -> float | None:
        """Seconds left, from the median of the last steps; None before there are any."""
        if not self._step_times:
            return None
        return statistics.median(self._step_times) * (self.total_steps - self.step)

    def _add(self, row: Mapping[str, Any]) -> None:
        if not isinstance(row.get("step"), int):
            return
        self.latest = row
        if isinstance(row.get("loss"), int | float):
            self.losses.append(row["loss"])
        if isinstance(row.get("step_time_s"), int | float):
            self._step_times.append(row["step_time_s"])
        if row.get("validation_loss") is not None:
            self.validation = row
