"""Panels drawn with matplotlib, one function per kind, on a light page; the page turns them over for a dark one."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from burst_cli.report.panels import MEMORY, Panel, Point
from burst_cli.report.records import tokens
from cluster.remote_text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Eight hues that people with any colour vision tell apart; each is also told by its marker.
METHOD_COLOURS = ("#0072b2", "#d55e00", "#00866a", "#a8468f", "#8a6d00", "#3f8fc4", "#b3243b", "#59626e")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, QUIET, GRID = "#1b1f25", "#5c6672", "#dfe3e8"
SIZE = 4.1, 3.1  # inches: text of 9 points is readable on a page as wide as a phone
_LONGEST_NAME = 32
_DASHES = (0, (4, 3))
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
}


def panel_svg(panel: Panel) -> str:
    """`panel` as an SVG document."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=SIZE, layout="constrained")
        _draw(figure.add_subplot(), panel)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def panel_link(panel: Panel) -> str:
    """`panel` as the source of an <img>: ids and styles of one picture cannot meet those of another there."""
    return f"data:image/svg+xml;base64,{base64.b64encode(panel_svg(panel).encode()).decode()}"


def _look(style: int, *, dashed: bool = False) -> dict[str, Any]:
    """Colour, marker and stroke; styles beyond the eighth have another pair of colour and marker."""
    return {
        "color": METHOD_COLOURS[style % len(METHOD_COLOURS)],
        "marker": MARKERS[(style + style // len(METHOD_COLOURS)) % len(MARKERS)],
        "markersize": 6,
        "linestyle": _DASHES if dashed else "-",
        "linewidth": 1.5,
    }


def _draw(axes: Axes, panel: Panel) -> None:
    """Everything of a panel but its title."""
    axes.grid(visible=True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8.5)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    kinds = {"lines": _lines, "dots": _dots, "scatter": _scatter, "curves": _curves}
    kinds[panel.kind](axes, panel)
    if panel.kind != "dots":  # whose axis names them
        _legend(axes, panel)


def _lines(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter

    for line in panel.lines:
        points = line.points
        spread = [[p.y - p.low for p in points], [p.high - p.y for p in points]]
        axes.errorbar(
            [p.x for p in points], [p.y for p in points], yerr=spread if any(map(any, spread)) else None,
            elinewidth=1.1, capsize=2.5, **_look(line.style),
        )  # fmt: skip
    lengths = sorted({p.x for line in panel.lines for p in line.points} | {x for _, _, x in panel.missing})
    span = max(1.0, math.log2(lengths[-1] / lengths[0]))
    axes.set_xscale("log")
    axes.set_xlim(lengths[0] * 2 ** (-0.07 * span), lengths[-1] * 2 ** (0.07 * span))
    while len(lengths) > 7:  # every second one where they would touch
        lengths = lengths[::-1][::2][::-1]
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(round(value))))
    _limit_y(axes, [point for line in panel.lines for point in line.points])
    axes.minorticks_off()
    stacked: dict[int, int] = {}
    for _, style, length in panel.missing:
        # A cross where a method ran out of memory: above in a picture of memory, else below.
        place = 0.055 + 0.075 * stacked.get(length, 0)
        height = 1 - place if panel.key == MEMORY else place
        _cross(axes, length, height, style, "" if length in stacked else "OOM", axes.get_xaxis_transform())
        stacked[length] = stacked.get(length, 0) + 1


def _limit_y(axes: Axes, points: Sequence[Point]) -> None:
    """From 0 where that leaves the points apart, else a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    values = [point.y for point in points if point.y > 0]
    if values and max(values) / min(values) > 12:
        low, high = min(values), max(values)
        axes.set_yscale("log")
        axes.set_ylim(low / 2.2, high * 1.6)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 200 else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:g}"))
        return
    axes.set_ylim(0, 1.18 * max((point.high for point in points), default=1.0) or 1.0)
    axes.locator_params(axis="y", nbins=6)


def _cross(axes: Axes, x: float, y: float, style: int, words: str, transform: Any) -> None:
    look = {**_look(style), "marker": "x", "markersize": 7, "linestyle": ""}
    axes.plot([x], [y], transform=transform, markeredgewidth=2, **look)
    axes.annotate(
        words, (x, y), xycoords=transform, xytext=(-7, 0), textcoords="offset points", ha="right", va="center",
        fontsize=8, color=INK,
    )  # fmt: skip


def _dots(axes: Axes, panel: Panel) -> None:
    """One length only: a row per method."""
    rows = sorted(panel.lines, key=lambda line: line.points[0].y)
    for place, line in enumerate(rows):
        point = line.points[0]
        spread = [[point.y - point.low], [point.high - point.y]]
        axes.errorbar(
            [point.y], [place], xerr=spread if any(map(any, spread)) else None, elinewidth=1.4, capsize=3,
            **_look(line.style),
        )  # fmt: skip
    names = [line.name for line in rows]
    lost = [(name, style) for name, style, _ in panel.missing if name not in names]
    top = max((line.points[0].high for line in rows), default=1.0)
    for place, (name, style) in enumerate(lost, start=len(rows)):
        names.append(name)
        _cross(axes, 0.12 * top, place, style, "OOM", axes.transData)
    axes.set_yticks(range(len(names)), [one_line(name, _LONGEST_NAME) for name in names])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(0, 1.12 * top or 1.0)
    axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel(panel.y_label)
    axes.set_ylabel("")


def _scatter(axes: Axes, panel: Panel) -> None:
    top = 1.12 * max(max(point.x, point.y) for line in panel.lines for point in line.points)
    axes.plot([0, top], [0, top], color=QUIET, linewidth=1, linestyle=_DASHES)
    axes.text(0.03, 0.96, "dashed: as predicted", transform=axes.transAxes, va="top", fontsize=8, color=QUIET)
    for line in panel.lines:
        look = {**_look(line.style), "linestyle": "", "alpha": 0.85}
        axes.plot([p.x for p in line.points], [p.y for p in line.points], **look)
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.locator_params(nbins=6)


def _curves(axes: Axes, panel: Panel) -> None:
    """Lines of runs; a marker at the last point, so that colour is not all that tells them apart."""
    from matplotlib.ticker import MaxNLocator

    for line in panel.lines:
        x, y = [point.x for point in line.points], [point.y for point in line.points]
        axes.plot(x, y, markevery=[-1], **_look(line.style, dashed=line.is_dashed))
    values = sorted(point.y for line in panel.lines for point in line.points)
    if panel.key == "step_time_s" and values:
        axes.set_ylim(0, 1.3 * values[int(0.99 * (len(values) - 1))] or 1.0)  # one slow step does not flatten the rest
    axes.locator_params(axis="y", nbins=6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _legend(axes: Axes, panel: Panel) -> None:
    """Below the panel. Names go in by hand: matplotlib leaves out those that begin with an underscore."""
    from matplotlib.lines import Line2D

    looks = [_look(line.style, dashed=line.is_dashed) for line in panel.lines]
    names = [one_line(line.name, _LONGEST_NAME) for line in panel.lines]
    legend = axes.legend(
        [Line2D([], [], **look) for look in looks], ["." for _ in looks], loc="upper center",
        bbox_to_anchor=(0.5, -0.15), ncols=max(1, min(3, 62 // (6 + max(map(len, names))))), frameon=False, fontsize=8,
        borderaxespad=0, handlelength=3.2,
    )  # fmt: skip
    for label, name in zip(legend.get_texts(), names, strict=True):
        label.set_text(name)
