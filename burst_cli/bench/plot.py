"""Measurements as a picture: bars of medians with their spread, exposed communication marked. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from burst_cli.bench.view import Row, cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_WIDTH, _BAR_HEIGHT, _FRAME_HEIGHT = 4.6, 0.42, 1.3  # inches
_COMPUTE, _EXPOSED = "#4c78a8", "#f58518"


def bench_figure(document: Mapping[str, Any]) -> Figure:
    """A panel per mask and length: seconds of every variant."""
    from matplotlib.figure import Figure

    panels = cells(document["results"])
    most = max(map(len, panels.values()), default=1)
    size = (_PANEL_WIDTH * max(1, len(panels)), _FRAME_HEIGHT + _BAR_HEIGHT * most)
    figure = Figure(figsize=size, layout="constrained")
    for index, ((mask, length), rows) in enumerate(panels.items(), start=1):
        _draw(figure.add_subplot(1, len(panels), index), f"{mask}, {length:,} tokens", rows)
    facts = document["environment"]
    figure.supxlabel(f"seconds, forward + backward: median, fastest to slowest; {facts['device']}", fontsize=8)
    return figure


def _draw(axes: Axes, title: str, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import MaxNLocator

    labels, timings = [row["variant"] for row in rows], [row["total"] for row in rows]
    medians = [timing["median_s"] for timing in timings]
    exposed = [max(0.0, row["exposed_s"]) for row in rows]
    low = [timing["median_s"] - timing["min_s"] for timing in timings]
    high = [timing["max_s"] - timing["median_s"] for timing in timings]
    axes.barh(labels, medians, color=_COMPUTE, xerr=[low, high], error_kw={"elinewidth": 1, "capsize": 2})
    if any(exposed):
        left = [median - part for median, part in zip(medians, exposed, strict=True)]
        axes.barh(labels, exposed, left=left, color=_EXPOSED, label="exposed communication")
        axes.legend(fontsize=7, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.spines[["top", "right"]].set_visible(False)
