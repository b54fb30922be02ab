"""Panels drawn with matplotlib. Colours are those of LIGHT; an SVG has them replaced by variables of the page."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from burst_cli.report.panels import Line, Panel
from burst_cli.report.values import tokens
from engine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Eight hues that people with any colour vision tell apart; each is also told by its marker.
METHOD_COLOURS = ("#0072b2", "#d55e00", "#00866a", "#a8468f", "#8a6d00", "#3f8fc4", "#b3243b", "#59626e")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, QUIET, GRID, PAPER = "#1b1f25", "#5c6672", "#dfe3e8", "#fefefe"
WIDTH, HEIGHT = 4.1, 2.85  # inches: text of 9 points is readable on a page as wide as a phone
_LABEL_GAP, _LETTER, _AXES_POINTS = 12, 5.2, 0.86 * 72 * WIDTH  # of a direct label, in points
_GRID_COLUMNS, _GRID_ROWS = 5, 16  # of a grid whose cells have room for text
_SETTINGS = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names come from runs: a dollar sign is a dollar sign
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.unicode_minus": False,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "path.simplify": True,
}


def check_matplotlib(option: str) -> None:
    """Raise ConfigError when pictures cannot be drawn."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{option} needs matplotlib, which is not installed: pip install 'burst-train[picture]' (or matplotlib)"
        ) from None


def has_matplotlib() -> bool:
    """Whether pictures can be drawn."""
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def drawing() -> Iterator[None]:
    """Around everything that is drawn: our settings, and silence about letters that the font lacks."""
    import matplotlib as mpl

    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def colour(style: int) -> str:
    """The colour of a method."""
    return METHOD_COLOURS[style % len(METHOD_COLOURS)]


def marker(style: int) -> str:
    """The marker of a method; styles beyond the eighth have another pair of colour and marker."""
    return MARKERS[(style + style // len(METHOD_COLOURS)) % len(MARKERS)]


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Everything of a panel but its title."""
    if panel.kind != "grid":
        axes.grid(visible=True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8.5)
    draw = {
        "lines": _draw_lines,
        "dots": _draw_dots,
        "scatter": _draw_scatter,
        "curves": _draw_curves,
        "grid": _draw_grid,
    }
    draw[panel.kind](axes, panel)


def _draw_lines(axes: Axes, panel: Panel) -> None:
    for line in panel.lines:
        _draw_line(axes, line)
    lengths = sorted({point.x for line in panel.lines for point in line.points} | {x for _, _, x in panel.missing})
    axes.set_xscale("log", base=2)
    _limit_y(axes, [point for line in panel.lines for point in line.points])
    is_labelled = panel.is_labelled
    span = max(1.0, math.log2(lengths[-1] / lengths[0]))
    share = (_LABEL_GAP + _LETTER * panel.width_of_names) / _AXES_POINTS if is_labelled else 0.05
    axes.set_xlim(lengths[0] * 2 ** (-0.07 * span), lengths[-1] * 2 ** (1.07 * span * share / (1 - share)))
    _tick_lengths(axes, lengths)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    _mark_missing(axes, panel)
    if is_labelled:
        _label_ends(axes, panel.lines)


def _draw_line(axes: Axes, line: Line) -> None:
    x, y = [point.x for point in line.points], [point.y for point in line.points]
    spread = [[p.y - p.low for p in line.points], [p.high - p.y for p in line.points]]
    has_spread = any(map(any, spread))
    axes.errorbar(
        x,
        y,
        yerr=spread if has_spread else None,
        color=colour(line.style),
        marker=marker(line.style),
        markersize=6,
        markerfacecolor=PAPER if line.is_published else colour(line.style),
        markeredgewidth=1.3 if line.is_published else 0.6,
        linestyle=(0, (4, 3)) if line.is_published else "-",
        linewidth=1.6,
        elinewidth=1.1,
        capsize=2.5,
    )


def _limit_y(axes: Axes, points: Sequence[Any]) -> None:
    """From 0 where that leaves the points apart, else a logarithmic axis."""
    values = [point.y for point in points if point.y > 0]
    if values and max(values) / min(values) > 12:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        axes.set_yscale("log")
        low, high = min(values), max(values)
        axes.set_ylim(low / 2.2, high * 1.6)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 200 else (1.0,)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        return
    axes.set_ylim(0, 1.18 * max((point.high for point in points), default=1.0) or 1.0)
    axes.locator_params(axis="y", nbins=6)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _tick_lengths(axes: Axes, lengths: Sequence[float]) -> None:
    """Ticks at the lengths that were run; every second one where they would touch."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    kept = list(lengths)
    while len(kept) > 7:
        kept = kept[::-1][::2][::-1]
    axes.xaxis.set_major_locator(FixedLocator(kept))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(round(value))))


