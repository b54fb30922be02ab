"""Conditions that fail a report, for CI: `--fail-below mfu=40%`, `--fail-above step_time_s=110%ofring`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from burst_cli.report.baseline import Baseline
from burst_cli.report.values import Record, number, run_name, text
from engine.config_schema import nearest
from engine.errors import ConfigError

_VALUE = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(%|[KMGT]i?B?|B)?")
_UNITS = {"%": 0.01, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("", 1000), ("B", 1000), ("i", 1024), ("iB", 1024))
}
_EXAMPLE = "such as mfu=40%, tokens_per_s_per_device=1.5K, peak_memory_bytes=70GiB or mfu=90%ofring"


@dataclass(frozen=True)
class Gate:
    """One condition. below: fails what lies below the limit, else what lies above. of: a baseline, limit its share."""

    words: str
    metric: str
    limit: float
    below: bool
    of: str | None = None


@dataclass(frozen=True)
class Verdict:
    """One run at one gate. value and limit are None where they are not known; that fails too."""

    gate: str
    run: str
    status: str
    value: float | None
    limit: float | None
    passed: bool

    @property
    def line(self) -> str:
        """For people."""
        if self.value is None:
            return f"{self.run}: {self.gate}: the run is {self.status} and has no such figure"
        if self.limit is None:
            return f"{self.run}: {self.gate}: no run of the baseline is like it"
        return f"{self.run}: {self.gate}: got {self.value:.4g}, limit {self.limit:.4g}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def parse_gates(below: Sequence[str], above: Sequence[str]) -> tuple[Gate, ...]:
    """The gates of --fail-below and --fail-above. Raises ConfigError with every mistake."""
    gates: list[Gate] = []
    problems: list[str] = []
    for words, is_below in [*((word, True) for word in below), *((word, False) for word in above)]:
        option = "--fail-below" if is_below else "--fail-above"
        metric, equals, limit = words.partition("=")
        share, of, name = limit.partition("of")
        found = _VALUE.fullmatch(share.strip())
        if not equals or found is None or bool(of) != bool(name.strip()):
            problems.append(f"{option}: got {words!r}, expected METRIC=VALUE, {_EXAMPLE}")
            continue
        value = float(found[1]) * _UNITS.get(found[2] or "", 1)
        gates.append(Gate(f"{option} {words}", metric.strip(), value, is_below, name.strip() or None))
    if problems:
        raise ConfigError(problems)
    return tuple(gates)


def check_metrics(gates: Iterable[Gate], records: Sequence[Record]) -> None:
    """Raise ConfigError for metrics that no record has, with the nearest names."""
    known = sorted({name for record in records for name in record if number(record, name) is not None})
    spelled = {name for record in records for name in record}  # known, though perhaps null everywhere
    problems = []
    for gate in gates:
        if records and gate.metric not in spelled:
            near = nearest(gate.metric, known)
            advice = f"did you mean {near}?" if near else f"there are: {', '.join(known)}"
            problems.append(f"{gate.words}: no run has a figure {gate.metric!r}; {advice}")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def judge(gates: Iterable[Gate], records: Sequence[Record], baselines: dict[str, Baseline]) -> tuple[Verdict, ...]:
    """Every run at every gate; with no run at all, each gate fails, because nothing was shown to pass."""
    verdicts: list[Verdict] = []
    for gate in gates:
        if not records:
            verdicts.append(Verdict(gate.words, "no run", "missing", None, None, passed=False))
        verdicts += [_judge(gate, record, baselines.get(gate.of or "")) for record in records]
    return tuple(verdicts)


def _judge(gate: Gate, record: Record, baseline: Baseline | None) -> Verdict:
    limit: float | None = gate.limit
    if gate.of is not None:
        against = baseline.figure(record, gate.metric) if baseline is not None else None
        limit = gate.limit * against[0] if against is not None else None
    value = number(record, gate.metric)
    passed = value is not None and limit is not None and (value >= limit if gate.below else value <= limit)
    return Verdict(gate.words, run_name(record), text(record, "status") or "?", value, limit, passed)
