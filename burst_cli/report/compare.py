"""Two runs, or two groups of runs, figure by figure: how much they differ, and whether that is more than chance."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst_cli.figures import DASH, count, count_of, grouped, plain, rate
from burst_cli.report.columns import BY_KEY
from burst_cli.report.records import PEAK_FIGURES, Record, run_name, run_rows, series, share_a_peak, status_of
from cluster.remote_text import one_line
from cluster.values import number, text, whole
from engine.config.errors import ConfigError
from engine.config.settings import config_to_dict, load_config

if TYPE_CHECKING:
    from burst_cli.report.bootstrap import Estimate

SIGNIFICANT = 0.05
STEP_METRICS = ("tokens_per_s_per_device", "step_time_s", "mfu")  # of single steps; a run has one each of the others
RUN_METRICS = ("peak_memory_bytes", "peak_tensor_bytes", "final_validation_loss")
LOSS = "loss, last quarter"
_P_NOTE = (
    "p: how often chance alone gives a difference as large, for each figure by itself, not corrected for their number; "
    "a difference counts as shown below 0.05."
)
# Neither the arithmetic nor its speed follows from these, but for the four of the cluster.
_HARMLESS = (
    "exp",
    "train.tensorboard",
    "train.eval_interval_steps",
    "train.eval_samples",
    "data.prepared_dir",
    "cluster.",
)
_TELLING = ("cluster.num_nodes", "cluster.ranks_per_node", "cluster.backend", "cluster.threads_per_rank")
_SECRET = ("cluster.environment",)  # values may be secrets, and reports are passed on
MOST_CURVES = 8  # in one picture; more cannot be told apart
Curve = tuple[str, list[tuple[int, float]]]  # name of a run, (step, loss)


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
    method: str | None = None

    @property
    def name(self) -> str:
        """The figure as tables call it."""
        return BY_KEY[self.metric].heading if self.metric in BY_KEY else self.metric

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of a comparison."""
        show = BY_KEY[self.metric].show if self.metric in BY_KEY else plain
        if show is None or show is count:
            show = _four_digits
        interval = DASH if self.low is None or self.high is None else f"{_change(self.low)} … {_change(self.high)}"
        p = DASH if self.p is None else "< 0.001" if self.p < 0.001 else f"{self.p:.3f}"
        return (self.name, show(self.a), show(self.b), _change(self.change), interval, p, self.verdict)


