"""The picture of a schedule: every word of it, and which ranks are drawn of many."""

from __future__ import annotations

import re

from burst_cli.plan.candidates import Plan, plan_one
from burst_cli.plan.schedule_picture import schedule_figure


def planned(*overrides: str) -> Plan:
    return plan_one(["exp=tiny", *overrides], [], device="cpu", has_memory=False)


def test_every_word_of_the_picture() -> None:
    plan = planned("attention=burst_ulysses", "cluster.topology_nodes=2")
    figure = schedule_figure(plan)
    seconds = r"[\d.]+ ms( \([\d.]+%\))?"
    assert re.sub(seconds, "#", figure.get_suptitle()) == (
        "burst_ulysses on 4 ranks (2 x 2), cpu: # per layer\n"
        "tiny, 2,048 tokens, layout zigzag, heads 2 x rings 2 x 1, kv circulates in backward; boxes are tiles, bars "
        "below them messages as they arrive"
    )
    titles = [re.sub(seconds, "#", axes.get_title(loc="left")) for axes in figure.axes]
    assert titles == ["forward: #\nexposed: #", "backward: #\nexposed: #"]
    assert [axes.get_xlabel() for axes in figure.axes] == ["milliseconds", "milliseconds"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "tile, full",
        "tile, causal",
        "add, copy, init",
        "waiting (exposed)",
        "payload, inner ring",
        "gradients, inner ring",
        "head exchange",
    ]
    for axes, one in zip(figure.axes, plan.preview.passes, strict=True):
        (line,) = axes.lines  # between the nodes
        first, *_, last = (axes.get_yticks()[rank] for rank in range(4))
        assert first < line.get_ydata()[0] < last
        assert axes.get_xlim() == (0, 1e3 * one.timeline.total_s)
        drawn = sum(len(group.get_paths()) for group in axes.collections)
        lanes = [i for i in one.timeline.intervals if i.lane == "compute" or i.kind in ("recv", "load", "store")]
        assert drawn == len(lanes)


def test_of_many_ranks_those_of_the_first_node_are_drawn() -> None:
    figure = schedule_figure(planned("cluster.ranks_per_node=64", "cluster.topology_nodes=8"))
    axes, _ = figure.axes
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert shown == ["rank 0", "rank 1", "rank 7"]  # of these plans were made
    assert figure.get_suptitle().endswith("; only ranks 0, 1, 7 are drawn")
