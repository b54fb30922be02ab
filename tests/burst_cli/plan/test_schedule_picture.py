"""The picture of a schedule: every word of it, where what is drawn, and which ranks are drawn of many."""

from __future__ import annotations

import re

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from burst_cli.plan.candidates import Plan, plan_one
from burst_cli.plan.schedule_picture import schedule_figure, shown_ranks
from engine.planning.topology import Topology

ROW = 2.32  # a tile, three lanes, and the gap before the next row


def planned(*overrides: str, device: str = "cpu") -> Plan:
    return plan_one(["exp=tiny", *overrides], [], device=device, has_memory=False, has_presets=False)


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_layout_of_the_picture() -> None:
    plan = planned("attention=burst_ulysses", "cluster.topology_nodes=2")
    figure = schedule_figure(plan)
    seconds = r"[\d.]+ ms( \([\d.]+%\))?"
    (heading,) = (text for text in figure.findobj(Text) if text.get_text() == figure.get_suptitle())
    assert re.sub(seconds, "#", heading.get_text()) == (
        "burst_ulysses on 4 ranks (2 x 2), cpu: # per layer\n"
        "tiny, 2,048 tokens, layout zigzag, heads 2 x rings 2 x 1, kv circulates in backward; boxes are tiles, bars "
        "below them messages as they arrive"
    )
    assert (heading.get_position()[0], heading.get_ha(), heading.get_fontsize()) == (0.01, "left", 9.5)
    titles = [re.sub(seconds, "#", axes.get_title(loc="left")) for axes in figure.axes]
    assert titles == ["forward: #\nexposed: #", "backward: #\nexposed: #"]
    kinds = ["tile, full", "tile, causal", "add, copy, init", "waiting (exposed)"]
    assert legend(figure) == [*kinds, "payload, inner ring", "gradients, inner ring", "head exchange"]
    assert (figure.legends[0].get_frame_on(), figure.legends[0].get_texts()[0].get_fontsize()) == (False, 8.5)
    assert figure.axes[0].get_gridspec().get_width_ratios() == [one.timeline.total_s for one in plan.preview.passes]
    assert figure.get_size_inches() == pytest.approx((13, 2.25 + 0.26 * (4 * ROW - 0.42)))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    for axes, one in zip(figure.axes, plan.preview.passes, strict=True):
        (line,) = axes.lines  # between the nodes
        assert (line.get_ydata()[0], line.get_linewidth()) == (pytest.approx(2 * ROW - 0.21), 0.8)
        assert (axes.get_xlabel(), axes.get_xlim()) == ("milliseconds", (0, 1e3 * one.timeline.total_s))
        assert axes.get_ylim() == pytest.approx((4 * ROW - 0.42 + 0.15, -0.15))
        assert axes.get_yticks() == pytest.approx([rank * ROW + 0.5 for rank in range(4)])
        lanes = [round(rank * ROW + lane, 2) for rank in range(4) for lane in (1.06, 1.36, 1.66)]
        paths = [path for group in axes.collections for path in group.get_paths()]
        assert [patch.get_y() for patch in axes.patches] == pytest.approx(lanes)
        assert {(patch.get_linewidth(), patch.get_zorder()) for patch in axes.patches} == {(0, 0)}
        assert {(group.get_linewidth()[0], group.get_zorder()) for group in axes.collections} == {(0.5, 2)}
        heights = {round(path.vertices[:, 1].min(), 2): np.ptp(path.vertices[:, 1]) for path in paths}
        assert heights == {top: pytest.approx(0.24 if top in lanes else 1) for top in heights}
        assert set(heights) <= {*lanes, *(round(rank * ROW, 2) for rank in range(4))}
        colours = {(to_hex(g.get_edgecolor()[0]), to_hex(g.get_facecolor()[0])) for g in axes.collections}
        assert {face for edge, face in colours if edge != face} == {"#7fb2dc", "#2f6fa7"}  # of whole tiles
        assert {text.get_fontsize() for text in (*axes.get_xticklabels(), *figure.axes[0].get_yticklabels())} == {8}
        assert {text.get_fontsize() for text in axes.findobj(Text) if text.get_text()} == {8, 9, 9.5}
        tick = axes.yaxis.get_major_ticks()[0]
        assert (tick.tick1line.get_markersize(), tick.label1.get_visible()) == (0, one.direction == "forward")
        assert [name for name in axes.spines if axes.spines[name].get_visible()] == ["bottom"]
        arrive = ("recv", "load", "store")
        assert len(paths) == sum(i.lane == "compute" or i.kind in arrive for i in one.timeline.intervals)


def test_legend_names_every_kind_of_activity() -> None:
    rings = ("attention=burst", "cluster.topology_nodes=2")
    chunks = planned("attention=fpdt", "cluster.topology_nodes=2", "attention.chunk_tokens=128", device="h100")
    window = planned(*rings, "attention.mask=window", "attention.window_tokens=100", device="h100")
    figures = [schedule_figure(plan) for plan in (chunks, window, planned(*rings, "train.seq_len=16384"))]
    work = ["add, copy, init", "messages that cores copy", "waiting (exposed)"]
    moves = ["head exchange", "host to device", "device to host"]
    both = [f"{what}, {ring} ring" for what in ("payload", "gradients") for ring in ("inner", "outer")]
    assert legend(figures[0]) == ["tile, full", "tile, causal", *work, *moves]
    assert legend(figures[1]) == ["tile, other band", *work, *both]
    units = [[axes.get_xlabel() for axes in figure.axes] for figure in figures]
    assert units == [["microseconds"] * 2, ["microseconds"] * 2, ["milliseconds", "seconds"]]
    assert [figure.axes[1].get_xlim()[1] >= 1 for figure in figures] == [True] * 3


def test_of_many_ranks_those_of_the_first_node_are_drawn() -> None:
    figure = schedule_figure(planned("cluster.ranks_per_node=64", "cluster.topology_nodes=8"))
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert shown == ["rank 0", "rank 1", "rank 7"]  # of these plans were made
    assert figure.get_suptitle().endswith("; only ranks 0, 1, 7 are drawn")
    sizes = [len(shown_ranks(Topology(*size), range(128))) for size in ((4, 8), (33, 1), (2, 64), (11, 3))]
    assert sizes == [32, 32, 32, 3]