@dataclass(frozen=True)
class ConfigDifference:
    """One setting that is not the same on both sides; a, b: its values there. matters: figures may follow from it."""

    key: str
    a: str
    b: str
    matters: bool


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
    curves: tuple[Curve, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the curves."""
        return {key: value for key, value in asdict(replace(self, curves=())).items() if key != "curves"}

    @property
    def sides(self) -> tuple[str, str]:
        """What A and B are: the name that was given, and the run, or how many there are."""
        first, second = (
            f"{name}: {runs[0] if len(runs) == 1 else count_of('run', len(runs))}"
            for name, runs in ((self.a, self.runs_a), (self.b, self.runs_b))
        )
        return first, second

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Headings, then a row per figure."""
        headings = ("figure", "A", "B", "B against A", "95% interval", "p", "verdict")
        return [headings, *(one.cells for one in self.differences)]

    @property
    def config_rows(self) -> list[tuple[str, ...]]:
        """Headings, then a row per setting that differs; empty where none does."""
        rows = [(one.key, one.a, one.b, "yes" if one.matters else "no") for one in self.config]
        return [("setting", "A", "B", "figures may follow from it"), *rows] if rows else []

    @property
    def tests(self) -> list[str]:
        """How the p values came about, each method once, and how to read them."""
        methods = grouped((one.method, one.name) for one in self.differences if one.method is not None)
        lines = [f"{', '.join(names)}: {method}." for method, names in methods.items()]
        return [*lines, _P_NOTE] if lines else lines


@dataclass(frozen=True)
class _Side:
    """One side: its records, and the rows of each run."""

    name: str
    records: Sequence[Record]
    rows: Sequence[Sequence[Record]]

    @property
    def measured(self) -> list[Sequence[Record]]:
        """The rows after warm-up."""
        pairs = zip(self.rows, self.records, strict=True)
        return [rows[whole(record, "warmup_metric_steps") or 0 :] for rows, record in pairs]

    def steps(self, metric: str) -> list[float]:
        return [value for rows in self.measured for _, value in series(rows, metric)]

    def run_figures(self, metric: str) -> list[float]:
        return [value for record in self.records if (value := number(record, metric)) is not None]

    @property
    def mean_losses(self) -> dict[int, float]:
        """Mean loss of the runs at every step that all of them have."""
        curves = [dict(series(rows, "loss")) for rows in self.measured]
        common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
        return {step: statistics.fmean(curve[step] for curve in curves) for step in common}

    def curves(self, side: str) -> list[Curve]:
        """Of its newest runs."""
        pairs = list(zip(self.records, self.rows, strict=True))[-MOST_CURVES // 2 :]
        return [(f"{side} {run_name(record)}", series(rows, "loss")) for record, rows in pairs]


def compare(a: tuple[str, Sequence[Record]], b: tuple[str, Sequence[Record]]) -> Comparison:
    """The comparison of two named sets of runs, none empty; reads their metrics.jsonl and config.yaml."""
    first, second = (
        _Side(name, records, [run_rows(Path(record["path"])) for record in records]) for name, records in (a, b)
    )
    config, problems = config_differences(*([Path(r["path"]) for r in side.records] for side in (first, second)))
    one_peak = share_a_peak([*first.records, *second.records])
    metrics = [name for name in STEP_METRICS if one_peak or name not in PEAK_FIGURES]
    differences = [_step_difference(metric, first, second) for metric in metrics]
    differences.append(_loss_difference(first, second))
    differences += [_run_difference(metric, first, second) for metric in RUN_METRICS]
    return Comparison(
        first.name,
        second.name,
        tuple(map(run_name, first.records)),
        tuple(map(run_name, second.records)),
        tuple(one for one in differences if one.a is not None or one.b is not None),
        config,
        (*problems, *_warnings(first, second, config, one_peak=one_peak)),
        (*first.curves("A"), *second.curves("B")),
    )


def _step_difference(metric: str, a: _Side, b: _Side) -> Difference:
    """Over runs where each side has several, else over the steps of one run each."""
    if min(len(a.records), len(b.records)) > 1:
        return _run_difference(metric, a, b)
    from burst_cli.report.bootstrap import compare_steps

    first, second = a.steps(metric), b.steps(metric)
    return _difference(metric, _median(first), _median(second), lambda: compare_steps(first, second))


def _run_difference(metric: str, a: _Side, b: _Side) -> Difference:
    first, second = a.run_figures(metric), b.run_figures(metric)
    if min(len(first), len(second)) < 2:
        return _difference(metric, _mean(first), _mean(second), None)
    from burst_cli.report.bootstrap import compare_runs, smallest_p

    found = _difference(metric, _mean(first), _mean(second), lambda: compare_runs(first, second))
    least = smallest_p(len(first), len(second))
    if least <= SIGNIFICANT:
        return found
    return replace(found, verdict=f"too few runs to tell: even the clearest difference has p = {least:.2g}")


def _loss_difference(a: _Side, b: _Side) -> Difference:
    """Losses at the same steps, over the last quarter of those that both have: their noise is mostly the data's."""
    from burst_cli.report.bootstrap import LEAST_STEPS, compare_paired

    means = a.mean_losses, b.mean_losses
    common = sorted(means[0].keys() & means[1].keys())
    last = common[-max(len(common) // 4, LEAST_STEPS) :]
    first, second = ([mean[step] for step in last] for mean in means)
    return _difference(LOSS, _mean(first), _mean(second), lambda: compare_paired(first, second))


def _difference(
    metric: str, a: float | None, b: float | None, test: Callable[[], Estimate | None] | None
) -> Difference:
    if a is None or b is None:
        return Difference(metric, a, b)
    change = (b - a) / a if a else None
    found = test() if test is not None else None
    if found is None:
        words = "one value per side: not tested" if test is None else "too few steps to tell"
        return Difference(metric, a, b, change, verdict=words)
    if a == b and found.low == found.high == 0:
        return Difference(metric, a, b, change, 0.0, 0.0, 1.0, "equal", found.method)
    low, high = (found.low / abs(a), found.high / abs(a)) if a else (None, None)
    is_shown = found.p < SIGNIFICANT and (found.low > 0 or found.high < 0)
    is_higher_better = metric != LOSS and BY_KEY[metric].better == "higher"
    verdict = f"B is {'better' if (b > a) == is_higher_better else 'worse'}" if is_shown else "no difference shown"
    return Difference(metric, a, b, change, low, high, found.p, verdict, found.method)


def _warnings(a: _Side, b: _Side, config: Sequence[ConfigDifference], *, one_peak: bool) -> list[str]:
    found = []
    records = [*a.records, *b.records]
    if keys := [difference.key for difference in config if difference.matters]:
        shown = ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
        found.append(f"the configurations differ in what matters: {shown}")
    for name, words in (("hardware", "hardware"), ("world_size", "numbers of ranks")):
        values = [sorted({text(record, name) or DASH for record in side.records}) for side in (a, b)]
        if values[0] != values[1]:
            found.append(f"different {words}: {', '.join(values[0])} against {', '.join(values[1])}")
    if not one_peak:
        peaks = [value for record in records if (value := number(record, "peak_flops_per_device")) is not None]
        least, most = rate(min(peaks), "FLOP/s"), rate(max(peaks), "FLOP/s")
        found.append(
            f"MFU is against different peaks, {least} to {most} per device, so it is not compared; "
            "set train.peak_flops_per_device"
        )
    if min(len(a.records), len(b.records)) < 2:
        found.append(
            "one run on a side: the test tells whether the steps of these runs differ; how much a run differs from "
            "its own repetition is not in it"
        )
    return found + [f"{run_name(r)} is {status_of(r)}" for r in records if r.get("status") != "completed"]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _four_digits(value: float | None) -> str:
    return count(value, 4)


def _change(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{100 * value:+.2f}%" if abs(value) < 0.1 else f"{100 * value:+.1f}%"


# --- settings ---------------------------------------------------------------------------------------------------------


def config_differences(a: Sequence[Path], b: Sequence[Path]) -> tuple[tuple[ConfigDifference, ...], list[str]]:
    """(settings whose values differ between or within the sides, what could not be read); takes run folders."""
    problems: list[str] = []
    first, second = (_values(folders, problems) for folders in (a, b))
    if not first or not second:
        return (), problems
    found = []
    for key in dict.fromkeys([*first, *second]):
        values = first.get(key, {}), second.get(key, {})
        if values[0] != values[1] or max(map(len, values)) > 1:
            old, new = (one_line(" or ".join(side)) if side else "absent" for side in values)
            is_harmless = any(key == name or (name[-1] == "." and key.startswith(name)) for name in _HARMLESS)
            found.append(ConfigDifference(key, old, new, key in _TELLING or not is_harmless))
    return tuple(found), problems


def _values(folders: Sequence[Path], problems: list[str]) -> dict[str, dict[str, None]]:
    """Every dotted key with the values, as JSON, that it has in these runs; of what may be secret the names only."""
    found: dict[str, dict[str, None]] = {}
    for folder in folders:
        try:
            config = config_to_dict(load_config(folder / "config.yaml"))
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        for key, value in _flat(config, ""):
            shown = [setting.partition("=")[0] for setting in value] if key in _SECRET else value
            found.setdefault(key, {})[json.dumps(shown, sort_keys=True, default=str)] = None
    return found


def _flat(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return pairs