def _mark_missing(axes: Axes, panel: Panel) -> None:
    """A cross at every length at which a method ran out of memory: above in a picture of memory, else below."""
    is_memory = panel.key == "peak_memory_bytes"
    stacked: dict[int, int] = {}
    for _, style, length in panel.missing:
        place = 0.055 + 0.075 * stacked.get(length, 0)
        stacked[length] = stacked.get(length, 0) + 1
        height = 1 - place if is_memory else place
        transform = axes.get_xaxis_transform()
        axes.plot(length, height, transform=transform, color=colour(style), marker="x", markersize=7, markeredgewidth=2)
        if stacked[length] == 1:
            axes.annotate(
                "OOM", (length, height), xycoords=transform, xytext=(-7, 0), textcoords="offset points",
                ha="right", va="center", fontsize=8, color=INK,
            )  # fmt: skip


def _label_ends(axes: Axes, lines: Sequence[Line]) -> None:
    """Each line's name behind its last point, moved apart where they would touch."""
    ends = sorted(((line.points[-1], line) for line in lines), key=lambda item: item[0].y)
    to_axes = axes.transLimits.transform
    scale = axes.transScale.transform
    last = -1.0
    for point, line in ends:
        height = float(to_axes(scale((point.x, point.y)))[1])
        height = max(height, last + 0.065)
        last = height
        axes.annotate(
            line.name, (point.x, height), xycoords=axes.get_xaxis_transform(), xytext=(8, 0),
            textcoords="offset points", va="center", fontsize=8.5, color=colour(line.style), annotation_clip=False,
        )  # fmt: skip


def _draw_dots(axes: Axes, panel: Panel) -> None:
    """One length only: a row per method."""
    rows = sorted(panel.lines, key=lambda line: line.points[0].y)
    for place, line in enumerate(rows):
        point = line.points[0]
        spread = [[point.y - point.low], [point.high - point.y]]
        axes.errorbar(
            [point.y], [place], xerr=spread if any(map(any, spread)) else None, color=colour(line.style),
            marker=marker(line.style), markersize=7, elinewidth=1.4, capsize=3,
        )  # fmt: skip
    names = [line.name for line in rows]
    lost = [(name, style) for name, style, _ in panel.missing if name not in names]
    top = max((line.points[0].high for line in rows), default=1.0)
    for place, (_, style) in enumerate(lost, start=len(rows)):
        axes.plot(0.03 * top, place, color=colour(style), marker="x", markersize=7, markeredgewidth=2)
        axes.annotate("OOM", (0.03 * top, place), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8)
    every = [*names, *(name for name, _ in lost)]
    axes.set_yticks(range(len(every)), [name if len(name) <= 22 else f"{name[:21]}…" for name in every])
    axes.set_ylim(-0.6, len(every) - 0.4)
    axes.set_xlim(0, 1.12 * top or 1.0)
    axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel(panel.y_label)


def _draw_scatter(axes: Axes, panel: Panel) -> None:
    points = [point for line in panel.lines for point in line.points]
    top = 1.12 * max(max(point.x, point.y) for point in points)
    axes.plot([0, top], [0, top], color=QUIET, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(0.03, 0.96, "dashed: as predicted", transform=axes.transAxes, va="top", fontsize=8, color=QUIET)
    for line in panel.lines:
        axes.plot(
            [p.x for p in line.points], [p.y for p in line.points], linestyle="", color=colour(line.style),
            marker=marker(line.style), markersize=6, alpha=0.85,
        )  # fmt: skip
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.locator_params(nbins=6)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)


def _draw_curves(axes: Axes, panel: Panel) -> None:
    """Lines of runs; a marker at the last point, so that colour is not all that tells them apart."""
    from matplotlib.ticker import MaxNLocator

    values = sorted(point.y for line in panel.lines for point in line.points)
    for line in panel.lines:
        x, y = [point.x for point in line.points], [point.y for point in line.points]
        axes.plot(x, y, color=colour(line.style), linewidth=1.4, linestyle=(0, (4, 3)) if line.is_dashed else "-")
        axes.plot(x[-1:], y[-1:], color=colour(line.style), marker=marker(line.style), markersize=6)
    if panel.key == "step_time_s" and values:
        axes.set_ylim(0, 1.3 * values[int(0.99 * (len(values) - 1))] or 1.0)  # one slow step does not flatten the rest
    axes.locator_params(axis="y", nbins=6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)


def _draw_grid(axes: Axes, panel: Panel) -> None:
    """A rectangle per cell, one hue that is fuller the stronger it is, with its text where there is room for it."""
    from matplotlib.patches import Rectangle

    columns = list(dict.fromkeys(cell.column for cell in panel.cells))
    rows = list(dict.fromkeys(cell.row for cell in panel.cells))
    for cell in panel.cells:
        x, y = columns.index(cell.column), rows.index(cell.row)
        fill = 0.06 + 0.6 * min(1.0, max(0.0, cell.strength))  # pale enough for text in the ink of either scheme
        axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=colour(0), alpha=fill, linewidth=0))
        if len(columns) <= _GRID_COLUMNS and len(rows) <= _GRID_ROWS:
            axes.text(x, y, cell.text, ha="center", va="center", fontsize=7.5, color=INK)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
