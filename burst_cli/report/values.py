"""Figures and names out of records, whatever a damaged or foreign file put there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from burst_cli.figures import clean

Record = Mapping[str, Any]
_LONGEST = 200
LEAST_STEPS_RANKED = 5  # measured ones; fewer rank nobody
PEAK_FIGURES = ("mfu", "mfu_full_attention", "hfu")
_SAME_PEAK = 1.01


class Pooled(NamedTuple):
    """One figure of runs that are alike. steps: measured ones behind it, of all runs together."""

    middle: float
    low: float
    high: float
    steps: int
    runs: int

    @property
    def may_rank(self) -> bool:
        """Whether there are steps enough to call it better than another."""
        return self.steps >= LEAST_STEPS_RANKED


def number(record: Record, name: str) -> float | None:
    """A finite number, or None: for what is missing, no number, a truth value, NaN or infinity."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond every float
        return None


def whole(record: Record, name: str) -> int | None:
    """A whole number above 0, or None."""
    value = number(record, name)
    return int(value) if value is not None and value > 0 and value == int(value) else None


def text(record: Record, name: str) -> str | None:
    """One line of printable text, cut at 200 characters, or None."""
    value = record.get(name)
    return None if value is None or isinstance(value, Mapping | list) else one_line(str(value))


def one_line(value: str) -> str:
    """`value` without escapes, control characters and line ends, cut at 200 characters."""
    bare = " ".join(clean(value[: 4 * _LONGEST]).split())
    return bare if len(bare) <= _LONGEST else f"{bare[: _LONGEST - 1]}…"


def method_of(record: Record) -> str | None:
    """Attention preset and memory policy: `burst/attn_out`; the preset alone where nothing is recomputed."""
    preset, policy = text(record, "attention_preset"), text(record, "memory_policy")
    return preset if preset is None or policy in (None, "none") else f"{preset}/{policy}"


def run_name(record: Record) -> str:
    """exp/run_id, or the cell of a sweep that has no run."""
    if record.get("run_id") is None:
        return f"cell {text(record, 'cell') or '?'}"
    return one_line(f"{record.get('exp')}/{record['run_id']}")


def count_of(word: str, number: int) -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def shortened(lines: Sequence[str], most: int = 12) -> list[str]:
    """`lines`, or the first of them and how many more there are."""
    return [*lines] if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]


def tokens(value: float) -> str:
    """A sequence length as people say it: 512, 4K, 256K, 1M (powers of two); others in full."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if value >= size and value % size == 0:
            return f"{value / size:.0f}{unit}"
    return f"{value:,.0f}"


def pooled(records: Iterable[Record], name: str) -> Pooled | None:
    """The median of the completed runs' figures and the widest of their quartiles; None where none has the figure."""
    runs = [r for r in records if r.get("status") == "completed" and number(r, name) is not None]
    if not runs:
        return None

    def figures(key: str) -> list[float]:
        return [value for run in runs if (value := number(run, key)) is not None]

    middles = figures(name)
    low, high = figures(f"{name}_p25") or middles, figures(f"{name}_p75") or middles
    steps = sum(figures("step_time_s_n"))
    return Pooled(statistics.median(middles), min(low), max(high), int(steps), len(runs))


def share_a_peak(records: Iterable[Record]) -> bool:
    """Whether utilisations of these runs may be compared: they are shares of one peak."""
    peaks = [value for record in records if (value := number(record, "peak_flops_per_device")) is not None]
    return not peaks or max(peaks) <= _SAME_PEAK * min(peaks)


def is_above_peak(record: Record) -> bool:
    """Whether the run claims more FLOP/s than its device has: then the peak or the clock is wrong."""
    return any((number(record, name) or 0.0) > 1.0 for name in ("mfu", "hfu"))
