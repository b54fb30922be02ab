"""Peak memory against time, one marker per policy and one panel per length, in the style of `burst bench --plot`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL = (4.2, 3.4)  # inches
_MARKERS = "osD^vP*X<>"
_COLOURS = ("#4c78a8", "#e45756", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#9d755d", "#bab0ac")


def write_memory_plot(document: Mapping[str, Any], path: Path) -> None:
    """Draw the document into `path` (.svg or .png)."""
    figure = memory_figure(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")


def memory_figure(document: Mapping[str, Any]) -> Figure:
    """A panel per length, times not from 0; down and left is better. Policies have the same marker in all panels."""
    from matplotlib.figure import Figure

    rows = document["results"]
    lengths = list(dict.fromkeys(row["seq_len"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    figure = Figure(figsize=(_PANEL[0] * len(lengths), _PANEL[1]), layout="constrained")
    for index, length in enumerate(lengths):
        axes = figure.add_subplot(1, len(lengths), index + 1)
        _draw(axes, [row for row in rows if row["seq_len"] == length], policies)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(policies), fontsize=8, frameon=False)
    setup, facts = document["settings"]["setup"], document["environment"]
    figure.supxlabel(
        f"step time in seconds: median, fastest to slowest; {setup['ranks']} ranks, {facts['device']}", fontsize=8
    )
    figure.supylabel("peak of the busiest rank, MiB of tensors", fontsize=8)
    return figure


def _draw(axes: Axes, rows: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> None:
    for row in rows:
        step, place = row["step"], policies.index(row["policy"])
        spread = [[step["median_s"] - step["min_s"]], [step["max_s"] - step["median_s"]]]
        axes.errorbar(
            step["median_s"],
            row["peak_tensor_bytes"] / 2**20,
            xerr=spread,
            fmt=_MARKERS[place % len(_MARKERS)],
            color=_COLOURS[place % len(_COLOURS)],
            label=row["policy"],
            elinewidth=1,
            capsize=2,
        )
    share = rows[0]["attention_share_of_flops"]
    axes.set_title(f"{rows[0]['seq_len']:,} tokens, attention {share:.0%} of FLOPs", fontsize=9, loc="left")
    axes.margins(0.12)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
