"""What a page draws: panels as plain values, and a picture of each, light; a dark page turns it over."""

from __future__ import annotations

import base64
import io
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from burst_cli.render import grouped
from burst_cli.report.compare import Comparison
from burst_cli.report.naming import newest_of_each, speed_names
from burst_cli.report.records import (
    Record,
    pooled,
    run_name,
    run_rows,
    series,
    share_a_peak,
    tokens,
)
from cluster.remote_text import number, one_line, whole
from engine.runs.figures import count_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Eight hues that people with any colour vision tell apart; each is also told by its marker.
COLOURS = ("#0072b2", "#d55e00", "#00866a", "#a8468f", "#8a6d00", "#3f8fc4", "#b3243b", "#59626e")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_QUIET, _GRID = "#5c6672", "#dfe3e8"
_SIZE = 4.1, 3.1  # inches: text of 9 points is readable on a page as wide as a phone
_LEGEND_ROW = 0.17  # inches
_LONGEST_NAME = 60
_SETTINGS: Mapping[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names come from runs: a dollar sign is a dollar sign
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.edgecolor": _QUIET,
    "axes.unicode_minus": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_GIB = 2.0**30
_FIGURES = (  # key, what it is, factor
    ("tokens_per_s_per_device", "tokens/s per device", 1.0),
    ("mfu", "MFU, causal-aware (%)", 100.0),
    ("peak_memory_bytes", "peak memory (GiB)", 1 / _GIB),
)
_MOST_CURVES = 8  # in one picture; more cannot be told apart
_MOST_DRAWN = 4 * _MOST_CURVES
_STEP_TIME = "Step time (s)"
_MOST_POINTS = 160


class Point(NamedTuple):
    """A figure at one place. low, high: quartiles of the steps; of several runs the widest of theirs."""

    x: float
    y: float
    low: float
    high: float


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
    """One picture: figures over lengths, predictions against measurements, or curves over steps.

    lost: (name, style, length) of what ran out of memory.
    """

    kind: Literal["lengths", "predictions", "steps"]
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    lost: tuple[tuple[str, int, int], ...] = ()

    @property
    def described(self) -> str:
        """What a picture holds, for people who do not see it; the figures are in the table below it."""
        lost = "".join(f"; {name} ran out of memory at {length} tokens" for name, _, length in self.lost)
        return f"{self.y_label} over {self.x_label} of {', '.join(line.name for line in self.lines)}{lost}"


# --- what is drawn ----------------------------------------------------------------------------------------------------


def style_numbers(groups: Iterable[tuple[str, Sequence[Record]]]) -> dict[str, int]:
    """A number for every line of a report's groups, for colours and markers that mean the same everywhere."""
    names = {name for _, records in groups for name in speed_names(records) if name}
    return {name: index for index, name in enumerate(sorted(names))}


def group_panels(records: Sequence[Record], styles: Mapping[str, int]) -> Iterator[Panel]:
    """The panels that compare methods and lengths; none when there is nothing to compare."""
    named = [(name, r) for name, r in zip(speed_names(records), records, strict=True) if name is not None]
    known = [(name, n, r) for name, r in named if (n := whole(r, "seq_len")) is not None]
    cells = sorted(grouped(((name, length), record) for name, length, record in known).items())
    if len(cells) < 2:
        return
    lost = tuple((name, styles[name], n) for (name, n), runs in cells if any(r["status"] == "oom" for r in runs))
    for key, label, factor in _FIGURES:
        points = [
            (name, Point(length, *(factor * value for value in found)))
            for (name, length), runs in cells
            if (found := pooled(runs, key)) is not None
        ]
        if points and (key != "mfu" or share_a_peak(records)):
            title = label[0].upper() + label[1:]
            yield Panel("lengths", title, "sequence length (tokens)", label, _lines(points, styles), lost)
    # Of peaks: on a CPU live tensors were measured, on CUDA the allocator's peak.
    points = []
    for name, record in named:
        predicted = number(record, "predicted_peak_bytes")
        measured = number(record, "peak_tensor_bytes") or number(record, "peak_memory_bytes")
        if predicted and measured:
            points.append((name, Point(predicted / _GIB, *[measured / _GIB] * 3)))
    ratios = [100 * (point.x / point.y - 1) for _, point in points]
    if len(ratios) > 1:
        title = f"Memory predictions are {min(ratios):+.0f}% to {max(ratios):+.0f}% off what was measured"
        lines = _lines(sorted(points, key=lambda point: point[0]), styles)
        yield Panel("predictions", title, "predicted peak (GiB)", "measured peak (GiB)", lines)


def _lines(points: Iterable[tuple[str, Point]], styles: Mapping[str, int]) -> tuple[Line, ...]:
    """A line per method."""
    return tuple(Line(method, styles[method], tuple(own)) for method, own in grouped(points).items())


def run_panels(records: Iterable[Record]) -> Iterator[Panel]:
    """Loss and step time over the steps, a curve for every configuration; of runs of the same one the newest.

    records: the oldest first. Where there are many, several pictures have some each; see `drawing_notes`.
    """
    rows = [(name, run_rows(Path(record["path"]))) for name, record in _drawn(records)[0]]
    for key, title, label in (("loss", "Training loss", "training loss"), ("step_time_s", _STEP_TIME, _STEP_TIME)):
        curves = [(name, points) for name, run in rows if len(points := series(run, key)) > 1]
        pictures = [curves[first : first + _MOST_CURVES] for first in range(0, len(curves), _MOST_CURVES)]
        for place, picture in enumerate(pictures, start=1):
            of = f", {place} of {len(pictures)}" if len(pictures) > 1 else ""
            yield from _steps_panel(f"{title}{of}", label.lower(), picture)


def drawing_notes(records: Sequence[Record]) -> list[str]:
    """Which runs of a group have no curve, and why."""
    _, repeats, too_many = _drawn(records)
    found = []
    if repeats:
        found.append(
            f"Not drawn: {count_of('older run', len(repeats))} of the same configuration as a newer one "
            f"({_listed(repeats)})."
        )
    if too_many:
        found.append(
            f"Not drawn: the curves of {count_of('run', len(too_many))}, because no more than {_MOST_DRAWN} are "
            f"({_listed(too_many)}); name fewer runs to see them."
        )
    ended = [r for r in records if r.get("path") is not None and r.get("status") != "completed" and r.get("steps")]
    if ended:
        found.append(f"Not in the pictures of speed and memory, because they did not complete: {_listed(ended)}.")
    return found


def _listed(records: Sequence[Record]) -> str:
    more = f" and {len(records) - _MOST_CURVES} more" if len(records) > _MOST_CURVES else ""
    return ", ".join(str(record.get("run_id"))[-6:] for record in records[:_MOST_CURVES]) + more


def _drawn(records: Iterable[Record]) -> tuple[list[tuple[str, Record]], list[Record], list[Record]]:
    """(names and runs that have curves, runs that a newer one of the same configuration stands for, runs too many)."""
    runs = [record for record in records if record.get("path") is not None and (whole(record, "steps") or 0) > 1]
    newest = newest_of_each(runs)
    shown = {record["path"] for record in newest.values()}
    chosen = list(newest.items())
    return chosen[-_MOST_DRAWN:], [r for r in runs if r["path"] not in shown], [r for _, r in chosen[:-_MOST_DRAWN]]


def comparison_panels(comparison: Comparison) -> Iterator[Panel]:
    """The losses of both sides of a comparison over each other, B dashed."""
    sides = (("A", comparison.a), ("B", comparison.b))
    named = ((f"{side} {run_name(record)}", series(run_rows(Path(record["path"])), "loss")) for side, record in sides)
    yield from _steps_panel("Training loss of both sides", "training loss", named)


def _steps_panel(title: str, label: str, named: Iterable[tuple[str, Sequence[tuple[int, float]]]]) -> Iterator[Panel]:
    if lines := tuple(_curves(named)):
        yield Panel("steps", title, "optimizer step", label, lines)


def _curves(named: Iterable[tuple[str, Sequence[tuple[int, float]]]]) -> Iterator[Line]:
    """Those with more than one point; of many neighbours become their mean, so nothing that lasts is lost."""
    for index, (name, points) in enumerate((name, points) for name, points in named if len(points) > 1):
        size = -(-len(points) // _MOST_POINTS)
        parts = (points[first : first + size] for first in range(0, len(points), size))
        means = ([sum(values) / len(part) for values in zip(*part, strict=True)] for part in parts)
        yield Line(name, index, tuple(Point(x, y, y, y) for x, y in means), is_dashed=name.startswith("B "))


# --- how it is drawn --------------------------------------------------------------------------------------------------


def panel_svg(panel: Panel) -> str:
    """`panel` as an SVG document."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(dict(_SETTINGS)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        widest = min(_LONGEST_NAME, max(len(line.name) for line in panel.lines))
        columns = max(1, min(3, 62 // (6 + widest)))
        # A legend of many rows makes the picture higher, not its axes lower.
        extra = _LEGEND_ROW * max(0, -(-len(panel.lines) // columns) - 2)
        figure = Figure(figsize=(_SIZE[0], _SIZE[1] + extra), layout="constrained")
        axes = figure.add_subplot()
        axes.tick_params(length=0)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        {"lengths": _draw_lengths, "predictions": _draw_predictions, "steps": _draw_steps}[panel.kind](axes, panel)
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=columns, frameon=False,
            fontsize=8, borderaxespad=0, handlelength=3.2,
        )  # fmt: skip
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def panel_link(panel: Panel) -> str:
    """`panel` as the source of an <img>: ids and styles of one picture cannot meet those of another there."""
    return f"data:image/svg+xml;base64,{base64.b64encode(panel_svg(panel).encode()).decode()}"


def _look(line: Line) -> dict[str, Any]:
    """Colour, marker, stroke and name; styles beyond the eighth have another pair of colour and marker."""
    return {
        "color": COLOURS[line.style % len(COLOURS)],
        "marker": MARKERS[(line.style + line.style // len(COLOURS)) % len(MARKERS)],
        "linestyle": "--" if line.is_dashed else "-",
        # matplotlib leaves names out that begin with an underscore
        "label": one_line(line.name, _LONGEST_NAME).lstrip("_") or "?",
    }


def _draw_lengths(axes: Axes, panel: Panel) -> None:
    """With the quartiles of every figure, and a cross where a method ran out of memory."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    for line in panel.lines:
        x, y, low, high = map(list, zip(*line.points, strict=True))
        spread = [[middle - end for middle, end in zip(y, low, strict=True)],
                  [end - middle for middle, end in zip(y, high, strict=True)]]  # fmt: skip
        axes.errorbar(x, y, yerr=spread, capsize=2.5, **_look(line))
    for _, style, length in panel.lost:
        place = 0.05 + 0.07 * (style % len(COLOURS))
        where = axes.get_xaxis_transform()
        axes.plot([length], [place], transform=where, marker="x", color=COLOURS[style % len(COLOURS)], linestyle="")
        axes.annotate("OOM ", (length, place), xycoords=where, ha="right", va="center", fontsize=8)
    lengths = sorted({point.x for line in panel.lines for point in line.points} | {length for *_, length in panel.lost})
    while len(lengths) > 7:  # every second one where they would touch
        lengths = lengths[::-1][::2][::-1]
    axes.set_xscale("log")
    axes.set_xticks(lengths, [tokens(round(length)) for length in lengths])
    values = [point.y for line in panel.lines for point in line.points if point.y > 0]
    if values and max(values) > 12 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if max(values) < 200 * min(values) else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    else:
        axes.set_ylim(0, 1.15 * max(point.high for line in panel.lines for point in line.points) or 1.0)
    axes.minorticks_off()


def _draw_predictions(axes: Axes, panel: Panel) -> None:
    top = 1.12 * max(max(point.x, point.y) for line in panel.lines for point in line.points)
    axes.plot([0, top], [0, top], color=_QUIET, linewidth=1, linestyle="--", label="as predicted")
    for line in panel.lines:
        axes.plot(*_places(line), **{**_look(line), "linestyle": ""})
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)


def _draw_steps(axes: Axes, panel: Panel) -> None:
    """Lines of runs; a marker at the last point, so that colour is not all that tells them apart."""
    from matplotlib.ticker import MaxNLocator

    for line in panel.lines:
        axes.plot(*_places(line), markevery=[-1], **_look(line))
    values = sorted(itertools.chain.from_iterable(_places(line)[1] for line in panel.lines))
    if panel.y_label.startswith("step time"):
        # One slow step does not flatten the rest.
        axes.set_ylim(0, 1.3 * values[math.floor(0.99 * (len(values) - 1))] or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _places(line: Line) -> tuple[list[float], list[float]]:
    return [point.x for point in line.points], [point.y for point in line.points]
