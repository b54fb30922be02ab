"""Panels drawn with matplotlib, one function per kind: as an <svg> for a page, or all of a report as one PNG.

Colours are those of a light page; an SVG has them replaced by variables of the page.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from burst_cli.report.panels import MEMORY, Panel, Point
from burst_cli.report.records import tokens
from cluster.remote_text import one_line
from engine.config.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Eight hues that people with any colour vision tell apart; each is also told by its marker.
METHOD_COLOURS = ("#0072b2", "#d55e00", "#00866a", "#a8468f", "#8a6d00", "#3f8fc4", "#b3243b", "#59626e")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, QUIET, GRID, PAPER = "#1b1f25", "#5c6672", "#dfe3e8", "#fefefe"
SIZE = WIDTH, HEIGHT = 4.1, 3.1  # inches: text of 9 points is readable on a page as wide as a phone
_COLUMNS, _MOST_ROWS, _DPI = 3, 10, 130  # of a PNG
_GRID_COLUMNS, _GRID_ROWS = 5, 16  # of a grid whose cells have room for text
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
    "path.simplify": True,
}
_VARIABLES = {
    **{colour: f"var(--m{index})" for index, colour in enumerate(METHOD_COLOURS)},
    INK: "var(--ink)",
    QUIET: "var(--quiet)",
    GRID: "var(--grid)",
    PAPER: "var(--card)",
}
_TAG = re.compile(r"<[^<>]+>")  # matplotlib escapes both letters in all text and attributes
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_COLOUR = re.compile("|".join(_VARIABLES))
_ID = re.compile(r'( id="|url\(#|href="#)')


def panel_svg(panel: Panel, prefix: str) -> str:
    """The <svg> of `panel`; ids begin with `prefix`, because a page has one set of ids for all its pictures."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with _drawing():
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        _draw(axes, panel)
        figure.patch.set_visible(False)
        axes.patch.set_visible(False)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = _METADATA.sub("", stream.getvalue())
    view_box = text.partition('viewBox="')[2].partition('"')[0]
    body = _TAG.sub(lambda tag: _for_page(tag[0], prefix), text[text.index("<svg") :].partition(">")[2])
    return f'<svg viewBox="{view_box}" role="img" aria-label="{escape(f"{panel.title}. {panel.described}")}">{body}'


def _for_page(tag: str, prefix: str) -> str:
    """Colours become variables, ids and links to them get the prefix, xlink:href becomes href."""
    tag = _COLOUR.sub(lambda found: _VARIABLES[found[0]], tag.replace("xlink:href", "href"))
    return _ID.sub(lambda found: found[1] + prefix, tag)


def report_png(rows: Iterable[tuple[str, Sequence[Panel]]]) -> bytes:
    """Titles and their panels below each other; the metadata names `burst report`.

    Raises ConfigError when there is nothing to draw.
    """
    every = (
        (title if start == 0 else "", panels[start : start + _COLUMNS])
        for title, panels in rows
        for start in range(0, len(panels), _COLUMNS)
    )
    parts = list(itertools.islice(every, _MOST_ROWS))
    if not parts:
        raise ConfigError("--png: there is nothing to draw; name runs with several lengths, methods or steps")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with _drawing():
        figure = Figure(figsize=(WIDTH * _COLUMNS, (HEIGHT + 0.5) * len(parts)), facecolor=PAPER, layout="constrained")
        FigureCanvasAgg(figure)
        for row, (title, panels) in zip(figure.subfigures(len(parts), squeeze=False)[:, 0], parts, strict=True):
            row.suptitle(title, fontsize=11, weight="bold", color=INK, x=0.012, ha="left")
            for place, axes in enumerate(row.subplots(1, _COLUMNS)):
                if place < len(panels):
                    _draw(axes, panels[place])
                    wrapped = "\n".join(textwrap.wrap(panels[place].title, 54)[:2])
                    axes.set_title(wrapped, fontsize=9, loc="left", color=INK)
                else:
                    axes.set_visible(False)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=_DPI, metadata={"Software": "burst report"})
    return content.getvalue()


@contextmanager
def _drawing() -> Iterator[None]:
    """Around everything that is drawn: our settings, and silence about letters that the font lacks."""
    import matplotlib as mpl

    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _look(style: int, *, hollow: bool = False, dashed: bool = False) -> dict[str, Any]:
    """Colour, marker and stroke; styles beyond the eighth have another pair of colour and marker."""
    colour = METHOD_COLOURS[style % len(METHOD_COLOURS)]
    return {
        "color": colour,
        "marker": MARKERS[(style + style // len(METHOD_COLOURS)) % len(MARKERS)],
        "markersize": 6,
        "markerfacecolor": PAPER if hollow else colour,
        "linestyle": _DASHES if hollow or dashed else "-",
        "linewidth": 1.5,
    }


def _draw(axes: Axes, panel: Panel) -> None:
    """Everything of a panel but its title."""
    if panel.kind != "grid":
        axes.grid(visible=True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8.5)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    kinds = {"lines": _lines, "dots": _dots, "scatter": _scatter, "curves": _curves, "grid": _grid}
    kinds[panel.kind](axes, panel)
    if panel.legend:
        _legend(axes, panel)


def _lines(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter

    for line in panel.lines:
        points = line.points
        spread = [[p.y - p.low for p in points], [p.high - p.y for p in points]]
        axes.errorbar(
            [p.x for p in points], [p.y for p in points], yerr=spread if any(map(any, spread)) else None,
            elinewidth=1.1, capsize=2.5, **_look(line.style, hollow=line.is_published),
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


def _grid(axes: Axes, panel: Panel) -> None:
    """A rectangle per cell, one hue that is fuller the stronger it is, with its text where there is room for it."""
    from matplotlib.patches import Rectangle

    columns = list(dict.fromkeys(cell.column for cell in panel.cells))
    rows = list(dict.fromkeys(cell.row for cell in panel.cells))
    for cell in panel.cells:
        x, y = columns.index(cell.column), rows.index(cell.row)
        fill = 0.06 + 0.6 * min(1.0, max(0.0, cell.strength))  # pale enough for text in the ink of either scheme
        axes.add_patch(
            Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=METHOD_COLOURS[0], alpha=fill, linewidth=0)
        )
        if len(columns) <= _GRID_COLUMNS and len(rows) <= _GRID_ROWS:
            axes.text(x, y, cell.text, ha="center", va="center", fontsize=7.5, color=INK)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)


def _legend(axes: Axes, panel: Panel) -> None:
    """Below the panel. Names go in by hand: matplotlib leaves out those that begin with an underscore."""
    from matplotlib.lines import Line2D

    looks = [_look(line.style, hollow=line.is_published, dashed=line.is_dashed) for line in panel.legend]
    names = [one_line(line.name, _LONGEST_NAME) for line in panel.legend]
    legend = axes.legend(
        [Line2D([], [], **look) for look in looks], ["." for _ in looks], loc="upper center",
        bbox_to_anchor=(0.5, -0.15), ncols=max(1, min(3, 62 // (6 + max(map(len, names))))), frameon=False, fontsize=8,
        borderaxespad=0, handlelength=3.2, title=panel.note, title_fontsize=8,
    )  # fmt: skip
    for label, name in zip(legend.get_texts(), names, strict=True):
        label.set_text(name)
