"""What is drawn, as plain values: panels with their points and a title that says what is seen. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from burst_cli.figures import binary_bytes, count, percent
from burst_cli.report.published import Published
from burst_cli.report.select import Group
from burst_cli.report.values import Record, method_of, number, pooled, share_a_peak, text, tokens, whole

GIB = 2.0**30
PUBLISHED = "published: "
DASHED = "B "  # begins the names of the second side of a comparison
_LABELS, _LONGEST_LABEL = 4, 16
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
    is_published: bool = False
    is_dashed: bool = False


@dataclass(frozen=True)
class Cell:
    """One cell of a grid. strength: how full its colour is, 0 to 1."""

    column: str
    row: str
    strength: float
    text: str


@dataclass(frozen=True)
class Panel:
    """One picture. kind: lines over lengths, dots per method, a scatter with its diagonal, curves over steps, or a
    grid of `cells`, whose columns and rows come in the order in which they are first named.

    missing: (name, style, length) of what ran out of memory. note: where published figures in it come from.
    """

    key: str
    kind: Literal["lines", "dots", "scatter", "curves", "grid"]
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    missing: tuple[tuple[str, int, int], ...] = ()
    note: str | None = None
    cells: tuple[Cell, ...] = ()

    @property
    def width_of_names(self) -> int:
        """Characters of the longest name."""
        return max((len(line.name) for line in self.lines), default=0)

    @property
    def is_labelled(self) -> bool:
        """Whether each line carries its name at its end: few lines, short names."""
        return self.kind == "lines" and len(self.lines) <= _LABELS and self.width_of_names <= _LONGEST_LABEL

    @property
    def needs_legend(self) -> bool:
        """Whether names are told nowhere else."""
        return (
            self.kind not in ("dots", "grid")
            and not self.is_labelled
            and not (self.kind == "curves" and len(self.lines) == 1)
        )


@dataclass(frozen=True)
class Figure:
    """What a panel over lengths shows. factor: from the record's unit to the axis; best: which end of it is good."""

    metric: str
    label: str
    factor: float
    best: Literal["max", "min"]


SPEED = Figure("tokens_per_s_per_device", "tokens/s per device", 1.0, "max")
MFU = Figure("mfu", "MFU, causal-aware (%)", 100.0, "max")
MEMORY = Figure("peak_memory_bytes", "peak memory (GiB)", 1 / GIB, "min")


def style_numbers(records: Iterable[Record]) -> dict[str, int]:
    """A number for every method of a report, for colours and markers that mean the same everywhere."""
    names = {name for record in records if (name := method_of(record))}
    return {name: index for index, name in enumerate(sorted(names))}


def group_panels(group: Group, styles: Mapping[str, int], published: Sequence[Published] = ()) -> list[Panel]:
    """The panels that compare the methods of a group; none when there is nothing to compare."""
    lengths = {whole(record, "seq_len") for record in group.records} - {None}
    methods = {method_of(record) for record in group.records} - {None}
    if len(lengths) < 2 and len(methods) < 2:
        return []
    alike = _alike(group, published)
    figures = (SPEED, MFU, MEMORY) if share_a_peak(group.records) else (SPEED, MEMORY)
    panels = [_length_panel(figure, group.records, styles, alike) for figure in figures]
    panels.append(_prediction(group.records, styles))
    return [panel for panel in panels if panel is not None]


def _length_panel(
    figure: Figure, records: Sequence[Record], styles: Mapping[str, int], published: Sequence[Published]
) -> Panel | None:
    lines = _lines(figure, records, styles) + _published_lines(figure, published, len(styles))
    lengths = {whole(record, "seq_len") for record in records} - {None}
    missing = tuple(
        dict.fromkeys(
            (method, styles[method], length)
            for record in records
            if record.get("status") == "oom" and (method := method_of(record)) and (length := whole(record, "seq_len"))
        )
    )
    if not lines:
        return None
    panel = Panel(
        figure.metric,
        "lines" if len(lengths) > 1 or any(line.is_published for line in lines) else "dots",
        _best_title(figure, [line for line in lines if not line.is_published]),
        "sequence length (tokens)",
        figure.label,
        tuple(lines),
        missing,
        _origin(published) if any(line.is_published for line in lines) else None,
    )
    return in_fitting_unit(panel) if figure is MEMORY else panel


def _origin(published: Sequence[Published]) -> str:
    """Whose the hollow marks are, and what they ran on."""
    systems = dict.fromkeys(f"{row.system}, {row.gpus} × {row.hardware}" for row in published)
    return f"published (hollow): {'; '.join(systems)}"


def _lines(figure: Figure, records: Sequence[Record], styles: Mapping[str, int]) -> list[Line]:
    cells: dict[str, dict[int, list[Record]]] = {}
    for record in records:
        method, length = method_of(record), whole(record, "seq_len")
        if method and length and pooled([record], figure.metric) is not None:
            cells.setdefault(method, {}).setdefault(length, []).append(record)
    return [
        Line(name, styles[name], tuple(_point(figure, length, runs) for length, runs in sorted(cells[name].items())))
        for name in sorted(cells)
    ]


def _point(figure: Figure, length: int, runs: Sequence[Record]) -> Point:
    found = pooled(runs, figure.metric)
    assert found is not None
    middle, low, high = (value * figure.factor for value in found[:3])
    return Point(length, middle, low, high, found.may_rank or figure is MEMORY)


def _alike(group: Group, published: Sequence[Published]) -> list[Published]:
    """Published rows of a model of the same size, named like it: `7b` in llama7b, not in 17b."""
    name = f"{group.model} {group.exp}".lower()
    return [
        row
        for row in published
        if row.seq_len and row.method and row.model and re.search(rf"(?<!\d){re.escape(row.model.lower())}", name)
    ]


