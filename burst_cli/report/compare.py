"""Two runs, or two groups of runs, figure by figure: how much they differ, and whether that is more than chance."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from burst_cli.figures import flops_per_s
from burst_cli.report.config_diff import ConfigDifference, config_differences
from burst_cli.report.metrics_file import metric_rows, run_rows, series
from burst_cli.report.values import PEAK_FIGURES, Record, number, run_name, share_a_peak, whole

SIGNIFICANT = 0.05
# Figure -> which direction is better. Those of single steps first, then those of which a run has one.
STEP_METRICS: Mapping[str, str] = {"tokens_per_s_per_device": "higher", "step_time_s": "lower", "mfu": "higher"}
LOSS = "loss"
RUN_METRICS: Mapping[str, str] = {
    "peak_memory_bytes": "lower",
    "peak_tensor_bytes": "lower",
    "final_validation_loss": "lower",
}
Curve = tuple[str, list[tuple[int, float]]]  # name of a run, (step, loss)


@dataclass(frozen=True)
class Difference:
    """One figure of both sides. change: (b - a) / a, with its 95% interval; None where it cannot be had."""

    metric: str
    a: float | None
    b: float | None
    change: float | None
    low: float | None
    high: float | None
    p: float | None
    verdict: str
    method: str | None


@dataclass(frozen=True)
class Comparison:
    """A against B. warnings: what makes the comparison mean less than it seems to."""

    a: str
    b: str
    runs_a: tuple[str, ...]
    runs_b: tuple[str, ...]
    differences: tuple[Difference, ...]
    config: tuple[ConfigDifference, ...]
    warnings: tuple[str, ...]
    curves_a: tuple[Curve, ...]
    curves_b: tuple[Curve, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the curves."""
        keys = ("a", "b", "runs_a", "runs_b", "warnings")
        return {
            **{key: getattr(self, key) for key in keys},
            "differences": [asdict(difference) for difference in self.differences],
            "config": [asdict(difference) for difference in self.config],
        }


@dataclass(frozen=True)
class _Side:
    """One side: its records, and the rows of each run after warm-up."""

    name: str
    records: Sequence[Record]
    rows: Sequence[Sequence[Record]]

    def steps(self, metric: str) -> list[float]:
        return [value for rows in self.rows for _, value in series(rows, metric)]

    def run_figures(self, metric: str) -> list[float]:
        return [value for record in self.records if (value := number(record, metric)) is not None]


def compare(a: tuple[str, Sequence[Record]], b: tuple[str, Sequence[Record]]) -> Comparison:
    """The comparison of two named sets of runs, none empty; reads their metrics.jsonl and config.yaml."""
    first, second = _Side(*a, [_measured(r) for r in a[1]]), _Side(*b, [_measured(r) for r in b[1]])
    config, problems = config_differences(*([Path(r["path"]) for r in side.records] for side in (first, second)))
    one_peak = share_a_peak([*first.records, *second.records])
    metrics = {name: better for name, better in STEP_METRICS.items() if one_peak or name not in PEAK_FIGURES}
    differences = [_step_difference(metric, better, first, second) for metric, better in metrics.items()]
    differences.append(_loss_difference(first, second))
    differences += [_run_difference(metric, better, first, second) for metric, better in RUN_METRICS.items()]
    return Comparison(
        first.name,
        second.name,
        tuple(map(run_name, first.records)),
        tuple(map(run_name, second.records)),
        tuple(one for one in differences if one.a is not None or one.b is not None),
        config,
        (*problems, *_warnings(first, second, config)),
        tuple(map(_curve, first.records)),
        tuple(map(_curve, second.records)),
    )


def _measured(record: Record) -> list[dict[str, Any]]:
    rows = metric_rows(Path(record["path"]) / "metrics.jsonl", all_rows=True)
    return rows[whole(record, "warmup_metric_steps") or 0 :]


def _curve(record: Record) -> Curve:
    rows = run_rows(Path(record["path"]))
    return run_name(record), series(rows, LOSS)


