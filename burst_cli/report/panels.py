"""What is drawn, as plain values: panels with their points and a title that says what is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from burst_cli.figures import binary_bytes, count, grouped, percent, plain
from burst_cli.report.columns import BY_KEY
from burst_cli.report.compare import MOST_CURVES, Comparison
from burst_cli.report.records import (
    Record,
    method_of,
    pooled,
    run_rows,
    series,
    share_a_peak,
    thinned,
    tokens,
)
from cluster.values import number, rows, whole

GIB = 2.0**30
NEEDLES = "final_needle_by_depth"
SPEED, MFU, MEMORY = "tokens_per_s_per_device", "mfu", "peak_memory_bytes"
_LABELS = {SPEED: "tokens/s per device", MFU: "MFU, causal-aware (%)", MEMORY: "peak memory"}
_MOST_POINTS = 160
_SAME = 0.02  # memory that differs by less is the same


@dataclass(frozen=True)
class Point:
    """A figure at one length. low, high: quartiles of the steps; of several runs the widest of theirs.

    may_rank: whether enough steps were measured to say that it is better than another
    """

    x: float
    y: float
    low: float
    high: float
    may_rank: bool = True


@dataclass(frozen=True)
class Line:
    """The points of one method or run. style: its colour and marker, the same in every panel of a group.

    is_dashed: drawn so that an equal line below it is still seen.
    """

    name: str
    style: int
    points: tuple[Point, ...]
    is_dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One picture. kind: lines over lengths, dots per method, a scatter with its diagonal, or curves over steps.

    missing: (name, style, length) of what ran out of memory.
    """

    key: str
    kind: Literal["lines", "dots", "scatter", "curves"]
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...] = ()
    missing: tuple[tuple[str, int, int], ...] = ()

    @property
    def described(self) -> str:
        """What a picture holds, for people who do not see it; the figures are in the table below it."""
        lost = "".join(f"; {name} ran out of memory at {length} tokens" for name, _, length in self.missing)
        return f"{self.title}. {self.y_label} over {self.x_label} of {', '.join(one.name for one in self.lines)}{lost}"


def style_numbers(records: Iterable[Record]) -> dict[str, int]:
    """A number for every method of a report, for colours and markers that mean the same everywhere."""
    names = {name for record in records if (name := method_of(record))}
    return {name: index for index, name in enumerate(sorted(names))}


def _cells(records: Iterable[Record]) -> dict[str, dict[int, list[Record]]]:
    """Records by method, then by length, both sorted."""
    found: dict[str, dict[int, list[Record]]] = {}
    known = [(m, n, r) for r in records if (m := method_of(r)) is not None and (n := whole(r, "seq_len")) is not None]
    for method, length, record in sorted(known, key=lambda item: item[:2]):
        found.setdefault(method, {}).setdefault(length, []).append(record)
    return found


# --- figures over lengths ---------------------------------------------------------------------------------------------


def group_panels(records: Sequence[Record], styles: Mapping[str, int]) -> list[Panel]:
    """The panels that compare methods; none when there is nothing to compare."""
    lengths = {whole(record, "seq_len") for record in records} - {None}
    if len(lengths) < 2 and len({method_of(record) for record in records} - {None}) < 2:
        return []
    metrics = (SPEED, MFU, MEMORY) if share_a_peak(records) else (SPEED, MEMORY)
    panels = [_length_panel(metric, records, styles) for metric in metrics]
    return [panel for panel in (*panels, _prediction(records, styles)) if panel is not None]


def _length_panel(metric: str, records: Sequence[Record], styles: Mapping[str, int]) -> Panel | None:
    cells = _cells(records)
    own = [
        Line(name, styles[name], points)
        for name, lengths in cells.items()
        if (points := tuple(_points(metric, lengths)))
    ]
    if not own:
        return None
    lost = [(name, styles[name], length) for name, lengths in cells.items() for length in _lost(lengths)]
    factor, unit = {SPEED: (1.0, ""), MFU: (100.0, "")}.get(metric) or _memory_unit(
        point.high for line in own for point in line.points
    )
    label = _LABELS[metric] + unit
    several = len({length for lengths in cells.values() for length in lengths}) > 1
    return Panel(
        metric,
        "lines" if several else "dots",
        _best_title(metric, label[0].upper() + label[1:], own),
        "sequence length (tokens)",
        label,
        tuple(_scaled(own, factor)),
        tuple(lost),
    )


