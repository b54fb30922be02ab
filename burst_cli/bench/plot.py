"""Measurements as a picture: bars of medians with their spread, exposed communication marked. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst_cli.bench.view import Row, cells
from engine.config.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT_SUFFIXES = (".svg", ".png")
_PANEL_WIDTH, _BAR_HEIGHT, _FRAME_HEIGHT = 4.6, 0.42, 1.3  # inches
_COMPUTE, _EXPOSED = "#4c78a8", "#f58518"


def check_plot_path(path: Path) -> None:
    """Raise ConfigError before anything is measured when this plot could not be written."""
    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot: got {path.name!r}; the name must end in {' or '.join(PLOT_SUFFIXES)}")
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install matplotlib") from None


def write_plot(document: Mapping[str, Any], path: Path) -> None:
    """Draw the document into `path` (.svg or .png)."""
    figure = bench_figure(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")


def bench_figure(document: Mapping[str, Any]) -> Figure:
    """A panel per mask and length (one of all lengths, for the loss): seconds of every variant."""
    from matplotlib.figure import Figure

    panels = _panels(document)
    most = max((len(rows) for _, rows in panels), default=1)
    size = (_PANEL_WIDTH * max(1, len(panels)), _FRAME_HEIGHT + _BAR_HEIGHT * most)
    figure = Figure(figsize=size, layout="constrained")
    for index, (title, bars) in enumerate(panels):
        _draw(figure.add_subplot(1, len(panels), index + 1), title, bars)
    facts = document["environment"]
    figure.supxlabel(f"seconds, forward + backward: median, fastest to slowest; {facts['device']}", fontsize=8)
    return figure


Bar = tuple[str, Mapping[str, Any], float]  # label, timing, seconds of exposed communication


def _panels(document: Mapping[str, Any]) -> list[tuple[str, list[Bar]]]:
    rows = document["results"]
    if document["benchmark"] == "loss":
        return [(f"loss, {row['rows']:,} tokens", _loss_bars(row)) for row in rows]
    return [
        (f"{mask}, {length:,} tokens", [_bar(row) for row in members])
        for (mask, length), members in cells(rows).items()
    ]


def _bar(row: Row) -> Bar:
    return row["variant"], row["total"], max(0.0, row.get("exposed_s", 0.0))


def _loss_bars(row: Row) -> list[Bar]:
    return [(name, timing, 0.0) for name, timing in row["timings"].items()]


def _draw(axes: Axes, title: str, bars: Sequence[Bar]) -> None:
    from matplotlib.ticker import MaxNLocator

    labels = [label for label, _, _ in bars]
    medians = [timing["median_s"] for _, timing, _ in bars]
    exposed = [part for _, _, part in bars]
    low = [timing["median_s"] - timing["min_s"] for _, timing, _ in bars]
    high = [timing["max_s"] - timing["median_s"] for _, timing, _ in bars]
    axes.barh(labels, medians, color=_COMPUTE, xerr=[low, high], error_kw={"elinewidth": 1, "capsize": 2})
    if any(exposed):
        left = [median - part for median, part in zip(medians, exposed, strict=True)]
        axes.barh(labels, exposed, left=left, color=_EXPOSED, label="exposed communication")
        axes.legend(fontsize=7, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.spines[["top", "right"]].set_visible(False)
