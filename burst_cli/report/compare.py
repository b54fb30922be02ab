"""Two runs, figure by figure: how much they differ, and whether that is more than chance."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst_cli.report.columns import BY_KEY
from burst_cli.report.naming import data_keys, data_names
from burst_cli.report.records import Record, run_name, run_rows, series, share_a_peak, status_of
from cluster.remote_text import number, one_line, text, whole
from engine.config.errors import ConfigError
from engine.runs.figures import DASH, count, plain, rate

if TYPE_CHECKING:
    from burst_cli.report.bootstrap import Estimate

SIGNIFICANT = 0.05
STEP_METRICS = ("tokens_per_s_per_device", "step_time_s", "mfu")  # of single steps; a run has one each of the others
_VALIDATION = "final_validation_loss"
RUN_METRICS = ("peak_memory_bytes", "peak_tensor_bytes", _VALIDATION)
LOSS = "loss, last quarter"
HEADINGS = ("figure", "A", "B", "B against A", "95% interval", "p", "verdict")
NOTES = (
    "Interval and p: circular block bootstrap of the medians of the steps after warm-up; of losses, of the mean "
    "difference at the same steps. It tells whether the steps of these two runs differ: how much a run differs from "
    "its own repetition is not in it.",
    "p: how often chance alone gives a difference as large, for each figure by itself, not corrected for their number; "
    "a difference counts as shown below 0.05.",
)


@dataclass(frozen=True)
class Difference:
    """One figure of both sides. change: (b - a) / a, with its 95% interval; None where it cannot be had."""

    metric: str
    a: float | None
    b: float | None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    verdict: str = "not measured on both sides"

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of a comparison, below HEADINGS."""
        column = BY_KEY.get(self.metric)
        show = column.show if column is not None else plain
        if show is None or show is count:
            show = _four_digits
        interval = DASH if self.low is None or self.high is None else f"{_change(self.low)} … {_change(self.high)}"
        p = DASH if self.p is None else "< 0.001" if self.p < 0.001 else f"{self.p:.3f}"
        name = column.heading if column is not None else self.metric
        return (name, show(self.a), show(self.b), _change(self.change), interval, p, self.verdict)


@dataclass(frozen=True)
class Comparison:
    """A against B, two records. warnings: what makes the comparison mean less than it seems to."""

    a: Record
    b: Record
    differences: tuple[Difference, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "a": run_name(self.a),
            "b": run_name(self.b),
            "differences": [asdict(one) for one in self.differences],
            "warnings": list(self.warnings),
        }


def compare(a: Record, b: Record) -> Comparison:
    """The comparison of two runs; reads their metrics.jsonl. Raises ConfigError for the same one."""
    if a["path"] == b["path"]:
        raise ConfigError(f"--compare: A and B both mean {run_name(a)}")
    one_peak = share_a_peak([a, b])
    rows = [run_rows(Path(one["path"]))[whole(one, "warmup_metric_steps") or 0 :] for one in (a, b)]
    data_a, data_b = data_keys([a, b])
    is_same_data = data_a == data_b or None in (data_a, data_b)
    metrics = [name for name in STEP_METRICS if one_peak or name != "mfu"]
    differences = list(_step_differences(rows, metrics, has_losses=is_same_data))
    for name in RUN_METRICS:
        if name == _VALIDATION and not is_same_data:
            continue
        first, second = number(a, name), number(b, name)
        if first is not None and second is not None:
            change = (second - first) / first if first else None
            differences.append(Difference(name, first, second, change, verdict="one value per side: not tested"))
        elif first is not None or second is not None:
            differences.append(Difference(name, first, second))
    data = [] if is_same_data else [f"different data ({' against '.join(data_names([[a], [b]]))}): no losses compared"]
    return Comparison(a, b, tuple(differences), (*data, *_warnings(a, b, one_peak=one_peak)))


def _step_differences(
    sides: Sequence[Sequence[Record]], names: Iterable[str], *, has_losses: bool
) -> Iterator[Difference]:
    """Of medians over the steps; of losses the mean at the same steps, over the last quarter of those that both have,
    because their noise is mostly the data's. sides: the rows of each after warm-up; has_losses: of the same data."""
    from burst_cli.report.bootstrap import LEAST_STEPS, compare_paired, compare_steps

    for name in names:
        first, second = ([value for _, value in series(rows, name)] for rows in sides)
        if first and second:
            test = compare_steps(first, second)
            yield _difference(name, statistics.median(first), statistics.median(second), test)
    curves = [dict(series(rows, "loss")) for rows in sides]
    common = sorted(curves[0].keys() & curves[1].keys())
    if has_losses and (last := common[-max(len(common) // 4, LEAST_STEPS) :]):
        first, second = ([curve[step] for step in last] for curve in curves)
        yield _difference(LOSS, statistics.fmean(first), statistics.fmean(second), compare_paired(first, second))


def _difference(metric: str, a: float, b: float, found: Estimate | None) -> Difference:
    change = (b - a) / a if a else None
    if found is None:
        return Difference(metric, a, b, change, verdict="too few steps to tell")
    if a == b and found.low == found.high == 0:
        return Difference(metric, a, b, change, 0.0, 0.0, 1.0, "equal")
    low, high = (found.low / abs(a), found.high / abs(a)) if a else (None, None)
    is_shown = found.p < SIGNIFICANT and (found.low > 0 or found.high < 0)
    is_higher_better = metric != LOSS and BY_KEY[metric].is_higher_better
    verdict = f"B is {'better' if (b > a) == is_higher_better else 'worse'}" if is_shown else "no difference shown"
    return Difference(metric, a, b, change, low, high, found.p, verdict)


def _warnings(a: Record, b: Record, *, one_peak: bool) -> list[str]:
    found = []
    if text(a, "config_fingerprint") != text(b, "config_fingerprint"):
        command = shlex.join(["diff", *(f"{record['path']}/config.yaml" for record in (a, b))])
        found.append(f"the configurations differ: {one_line(command, 4096)}")
    for name, words in (("hardware", "hardware"), ("world_size", "numbers of ranks")):
        values = [text(record, name) or DASH for record in (a, b)]
        if values[0] != values[1]:
            found.append(f"different {words}: {values[0]} against {values[1]}")
    if not one_peak:
        peaks = (rate(number(record, "peak_flops_per_device"), "FLOP/s") for record in (a, b))
        found.append(
            f"MFU is against different peaks, {' and '.join(peaks)} per device, so it is not compared; "
            "set train.peak_flops_per_device"
        )
    return found + [f"{run_name(r)} is {status_of(r)}" for r in (a, b) if r.get("status") != "completed"]


def _four_digits(value: float | None) -> str:
    return count(value, 4)


def _change(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{100 * value:+.2f}%" if abs(value) < 0.1 else f"{100 * value:+.1f}%"