def _published_lines(figure: Figure, rows: Sequence[Published], first_style: int) -> list[Line]:
    """Points of others, each method with a style of its own that no run has."""
    names = list(dict.fromkeys(row.method for row in rows if row.method))
    lines = []
    for index, name in enumerate(names):
        points = [
            Point(row.seq_len, value, value, value)
            for row in rows
            if row.method == name and row.seq_len and (value := _published_value(figure, row)) is not None
        ]
        if points:
            lines.append(Line(f"{PUBLISHED}{name}", first_style + index, tuple(points), is_published=True))
    return lines


def _published_value(figure: Figure, row: Published) -> float | None:
    if figure is MEMORY:
        return row.peak_memory_gb
    value = row.mfu if figure is MFU else row.tokens_per_s_per_device
    return None if value is None else value * figure.factor


def _best_title(figure: Figure, lines: Sequence[Line]) -> str:
    """Who is best at the longest length that two methods reached, and by how much; silent within the spread."""
    plain = figure.label[0].upper() + figure.label[1:]
    by_length: dict[float, list[tuple[str, Point]]] = {}
    for line in lines:
        for point in line.points:
            if point.may_rank:
                by_length.setdefault(point.x, []).append((line.name, point))
    shared = [length for length, points in by_length.items() if len(points) > 1]
    if not shared:
        return plain
    length = max(shared)
    ranked = sorted(by_length[length], key=lambda item: item[1].y, reverse=figure.best == "max")
    (name, best), (second, next_best) = ranked[:2]
    if best.y == 0 or next_best.y == 0:
        return plain
    if figure is not MEMORY and _overlap(best, next_best):
        return f"{plain}: {name} and {second} lie within their spread at {tokens(length)}"
    if figure is MEMORY and next_best.y / best.y - 1 < _SAME:
        return f"{name} and {second} need the same memory at {tokens(length)}: {binary_bytes(best.y * GIB)}"
    if figure is MEMORY:
        sizes = [binary_bytes(point.y * GIB) for point in (best, next_best)]
        return f"{name} needs least memory at {tokens(length)}: {sizes[0]}, {second} {sizes[1]}"
    if figure is MFU:
        return (
            f"MFU at {tokens(length)}: {percent(best.y / 100)} with {name}, {percent(next_best.y / 100)} with {second}"
        )
    return f"{name} is fastest at {tokens(length)}: {count(best.y)} tokens/s, {best.y / next_best.y:.3g}× {second}"


def _overlap(a: Point, b: Point) -> bool:
    return a.low <= b.high and b.low <= a.high


def _prediction(records: Sequence[Record], styles: Mapping[str, int]) -> Panel | None:
    """Predicted against measured peak; on a CPU what was measured is live tensors, on CUDA the allocator's peak."""
    found: dict[str, list[Point]] = {}
    for record in records:
        method, predicted = method_of(record), number(record, "predicted_peak_bytes")
        measured = number(record, "peak_tensor_bytes") or number(record, "peak_memory_bytes")
        if method and predicted and measured:
            size = measured / GIB
            found.setdefault(method, []).append(Point(predicted / GIB, size, size, size))
    ratios = [point.x / point.y for points in found.values() for point in points]
    if len(ratios) < 2:
        return None
    low, high = 100 * (min(ratios) - 1), 100 * (max(ratios) - 1)
    panel = Panel(
        "prediction",
        "scatter",
        f"Memory predictions are {low:+.0f}% to {high:+.0f}% off what was measured",
        "predicted peak (GiB)",
        "measured peak (GiB)",
        tuple(Line(name, styles[name], tuple(found[name])) for name in sorted(found)),
    )
    return in_fitting_unit(panel)


def in_fitting_unit(panel: Panel) -> Panel:
    """A panel of GiB in MiB when all of it lies below 1 GiB."""
    is_scatter = panel.kind == "scatter"
    points = [point for line in panel.lines for point in line.points]
    if any(point.high >= 1 or (is_scatter and point.x >= 1) for point in points):
        return panel

    def smaller(point: Point) -> Point:
        x = point.x * 1024 if is_scatter else point.x
        return Point(x, point.y * 1024, point.low * 1024, point.high * 1024)

    lines = tuple(replace(line, points=tuple(map(smaller, line.points))) for line in panel.lines)
    x_label, y_label = (label.replace("GiB", "MiB") for label in (panel.x_label, panel.y_label))
    return replace(panel, lines=lines, x_label=x_label, y_label=y_label)


def curve_panel(
    key: str, title: str, y_label: str, curves: Sequence[tuple[str, Sequence[tuple[float, float]]]]
) -> Panel:
    """Curves over optimizer steps, one per run."""
    lines = tuple(
        Line(name, index, tuple(Point(x, y, y, y) for x, y in points), is_dashed=name.startswith(DASHED))
        for index, (name, points) in enumerate(curves)
    )
    return Panel(key, "curves", title, "optimizer step", y_label, lines)


def curve_names(records: Sequence[Record]) -> list[str]:
    """A short name for every run, of what tells it from the others: method, length, and its id where those repeat."""
    several = len({record.get("seq_len") for record in records}) > 1
    names = []
    for record in records:
        length = whole(record, "seq_len")
        method = method_of(record) or "?"
        names.append(f"{method} {tokens(length)}" if several and length else method)
    repeated = {name for name in names if names.count(name) > 1}
    ids = [(text(record, "run_id") or "?")[-6:] for record in records]
    return [f"{name} {run_id}" if name in repeated else name for name, run_id in zip(names, ids, strict=True)]
