"""`burst image` as a person meets it: mistakes in words, tables, one JSON document."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from test_image_plan import EMPTY, IDENTITY, MIB
from testkit.terminal import lines_of, text_of

from burst_cli.image.view import (
    PushView,
    plan_view,
    prune_view,
    results_view,
    status_view,
)
from cluster.image.plan import ImagePlan, NodePlan, Route, choose_feeders
from cluster.image.push import NodeResult
from cluster.image.status import NodeImage, Pruned, build_status

HOSTILE = "[red]x[/red] \x1b[2J"


APP = ["--image", "app:1"]
UNNAMED = "give --image NAME:TAG, or set cluster.container.image"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["push"], UNNAMED),
        (["push", *APP, "--limit", "fast"], "expected a rate such as 50MB/s"),
        (["push", *APP, "--route", "shared"], "is not one of"),
        (["push", "--image=--all"], "is no image name"),
        (
            ["push", *APP, "cluster.container.command=''"],
            "cluster.container.command: got '', expected a command line such as docker",
        ),
    ],
)
def test_a_mistake_is_told_before_anything_is_reached(words, expected, burst):
    result = burst("image", *words, "--hosts", "node1")
    assert result.code == 2
    assert expected in " ".join(result.err.split())


def test_an_engine_that_is_not_there_is_told_in_words(burst):
    result = burst("image", "push", "--hosts", "node1", *APP, "cluster.container.command=/nowhere/docker")
    assert result.code == 1
    assert "the local engine (/nowhere/docker): cannot run /nowhere/docker" in result.err


def plan_of(*nodes: NodePlan) -> ImagePlan:
    return ImagePlan("app:1", IDENTITY, 2, 6 * MIB, "zstd", None, choose_feeders(nodes, "auto"))


def test_a_plan_folds_equal_nodes_and_shows_the_chain():
    nodes = [EMPTY[name] for name in "abc"] + [NodePlan(f"dead{k}", Route.REFUSED, problem="dead") for k in (1, 2)]
    nodes.append(NodePlan("has", Route.NONE))
    assert lines_of(plan_view(plan_of(*nodes))) == [
        f"app:1 identity {IDENTITY[:12]} 2 layers, 6 MiB",
        "nodes route",
        "a direct",
        "b,c chain",
        "dead[1-2] refused dead",
        "has none up to date",
        "chain: launcher → a → b → c",
        "to send: layers that a node lacks, packed with zstd",
    ]
    assert lines_of(plan_view(plan_of(NodePlan("has", Route.NONE))))[-1] == "nothing to send"


def test_results_tell_failed_nodes_and_that_the_same_command_sends_the_rest():
    good = NodeResult("node1", True, "direct", 3 * MIB, 2.5, IDENTITY, notes=["slow", "alone"])
    hold = "nodes hold the image, 0:03"
    assert lines_of(results_view([good, NodeResult("node2", False, "chain", error="disk full")], 3.0)) == [
        "node result received time identity",
        f"node1 OK 3 MiB 2.5 s {IDENTITY[:12]} verified slow; alone",
        "node2 FAILED 0 B 0 ms – disk full",
        f"1 of 2 {hold}; failed: node2. The same command sends what they lack.",
    ]
    assert lines_of(results_view([good], 3.0))[-1] == f"1 of 1 {hold}"


def test_words_of_nodes_are_never_markup():
    result = NodeResult("node1", False, "direct", error=HOSTILE.replace("\x1b[2J", ""))
    status = build_status("app", [NodeImage("node1", problem="[red]x[/red]")], None)

    assert "[red]x[/red]" in text_of(results_view([result], 1.0))
    assert "[red]x[/red]" in text_of(status_view(status))
    assert "[red]x[/red]" in text_of(prune_view([Pruned("node1", problem="[red]x[/red]")], dry_run=True))


def test_status_marks_what_differs_and_what_is_missing():
    found = [
        NodeImage("node1", "a" * 64),
        NodeImage("node2", "b" * 64),
        NodeImage("node3"),
        NodeImage("node4", "a" * 64),
    ]
    assert lines_of(status_view(build_status("app:1", found, "a" * 64))) == [
        f"app:1 should be {'a' * 12} (as this machine)",
        "nodes image id created",
        f"node[1,4] {'a' * 12}",
        f"node2 {'b' * 12} differs",
        "node3 missing",
    ]
    unseen = [NodeImage("node1"), NodeImage("node2", problem="no answer")]
    assert lines_of(status_view(build_status("app:1", unseen, None))) == [
        "app:1 was seen nowhere, but not all could be asked",
        "nodes image id created",
        "node1 missing",
        "node2 unknown no answer",
    ]
    assert lines_of(status_view(build_status("app:1", unseen[:1], None)))[0] == "app:1 nobody has it"


def test_what_is_removed_is_told_by_node():
    nodes = [Pruned("node1", ("app:2", "app:3")), Pruned("node2"), Pruned("node3", problem="no answer")]
    told = ["node1: removed app:2, app:3", "node2: removed nothing", "node3: no answer"]
    assert lines_of(prune_view(nodes, dry_run=False)) == told
    assert lines_of(prune_view(nodes, dry_run=True))[0] == "node1: would remove app:2, app:3"


@pytest.mark.parametrize("terminal", [True, False])
def test_nodes_that_are_done_get_a_line_and_a_terminal_shows_how_far_the_others_are(terminal: bool):
    stream, shown = io.StringIO(), []
    nodes = [NodeResult("node1", True, "direct", MIB), NodeResult("node2", False, "chain", error="dead")]
    nodes += [NodeResult(f"slow{k}", False, "chain", MIB // 2 * k) for k in range(6)]
    view = PushView(Console(file=stream, force_terminal=terminal, width=100), lambda text: shown.append(str(text)))
    view.progress(nodes, MIB)
    view.progress(nodes, MIB)
    view.note("node2", "is lost")
    printed = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in stream.getvalue().splitlines()]
    assert printed == ["node1: done", "node2: failed", "note: node2: is lost"]
    assert shown[-1] == "slow0 0 B of 1 MiB  slow1 512 KiB of 1 MiB  slow2 loading  slow3 loading  and 2 more"
