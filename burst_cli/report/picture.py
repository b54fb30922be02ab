"""The plots of a report as one PNG, a row of panels per group."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from burst_cli.report.curves import comparison_panel, run_panels
from burst_cli.report.draw import HEIGHT, INK, PAPER, WIDTH, colour, draw_panel, drawing, marker
from burst_cli.report.model import Report
from burst_cli.report.needles import needle_panel
from burst_cli.report.panels import Panel, group_panels, style_numbers
from engine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SOFTWARE = "burst report"
_COLUMNS, _MOST_ROWS = 3, 10
_TITLE_INCHES, _LEGEND_LINE = 0.7, 0.19
_DPI = 130


def report_picture(report: Report) -> bytes:
    """The PNG; its metadata names `burst report`. Raises ConfigError when there is nothing to draw."""
    rows = _rows(report)
    if not rows:
        raise ConfigError("--png: there is nothing to draw; name runs with several lengths, methods or steps")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [_row_height(panels) for _, panels in rows]
    with drawing():
        figure = Figure(figsize=(WIDTH * _COLUMNS, sum(heights)), facecolor=PAPER)
        FigureCanvasAgg(figure)
        above = 0.0
        for (title, panels), height in zip(rows, heights, strict=True):
            _draw_row(figure, title, panels, above)
            above += height
        content = BytesIO()
        figure.savefig(content, format="png", dpi=_DPI, metadata={"Software": SOFTWARE})
    return content.getvalue()


def _row_height(panels: Sequence[Panel]) -> float:
    return _TITLE_INCHES + HEIGHT + _LEGEND_LINE * max(_legend_lines(panel) for panel in panels)


def _draw_row(figure: Figure, title: str, panels: Sequence[Panel], above: float) -> None:
    """One row of panels, `above` inches below the upper edge."""
    width, total = (float(inches) for inches in figure.get_size_inches())
    figure.text(0.012, 1 - (above + 0.08) / total, title, fontsize=11, weight="bold", color=INK, va="top")
    bottom = 1 - (above + _TITLE_INCHES + 0.83 * HEIGHT) / total
    for column, panel in enumerate(panels):
        left = WIDTH * (column + (0.27 if panel.kind == "dots" else 0.14)) / width
        right = WIDTH * (column + 0.97) / width
        axes = figure.add_axes((left, bottom, right - left, 0.83 * HEIGHT / total))
        draw_panel(axes, panel)
        axes.set_title("\n".join(textwrap.wrap(panel.title, 58)[:2]), fontsize=9, loc="left", color=INK)
        _legend(axes, panel)


def _rows(report: Report) -> list[tuple[str, list[Panel]]]:
    styles = style_numbers(report.records)
    rows: list[tuple[str, list[Panel]]] = []
    comparison = comparison_panel(report.comparison) if report.comparison is not None else None
    if comparison is not None:
        rows.append(("A against B", [comparison]))
    for group in report.groups:
        needles = needle_panel(group.records)
        shown = [needles] if needles is not None else []
        panels = [*group_panels(group, styles, report.published), *shown, *run_panels(group)]
        parts = [panels[index : index + _COLUMNS] for index in range(0, len(panels), _COLUMNS)]
        rows += [(group.title if index == 0 else "", part) for index, part in enumerate(parts)]
        if len(rows) >= _MOST_ROWS:
            break
    return rows[:_MOST_ROWS]


def _legend_lines(panel: Panel) -> int:
    if not panel.needs_legend:
        return 0
    return -(-len(panel.lines) // _per_line(panel)) + (panel.note is not None)


def _per_line(panel: Panel) -> int:
    return max(1, min(3, 62 // max(1, panel.width_of_names + 6)))


def _legend(axes: Axes, panel: Panel) -> None:
    """Below the panel. Names go in by hand: matplotlib leaves out those that begin with an underscore."""
    from matplotlib.lines import Line2D

    if not panel.needs_legend:
        return
    marks = [
        Line2D(
            [], [], color=colour(line.style), marker=marker(line.style), markersize=5,
            linestyle="--" if line.is_published or line.is_dashed else "-",
            markerfacecolor=PAPER if line.is_published else colour(line.style),
        )
        for line in panel.lines
    ]  # fmt: skip
    legend = axes.legend(
        marks, ["." for _ in marks], loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=_per_line(panel),
        frameon=False, fontsize=8, borderaxespad=0, handlelength=2.2, title=panel.note, title_fontsize=8,
    )  # fmt: skip
    for label, line in zip(legend.get_texts(), panel.lines, strict=True):
        label.set_text(line.name)
