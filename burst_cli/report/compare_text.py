"""A comparison in words and cells, for every writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from burst_cli.figures import DASH, binary_bytes, count, percent, plain, seconds
from burst_cli.report.compare import Comparison, Difference
from burst_cli.report.values import count_of

_SHOW: Mapping[str, Callable[[float | None], str]] = {
    "tokens_per_s_per_device": lambda value: count(value, 4),
    "step_time_s": seconds,
    "mfu": percent,
    "peak_memory_bytes": binary_bytes,
    "peak_tensor_bytes": binary_bytes,
}
_P_NOTE = (
    "p: how often chance alone gives a difference as large, for each figure by itself, not corrected for their number; "
    "a difference counts as shown below 0.05."
)
_NAMES = {
    "tokens_per_s_per_device": "tokens/s/device",
    "step_time_s": "step time",
    "mfu": "MFU (causal-aware)",
    "peak_memory_bytes": "peak memory",
    "peak_tensor_bytes": "peak tensors",
    "final_validation_loss": "validation loss",
}


def comparison_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Headings, then a row per figure."""
    headings = ("figure", "A", "B", "B against A", "95% interval", "p", "verdict")
    return [headings, *(_row(difference) for difference in comparison.differences)]


def sides_of(comparison: Comparison) -> tuple[str, str]:
    """What A and B are: the name that was given, and the run, or how many there are."""
    sides = ((comparison.a, comparison.runs_a), (comparison.b, comparison.runs_b))
    first, second = (f"{name}: {runs[0] if len(runs) == 1 else count_of('run', len(runs))}" for name, runs in sides)
    return first, second


def config_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Headings, then a row per setting that differs."""
    rows = [(one.key, one.a, one.b, "yes" if one.matters else "no") for one in comparison.config]
    return [("setting", "A", "B", "figures may follow from it"), *rows]


def tests_of(comparison: Comparison) -> Sequence[str]:
    """How the p values came about, each method once, and how to read them."""
    methods: dict[str, list[str]] = {}
    for one in comparison.differences:
        if one.method is not None:
            methods.setdefault(one.method, []).append(_NAMES.get(one.metric, one.metric))
    lines = [f"{', '.join(names)}: {method}." for method, names in methods.items()]
    return [*lines, _P_NOTE] if lines else lines


def _row(one: Difference) -> tuple[str, ...]:
    show = _SHOW.get(one.metric, plain)
    interval = DASH if one.low is None or one.high is None else f"{_change(one.low)} … {_change(one.high)}"
    return (
        _NAMES.get(one.metric, one.metric),
        show(one.a),
        show(one.b),
        _change(one.change),
        interval,
        DASH if one.p is None else "< 0.001" if one.p < 0.001 else f"{one.p:.3f}",
        one.verdict,
    )


def _change(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{100 * value:+.2f}%" if abs(value) < 0.1 else f"{100 * value:+.1f}%"
