"""Curves over steps of the runs that a report selects for them: loss and step time, read from metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from burst_cli.figures import plain
from burst_cli.report.compare import Comparison
from burst_cli.report.metrics_file import run_rows, series, thinned
from burst_cli.report.panels import Panel, curve_names, curve_panel
from burst_cli.report.select import Group
from burst_cli.report.values import Record, method_of

MOST_CURVES = 8  # more cannot be told apart
_MOST_POINTS = 160


def chosen_runs(group: Group) -> list[Record]:
    """The newest run of every method and length, at most 8 of them and the newest; oldest first."""
    newest: dict[tuple[str | None, str], Record] = {}
    for record in group.records:
        if record.get("path") is not None and record.get("steps"):
            newest[method_of(record), str(record.get("seq_len"))] = record
    return sorted(newest.values(), key=lambda record: str(record.get("run_id")))[-MOST_CURVES:]


def run_panels(group: Group) -> Iterator[Panel]:
    """Loss and step time of the chosen runs of a group, where they have more than one step."""
    records = chosen_runs(group)
    rows = [run_rows(Path(record["path"])) for record in records]
    names = curve_names(records)
    for metric, label in (("loss", "training loss"), ("step_time_s", "step time (s)")):
        curves = [(name, thinned(series(run, metric), _MOST_POINTS)) for name, run in zip(names, rows, strict=True)]
        curves = [(name, points) for name, points in curves if len(points) > 1]
        if curves:
            yield curve_panel(metric, _title(metric, curves), label, curves)


def comparison_panel(comparison: Comparison) -> Panel | None:
    """The losses of both sides of a comparison over each other."""
    sides = (("A", comparison.curves_a), ("B", comparison.curves_b))
    curves = [
        (f"{side} {name}", thinned(points, _MOST_POINTS))
        for side, found in sides
        for name, points in found[-MOST_CURVES // 2 :]
        if len(points) > 1
    ]
    return curve_panel("compare", "Training loss of both sides", "training loss", curves) if curves else None


def _title(metric: str, curves: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    if len(curves) == 1:
        return "Training loss" if metric == "loss" else "Seconds per step over the run"
    if metric == "loss":
        name, points = min(curves, key=lambda curve: curve[1][-1][1])
        return f"Training loss; lowest at its end: {name}, {plain(points[-1][1], 3)}"
    return "Seconds per step over the run: a flat line is a steady run"