def _step_difference(metric: str, better: str, a: _Side, b: _Side) -> Difference:
    """Over runs where each side has several, else over the steps of one run each."""
    if min(len(a.records), len(b.records)) > 1:
        return _run_difference(metric, better, a, b)
    from burst_cli.report.bootstrap import compare_steps

    first, second = a.steps(metric), b.steps(metric)
    return _difference(metric, better, _median(first), _median(second), lambda: compare_steps(first, second))


def _run_difference(metric: str, better: str, a: _Side, b: _Side) -> Difference:
    first, second = a.run_figures(metric), b.run_figures(metric)
    if min(len(first), len(second)) < 2:
        return _difference(metric, better, _median(first), _median(second), None)
    from burst_cli.report.bootstrap import compare_runs, smallest_p

    found = _difference(metric, better, _mean(first), _mean(second), lambda: compare_runs(first, second))
    least = smallest_p(len(first), len(second))
    if least <= SIGNIFICANT or found.p is None:
        return found
    words = f"too few runs to tell: even the clearest difference has p = {least:.2g}"
    return Difference(**{**asdict(found), "verdict": words})


def _loss_difference(a: _Side, b: _Side) -> Difference:
    """Losses at the same steps, over the last quarter of those that both have: their noise is mostly the data's."""
    from burst_cli.report.bootstrap import LEAST_STEPS, compare_paired

    means = [_mean_by_step(side.rows) for side in (a, b)]
    common = sorted(means[0].keys() & means[1].keys())
    last = common[-max(len(common) // 4, LEAST_STEPS) :]
    first, second = ([mean[step] for step in last] for mean in means)
    name = "loss, last quarter"
    return _difference(name, "lower", _mean(first), _mean(second), lambda: compare_paired(first, second))


def _difference(
    metric: str, better: str, a: float | None, b: float | None, test: Callable[[], Any] | None
) -> Difference:
    if a is None or b is None:
        return Difference(metric, a, b, None, None, None, None, "not measured on both sides", None)
    change = (b - a) / a if a else None
    found = test() if test is not None else None
    if found is None:
        words = "one value per side: not tested" if test is None else "too few steps to tell"
        return Difference(metric, a, b, change, None, None, None, words, None)
    if a == b and found.low == found.high == 0:
        return Difference(metric, a, b, change, 0.0, 0.0, 1.0, "equal", found.method)
    low, high = (found.low / abs(a), found.high / abs(a)) if a else (None, None)
    is_shown = found.p < SIGNIFICANT and (found.low > 0 or found.high < 0)
    is_better = (b > a) == (better == "higher")
    verdict = f"B is {'better' if is_better else 'worse'}" if is_shown else "no difference shown"
    return Difference(metric, a, b, change, low, high, found.p, verdict, found.method)


def _warnings(a: _Side, b: _Side, config: Sequence[ConfigDifference]) -> list[str]:
    found = []
    if any(difference.matters for difference in config):
        keys = [difference.key for difference in config if difference.matters]
        shown = ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
        found.append(f"the configurations differ in what matters: {shown}")
    for name, words in (("hardware", "hardware"), ("world_size", "numbers of ranks")):
        values = [sorted({str(record.get(name)) for record in side.records}) for side in (a, b)]
        if values[0] != values[1]:
            found.append(f"different {words}: {', '.join(values[0])} against {', '.join(values[1])}")
    if not share_a_peak([*a.records, *b.records]):
        peaks = [value for r in (*a.records, *b.records) if (value := number(r, "peak_flops_per_device")) is not None]
        found.append(
            f"MFU is against different peaks, {flops_per_s(min(peaks))} to {flops_per_s(max(peaks))} per device, so "
            "it is not compared; set train.peak_flops_per_device"
        )
    if min(len(a.records), len(b.records)) < 2:
        found.append(
            "one run on a side: the test tells whether the steps of these runs differ; how much a run differs from "
            "its own repetition is not in it"
        )
    found += [f"{run_name(r)} is {r.get('status')}" for r in (*a.records, *b.records) if r.get("status") != "completed"]
    return found


def _mean_by_step(runs: Sequence[Sequence[Record]]) -> dict[int, float]:
    """Mean loss of the runs at every step that all of them have."""
    curves = [dict(series(rows, LOSS)) for rows in runs]
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return {step: statistics.fmean(curve[step] for curve in curves) for step in common}


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
