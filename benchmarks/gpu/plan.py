"""Parts and measurements as values, and how a budget of seconds is divided between them. Nothing here is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config.errors import ConfigError

Row = dict[str, Any]
SLOWER_THAN_EXPECTED = 1.5  # as a device may be


@dataclass(frozen=True)
class Measurement:
    """One thing to measure.

    label        unique in its part and without commas; what a person reads
    function     module:name of what measures it, called with `device` and the settings; returns rows
    settings     plain values
    expected_s   on the device that the sizes are meant for; the runner scales it by what it sees
    fresh        wants a process of its own, because memory is what it measures, or for its environment
    environment  variables that its process sets before it opens the device
    """

    label: str
    function: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    expected_s: float = 1.0
    fresh: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Measurements that answer one question, in the order of their worth; `weight`: its share of the time.

    known   rows that are known without measuring, such as kernels that are not available
    """

    name: str
    title: str
    weight: float
    measurements: tuple[Measurement, ...]
    known: tuple[Row, ...] = ()

    @property
    def expected_s(self) -> float:
        """Of all its measurements."""
        return sum(measurement.expected_s for measurement in self.measurements)


def share_s(left_s: float, parts: Sequence[Part]) -> float:
    """Seconds of the first of the parts that are still to run: by weight, or all that those after it cannot use.

    What it leaves unused goes to them.
    """
    needed_s = SLOWER_THAN_EXPECTED * sum(part.expected_s for part in parts[1:])
    return max(left_s * parts[0].weight / sum(part.weight for part in parts), left_s - needed_s)


def select(parts: Sequence[Part], only: Sequence[str]) -> tuple[Part, ...]:
    """The parts that are wanted: NAME, or NAME:TEXT for the measurement of that label, else all that have it.

    Raises ConfigError for what names no part or no measurement.
    """
    if not only:
        return tuple(parts)
    wanted: dict[str, list[str]] = {}
    for entry in only:
        name, _, text = entry.partition(":")
        wanted.setdefault(name, []).append(text)
    names = [part.name for part in parts]
    problems = [f"--only {name}: no such part; legal: {', '.join(names)}" for name in wanted if name not in names]
    found = []
    for part in parts:
        texts = wanted.get(part.name)
        if texts is None:
            continue
        exact = {m.label for m in part.measurements}.intersection(texts)
        chosen = tuple(m for m in part.measurements if any(m.label == t if t in exact else t in m.label for t in texts))
        if not chosen and "" not in texts:
            labels = "; ".join(m.label for m in part.measurements)
            problems.append(f"--only {part.name}:{texts[0]}: no such measurement; there are: {labels}")
        found.append(replace(part, measurements=chosen))
    if problems:
        raise ConfigError(problems)
    return tuple(found)
