"""How far a run has come, and for how long nothing has been heard of its steps; no drawing, no decisions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from engine.run.records import JsonLinesTail
from engine.runs import RunFolder

_RECENT_STEPS = 20


class StepWatch:
    """The steps and phases that rank 0 recorded. Silence counts from when news was first seen here, so `poll` often."""

    def __init__(self, run: RunFolder, now: Callable[[], float]) -> None:
        self._metrics = JsonLinesTail(run.path / "metrics.jsonl")
        self._events = JsonLinesTail(run.path / "events.jsonl")
        self._now = now
        self._news_at = now()
        self._step_times: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.step = 0
        self.phase = ""

    def poll(self) -> None:
        """Read what is new."""
        rows, events = self._metrics.poll(), self._events.poll()
        phases = [str(event.get("phase")) for event in events if event.get("kind") == "phase"]
        if phases:
            self.phase = phases[-1]
        for row in rows:
            self._add(row)
        if rows or phases:
            self._news_at = self._now()

    def touch(self) -> None:
        """Count the silence from now on: the ranks were only started now."""
        self._news_at = self._now()

    @property
    def silence_s(self) -> float:
        """Seconds without a step or a new phase."""
        return self._now() - self._news_at

    @property
    def slowest_step_s(self) -> float | None:
        """The slowest of the last steps, None before the first."""
        return max(self._step_times, default=None)

    def _add(self, row: dict[str, Any]) -> None:
        step, seconds = row.get("step"), row.get("step_time_s")
        if isinstance(step, int):
            self.step = max(self.step, step)
            self._step_times.append(float(seconds) if isinstance(seconds, int | float) else 0.0)
