"""Runs planned parts within a budget: what does not fit any more is skipped, what fails is a row, nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.gpu.checks import complete_rows, failed_row, skipped_row
from benchmarks.gpu.plan import Measurement, Part, Row, share_s
from benchmarks.gpu.worker import MeasurementError
from engine.predict.machine import Peak

GRACE_S = 10.0  # beyond the budget, for the measurement that is running
LEAST_PACE, MOST_PACE = 0.1, 20.0
LEAST_NOTED_S = 0.5  # shorter ones say nothing about the pace

PartDocument = dict[str, Any]


class Measures(Protocol):
    """What runs measurements: `Workers`, or a fake."""

    def call(self, measurement: Measurement, timeout_s: float) -> list[Row]:
        """The rows; raises MeasurementError."""


@dataclass
class Budget:
    """Seconds that are left of `seconds`, by `clock`."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def used_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started

    @property
    def left_s(self) -> float:
        """Below zero when overdrawn."""
        return self.seconds - self.used_s


@dataclass
class Runner:
    """Runs parts in turn; `save` gets the parts as plain values after every measurement, `say` a line for people.

    ready      a measurement as it is to be called, perhaps after waiting for what it needs
    complete   by part: its rows -> (the same with what is known besides, rows that follow from them)
    """

    measures: Measures
    budget: Budget
    peak: Peak
    save: Callable[[Sequence[PartDocument]], None]
    say: Callable[[str], None]
    ready: Callable[[Measurement], Measurement] = lambda measurement: measurement
    complete: Mapping[str, Callable[[Sequence[Row]], tuple[list[Row], list[Row]]]] = field(default_factory=dict)

    def run(self, parts: Sequence[Part]) -> list[PartDocument]:
        """The parts with their rows, in the same order."""
        done: list[PartDocument] = []
        for index, part in enumerate(parts):
            share = max(0.0, share_s(self.budget.left_s, parts[index:]))
            self.say(f"{part.title}: {len(part.measurements)} measurements, {share:.0f} s")
            document: PartDocument = {"name": part.name, "title": part.title, "share_s": share}
            document |= {"expected_s": part.expected_s, "rows": list(part.known)}
            done.append(document)
            self._run_part(part, share, document, done)
        return done

    def _run_part(self, part: Part, share: float, document: PartDocument, done: list[PartDocument]) -> None:
        started, pace, skipped = self.budget.clock(), 1.0, []
        for measurement in part.measurements:
            left = share - (self.budget.clock() - started)
            needed = measurement.expected_s * pace
            if needed > left:
                skipped.append(measurement.label)
                reason = f"about {needed:.0f} s, {max(0.0, left):.0f} s left of the part's {share:.0f} s"
                document["rows"].append(skipped_row(measurement.label, reason) | {"needed_s": needed})
                continue
            rows, took = self._measure(measurement, pace)
            document["rows"] += rows
            measured = any(row["status"] == "measured" for row in rows)
            if measured and max(took, measurement.expected_s) >= LEAST_NOTED_S:
                pace = min(MOST_PACE, max(LEAST_PACE, took / measurement.expected_s))
            document["seconds"] = self.budget.clock() - started
            self.refresh(document)
            self.save(done)
        if skipped:
            self.say(f"  left out, no time: {'; '.join(skipped)}")
        document["seconds"] = self.budget.clock() - started
        self.refresh(document)
        self.save(done)

    def _measure(self, measurement: Measurement, pace: float) -> tuple[list[Row], float]:
        """(rows, seconds without those that it waited until it was ready, which say nothing of the device)."""
        timeout_s = min(self.budget.left_s + GRACE_S, 4 * measurement.expected_s * max(1.0, pace) + 60.0)
        before = self.budget.clock()
        try:
            ready = self.ready(measurement)
            before = self.budget.clock()
            rows = complete_rows(self.measures.call(ready, timeout_s), measurement.label, self.peak)
        except MeasurementError as error:
            rows = [failed_row(measurement.label, str(error))]
        words, took = (
            "; ".join(dict.fromkeys(row["error"] for row in rows if row["error"])),
            self.budget.clock() - before,
        )
        self.say(f"  {self.budget.used_s:4.0f} s  {measurement.label}: {took:.1f} s  {words}")
        return rows, took

    def refresh(self, document: PartDocument) -> None:
        """Bring what follows from a part's rows up to date."""
        if document["name"] in self.complete:
            document["rows"], derived = self.complete[document["name"]](document["rows"])
            document["derived"] = [row for one in derived for row in complete_rows([one], one["label"], self.peak)]
        document["status"] = part_status(document["rows"])


def part_status(rows: Sequence[Row]) -> str:
    """measured, partial, failed (tried, and nothing was measured), not available or skipped."""
    kinds = [row["status"] for row in rows]
    tried = [kind for kind in kinds if kind in ("measured", "failed", "above peak")]
    if not tried:
        return "not available" if "not available" in kinds else "skipped"
    if "measured" not in tried:
        return "failed"
    wanted = [kind for kind in kinds if kind != "not available"]
    return "measured" if all(kind == "measured" for kind in wanted) else "partial"
