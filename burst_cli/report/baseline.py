"""Speed and memory of every run against a baseline that is like it: ratios with the interval of their quartiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from burst_cli.report.values import PEAK_FIGURES, Record, method_of, number, pooled, run_name, share_a_peak, text
from engine.config_schema import nearest
from engine.errors import ConfigError

RATIOS = ("tokens_per_s_per_device", "peak_memory_bytes")
_LIKE = ("model", "seq_len", "world_size", "hardware")


@dataclass(frozen=True)
class Baseline:
    """What ratios are against. name: of the method or run; cells: its runs by (model, seq_len, ranks, hardware)."""

    name: str
    cells: dict[tuple[str | None, ...], list[Record]]

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
    cells: dict[tuple[str | None, ...], list[Record]] = {}
    for record in records:
        if name in (method_of(record), text(record, "attention_preset")) and record.get("status") == "completed":
            cells.setdefault(_like(record), []).append(record)
    if cells:
        return Baseline(name, cells)
    methods = sorted({method for record in records if (method := method_of(record))})
    try:
        found = runs(name)
    except ConfigError:
        presets = {preset for record in records if (preset := text(record, "attention_preset"))}
        near = nearest(name, [*methods, *sorted(presets)])
        raise ConfigError(
            f"--baseline: {name!r} is neither a method of these runs nor a run; "
            f"{f'did you mean {near}? ' if near else ''}Methods: {', '.join(methods) or 'none'}"
        ) from None
    for record in found:
        cells.setdefault(_like(record), []).append(record)
    return Baseline(run_name(found[0]) if len(found) == 1 else name, cells)


def with_ratios(records: Sequence[dict[str, Any]], baseline: Baseline) -> tuple[list[dict[str, Any]], str | None]:
    """(`records` with ratio_X, ratio_X_low and ratio_X_high for each of RATIOS, a warning when none is comparable).

    low and high: the run's quartiles over the opposite ones of the baseline, so the interval errs on the wide side.
    """
    compared = [{**record, **_ratios(record, baseline)} for record in records]
    if any(number(record, f"ratio_{name}") is not None for record in compared for name in RATIOS):
        return compared, None
    return compared, (
        f"--baseline {baseline.name}: no run has its model, seq_len, ranks and hardware, so there are no ratios"
    )


def _ratios(record: Record, baseline: Baseline) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in RATIOS:
        against = baseline.figure(record, name) if number(record, name) is not None else None
        if against is None or min(against) <= 0:
            continue
        middle, low, high = _span(record, name)
        found[f"ratio_{name}"] = middle / against[0]
        has_spread = low < high or against[1] < against[2]
        found[f"ratio_{name}_low"] = low / against[2] if has_spread else None
        found[f"ratio_{name}_high"] = high / against[1] if has_spread else None
    return found


def _span(record: Record, name: str) -> tuple[float, float, float]:
    middle = number(record, name)
    assert middle is not None
    low, high = (number(record, f"{name}{suffix}") for suffix in ("_p25", "_p75"))
    return middle, middle if low is None else low, middle if high is None else high


def _like(record: Record) -> tuple[str | None, ...]:
    return tuple(text(record, name) for name in _LIKE)
