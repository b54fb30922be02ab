"""What runs are held against: a baseline, and the limits of gates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from burst_cli.figures import grouped
from burst_cli.report.records import PEAK_FIGURES, Record, method_of, pooled, run_name, share_a_peak
from cluster.values import number, text
from engine.config.errors import ConfigError
from engine.config.schema import nearest

RATIOS = ("tokens_per_s_per_device", "peak_memory_bytes")
OWN_BASELINE = "baseline"  # what a gate calls that of --baseline
_LIKE = ("model", "seq_len", "world_size", "hardware")
_VALUE = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(%|[KMGT]i?B?|B)?")
_UNITS = {"%": 0.01, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("", 1000), ("B", 1000), ("i", 1024), ("iB", 1024))
}
_EXAMPLE = "such as mfu=40%, tokens_per_s_per_device=1.5K, peak_memory_bytes=70GiB or mfu=90%ofring"


# --- baselines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Baseline:
    """What ratios are against. name: of the method or run; cells: its runs by (model, seq_len, ranks, hardware)."""

    name: str
    cells: dict[tuple[str | None, ...], list[Record]]

    @property
    def run_ids(self) -> set[Any]:
        """Of its runs."""
        return {run["run_id"] for runs in self.cells.values() for run in runs}

    def figure(self, record: Record, metric: str) -> tuple[float, float, float] | None:
        """(median, low, high) of the baseline that is like this run; of several: the middle, and the widest."""
        runs = self.cells.get(_like(record), ())
        if metric in PEAK_FIGURES and not share_a_peak([record, *runs]):
            return None
        found = pooled(runs, metric)
        return None if found is None else found[:3]


def find_baseline(name: str, records: Sequence[Record], runs: Callable[[str], list[dict[str, Any]]]) -> Baseline:
    """The baseline that `name` means: a method (`ring`, `burst/attn_out`) of these records, else one run.

    Raises ConfigError when it is neither.
    """
    methods = {method for record in records if (method := method_of(record))}
    presets = {preset for record in records if (preset := text(record, "attention_preset"))}
    found: Sequence[Record] = [
        record
        for record in records
        if name in (method_of(record), text(record, "attention_preset")) and record.get("status") == "completed"
    ]
    shown = name
    if not found:
        try:
            found = runs(name)
        except ConfigError:
            near = nearest(name, [*sorted(methods), *sorted(presets)])
            raise ConfigError(
                f"--baseline: {name!r} is neither a method of these runs nor a run; "
                f"{f'did you mean {near}? ' if near else ''}Methods: {', '.join(sorted(methods)) or 'none'}"
            ) from None
        shown = run_name(found[0]) if len(found) == 1 else name
    return Baseline(shown, grouped((_like(record), record) for record in found))


def with_ratios(records: Sequence[dict[str, Any]], baseline: Baseline) -> tuple[list[dict[str, Any]], list[str]]:
    """(`records` with ratio_X, ratio_X_low and ratio_X_high for each of RATIOS, a warning when none is comparable).

    low and high: the run's quartiles over the opposite ones of the baseline, so the interval errs on the wide side.
    """
    compared = [{**record, **_ratios(record, baseline)} for record in records]
    if any(number(record, f"ratio_{name}") is not None for record in compared for name in RATIOS):
        return compared, []
    words = "no run has its model, seq_len, ranks and hardware, so there are no ratios"
    return compared, [f"--baseline {baseline.name}: {words}"]


def _ratios(record: Record, baseline: Baseline) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in RATIOS:
        middle = number(record, name)
        against = baseline.figure(record, name) if middle is not None else None
        if middle is None or against is None or min(against) <= 0:
            continue
        low, high = (number(record, f"{name}{suffix}") for suffix in ("_p25", "_p75"))
        low, high = middle if low is None else low, middle if high is None else high
        has_spread = low < high or against[1] < against[2]
        found[f"ratio_{name}"] = middle / against[0]
        found[f"ratio_{name}_low"] = low / against[2] if has_spread else None
        found[f"ratio_{name}_high"] = high / against[1] if has_spread else None
    return found


def _like(record: Record) -> tuple[str | None, ...]:
    return tuple(text(record, name) for name in _LIKE)


# --- gates ------------------------------------------------------------------------------------------------------------


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


def judge(gate: Gate, records: Iterable[Record], baseline: Baseline | None) -> list[Verdict]:
    """Every run at this gate but those of its baseline, which would always pass or always fail.

    With no run left it fails, because nothing was shown to pass.
    """
    own = baseline.run_ids if baseline is not None else set()
    judged = [_judge(gate, record, baseline) for record in records if record["run_id"] not in own]
    return judged or [Verdict(gate.words, "no run", "missing", None, None, passed=False)]


def _judge(gate: Gate, record: Record, baseline: Baseline | None) -> Verdict:
    limit: float | None = gate.limit
    if gate.of is not None:
        against = baseline.figure(record, gate.metric) if baseline is not None else None
        limit = gate.limit * against[0] if against is not None else None
    value = number(record, gate.metric)
    passed = value is not None and limit is not None and (value >= limit if gate.below else value <= limit)
    return Verdict(gate.words, run_name(record), text(record, "status") or "?", value, limit, passed)
