"""How far a run has come, and for how long none of its ranks has been heard to advance; no drawing, no decisions."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from engine.runs.folder import RunFolder
from engine.runs.records import JsonLinesTail

_RECENT_STEPS = 20
_LOOK_S = 1.0  # between two looks at what the ranks themselves say
_STATUS = ".status.json"


class StepWatch:
    """The steps and phases that rank 0 recorded, and whether any rank says that it is further than before.

    A rank says so at every phase of a step, and while it prepares data, evaluates and saves. Silence counts from when
    news was first seen here, so `poll` often.
    """

    def __init__(self, run: RunFolder, now: Callable[[], float]) -> None:
        self._metrics = JsonLinesTail(run.path / "metrics.jsonl")
        self._events = JsonLinesTail(run.path / "events.jsonl")
        self._now, self._logs = now, run.path / "logs"
        self._looked_at, self._said = -_LOOK_S, 0
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
        if self._ranks_advance() or rows or phases:
            self._news_at = self._now()

    def touch(self) -> None:
        """Count the silence from now on: the ranks were only started now."""
        self._news_at = self._now()

    @property
    def silence_s(self) -> float:
        """Seconds in which no rank advanced."""
        return self._now() - self._news_at

    @property
    def slowest_step_s(self) -> float | None:
        """The slowest of the last steps, None before the first."""
        return max(self._step_times, default=None)

    def _ranks_advance(self) -> bool:
        """Whether a rank has replaced its status since the last look: it does so only when it is further."""
        if self._now() < self._looked_at + _LOOK_S:
            return False
        self._looked_at, before = self._now(), self._said
        with contextlib.suppress(OSError):  # a folder that is just being made
            stamps = (
                file.stat().st_mtime_ns
                for node in os.scandir(self._logs)
                for file in os.scandir(node.path)
                if file.name.endswith(_STATUS)
            )
            self._said = max(stamps, default=self._said)
        return self._said != before

    def _add(self, row: dict[str, Any]) -> None:
        step, seconds = row.get("step"), row.get("step_time_s")
        if isinstance(step, int):
            self.step = max(self.step, step)
            self._step_times.append(float(seconds) if isinstance(seconds, int | float) else 0.0)