def _points(metric: str, lengths: Mapping[int, Sequence[Record]]) -> Iterator[Point]:
    for length, runs in lengths.items():
        if (found := pooled(runs, metric)) is not None:
            yield Point(length, *found[:3], may_rank=found.may_rank or metric == MEMORY)


def _lost(lengths: Mapping[int, Sequence[Record]]) -> list[int]:
    return [length for length, runs in lengths.items() if any(run.get("status") == "oom" for run in runs)]


def _memory_unit(sizes: Iterable[float]) -> tuple[float, str]:
    """(factor of bytes, unit in brackets): MiB when all lies below 1 GiB."""
    return (1 / GIB, " (GiB)") if max(sizes) >= GIB else (1024 / GIB, " (MiB)")


def _scaled(lines: Iterable[Line], factor: float, x_factor: float = 1.0) -> Iterator[Line]:
    for line in lines:
        points = (Point(p.x * x_factor, p.y * factor, p.low * factor, p.high * factor, p.may_rank) for p in line.points)
        yield Line(line.name, line.style, tuple(points))


def _best_title(metric: str, otherwise: str, lines: Sequence[Line]) -> str:
    """Who is best at the longest length that two methods reached, and by how much; silent within the spread."""
    by_length = grouped((point.x, (line.name, point)) for line in lines for point in line.points if point.may_rank)
    length = max((length for length, points in by_length.items() if len(points) > 1), default=0)
    if not length:
        return otherwise
    is_higher_better = BY_KEY[metric].better == "higher"
    (name, best), (second, other) = sorted(by_length[length], key=lambda one: one[1].y, reverse=is_higher_better)[:2]
    if best.y == 0 or other.y == 0:
        return otherwise
    at = tokens(length)
    if metric == MEMORY:
        if other.y / best.y - 1 < _SAME:
            return f"{name} and {second} need the same memory at {at}: {binary_bytes(best.y)}"
        return f"{name} needs least memory at {at}: {binary_bytes(best.y)}, {second} {binary_bytes(other.y)}"
    if best.low <= other.high and other.low <= best.high:
        return f"{otherwise}: {name} and {second} lie within their spread at {at}"
    if metric == MFU:
        return f"MFU at {at}: {percent(best.y)} with {name}, {percent(other.y)} with {second}"
    return f"{name} is fastest at {at}: {count(best.y)} tokens/s, {best.y / other.y:.3g}× {second}"


def _prediction(records: Sequence[Record], styles: Mapping[str, int]) -> Panel | None:
    """Predicted against measured peak; on a CPU what was measured is live tensors, on CUDA the allocator's peak."""
    found: dict[str, list[Point]] = {}
    for record in records:
        method, predicted = method_of(record), number(record, "predicted_peak_bytes")
        measured = number(record, "peak_tensor_bytes") or number(record, "peak_memory_bytes")
        if method and predicted and measured:
            found.setdefault(method, []).append(Point(predicted, measured, measured, measured))
    ratios = [100 * (point.x / point.y - 1) for points in found.values() for point in points]
    if len(ratios) < 2:
        return None
    lines = [Line(name, styles[name], tuple(found[name])) for name in sorted(found)]
    factor, unit = _memory_unit(size for line in lines for point in line.points for size in (point.x, point.y))
    return Panel(
        "prediction",
        "scatter",
        f"Memory predictions are {min(ratios):+.0f}% to {max(ratios):+.0f}% off what was measured",
        f"predicted peak{unit}",
        f"measured peak{unit}",
        tuple(_scaled(lines, factor, factor)),
    )


# --- curves over steps ------------------------------------------------------------------------------------------------


def run_panels(records: Iterable[Record]) -> Iterator[Panel]:
    """Loss and step time of the newest run of every method and length, at most 8, where they have several steps.

    records: the oldest first.
    """
    newest: dict[tuple[str | None, str], Record] = {}
    for record in records:
        if record.get("path") is not None and record.get("steps"):
            key = method_of(record), str(record.get("seq_len"))
            newest.pop(key, None)
            newest[key] = record
    chosen = list(newest.values())[-MOST_CURVES:]
    rows = [run_rows(Path(record["path"])) for record in chosen]
    names = _curve_names(chosen)
    titles: tuple[tuple[str, str, str, Callable[[list[Line]], str]], ...] = (
        ("loss", "training loss", "Training loss", _lowest_loss),
        ("step_time_s", "step time (s)", "Seconds per step over the run", lambda _: ": a flat line is a steady run"),
    )
    for metric, label, title, end in titles:
        lines = _curves(zip(names, (series(run, metric) for run in rows), strict=True))
        if lines:
            title += end(lines) if len(lines) > 1 else ""
            yield Panel(metric, "curves", title, "optimizer step", label, tuple(lines))


def comparison_panels(comparison: Comparison | None) -> list[Panel]:
    """The losses of both sides of a comparison over each other."""
    if comparison is None:
        return []
    lines = _curves(comparison.curves)
    title = "Training loss of both sides"
    return [Panel("compare", "curves", title, "optimizer step", "training loss", tuple(lines))] if lines else []


def _curves(named: Iterable[tuple[str, Sequence[tuple[int, float]]]]) -> list[Line]:
    """Those with more than one point; the second side of a comparison is dashed."""
    thin = [(name, thinned(points, _MOST_POINTS)) for name, points in named if len(points) > 1]
    return [
        Line(name, index, tuple(Point(x, y, y, y) for x, y in points), is_dashed=name.startswith("B "))
        for index, (name, points) in enumerate(thin)
    ]


def _lowest_loss(lines: Sequence[Line]) -> str:
    lowest = min(lines, key=lambda line: line.points[-1].y)
    return f"; lowest at its end: {lowest.name}, {plain(lowest.points[-1].y, 3)}"


def _curve_names(records: Sequence[Record]) -> list[str]:
    """A short name for every run, of what tells it from the others: method, length, and its id where those repeat."""
    several = len({record.get("seq_len") for record in records}) > 1
    names = []
    for record in records:
        length = whole(record, "seq_len")
        method = method_of(record) or "?"
        names.append(f"{method} {tokens(length)}" if several and length else method)
    ids = [record["run_id"][-6:] for record in records]
    return [f"{name} {own}" if names.count(name) > 1 else name for name, own in zip(names, ids, strict=True)]


# --- needles ----------------------------------------------------------------------------------------------------------


def needle_tables(records: Sequence[Record]) -> list[list[list[str]]]:
    """Depths against lengths, headings first: the share of right answers and the gain, of the newest run of every
    length that looked for needles. Empty where no two lengths did, whose own tables say it all.

    records: the oldest first.
    """
    newest = {size: record for record in records if (size := whole(record, "seq_len")) and rows(record, NEEDLES)}
    found = {
        (depth, length): row
        for length, record in newest.items()
        for row in rows(record, NEEDLES)
        if (depth := number(row, "depth")) is not None
    }
    lengths = sorted({length for _, length in found})
    if len(lengths) < 2:
        return []

    def cell(row: Record | None) -> str:
        gain, share = (None, None) if row is None else (number(row, "gain"), number(row, "accuracy"))
        return percent(share) if gain is None else f"{percent(share)}, {gain:+.2f}"

    headings = ["needles: right, gain", *(f"{tokens(length)} tokens" for length in lengths)]
    depths = sorted({depth for depth, _ in found})
    return [[headings, *([percent(one), *(cell(found.get((one, size))) for size in lengths)] for one in depths)]]
