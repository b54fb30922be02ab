"""`burst image` as a person meets it: mistakes in words, tables, one JSON document."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from test_image_plan import EMPTY, IDENTITY, MIB

from burst_cli.app import main
from burst_cli.image.view import (
    PlainPushView,
    open_push_view,
    plan_view,
    prune_view,
    results_view,
    status_view,
)
from cluster.image.plan import ImagePlan, NodePlan, PushOptions, Route, choose_feeders
from cluster.image.prune import Pruned
from cluster.image.push import NodeResult
from cluster.image.status import NodeImage, build_status

HOSTILE = "[red]x[/red] \x1b[2J"


def shown(view) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200, highlight=False, emoji=False).print(view)
    return stream.getvalue()


APP = ["--image", "app:1"]
UNNAMED = "give --image NAME:TAG, or set cluster.container.image"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["push"], UNNAMED),
        (["status"], UNNAMED),
        (["push", *APP, "--limit", "fast"], "expected a rate such as 50MB/s"),
        (["push", *APP, "--route", "shared"], "is not one of"),
        (["push", "--image=--all"], "is no image name"),
        (
            ["push", *APP, "cluster.container.command=''"],
            "cluster.container.command: got '', expected a command line such as docker",
        ),
    ],
)
def test_a_mistake_is_told_before_anything_is_reached(words, expected, capsys):
    assert main(["image", *words, "--hosts", "node1"]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())


def test_an_engine_that_is_not_there_is_told_in_words(capsys):
    override = "cluster.container.command=/nowhere/docker"
    assert main(["image", "push", "--hosts", "node1", "--image", "app:1", override]) == 1
    assert "the local engine (/nowhere/docker): cannot run /nowhere/docker" in capsys.readouterr().err


def test_no_nodes_is_a_mistake_with_a_json_document(capsys):
    assert main(["image", "prune", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 2


def plan_of(*nodes: NodePlan) -> ImagePlan:
    return ImagePlan("app:1", IDENTITY, 2, 6 * MIB, "zstd", PushOptions(), choose_feeders(nodes, "auto"))


def test_a_plan_folds_equal_nodes_and_shows_the_chain():
    nodes = [EMPTY[name] for name in "abc"] + [NodePlan(f"dead{k}", Route.REFUSED, problem="dead") for k in (1, 2)]
    nodes += [NodePlan("has", Route.NONE), NodePlan("e", Route.NONE, same="sha256:x")]
    text = shown(plan_view(plan_of(*nodes)))

    assert "chain: launcher → a → b → c" in text
    assert [" ".join(line.split()) for line in text.splitlines()[2:-2]] == [
        "a direct",
        "b,c chain",
        "dead[1-2] refused dead",
        "has none up to date",
        "e none there under another name",
    ]
    assert "2 layers, 6 MiB" in text


def test_results_tell_failed_nodes_and_that_the_same_command_sends_the_rest():
    good = NodeResult("node1", True, "direct", 3 * MIB, identity=IDENTITY)
    text = shown(results_view([good, NodeResult("node2", False, "chain", error="disk full")], 3.0))

    assert f"{IDENTITY[:12]} verified" in text
    assert "1 of 2 nodes hold the image" in text
    assert "failed: node2. The same command sends what they lack." in text


def test_words_of_nodes_are_never_markup():
    result = NodeResult("node1", False, "direct", error=HOSTILE.replace("\x1b[2J", ""))
    status = build_status("app", [NodeImage("node1", problem="[red]x[/red]")], None)

    assert "[red]x[/red]" in shown(results_view([result], 1.0))
    assert "[red]x[/red]" in shown(status_view(status))
    assert "[red]x[/red]" in shown(prune_view([Pruned("node1", problem="[red]x[/red]")], dry_run=True))


def test_status_marks_what_differs_and_what_is_missing():
    found = [
        NodeImage("node1", "a" * 64),
        NodeImage("node2", "b" * 64),
        NodeImage("node3"),
        NodeImage("node4", "a" * 64),
    ]
    text = shown(status_view(build_status("app:1", found, "a" * 64)))

    assert [line.split()[:2] for line in text.splitlines()[2:]] == [
        ["node[1,4]", "a" * 12],
        ["node2", "b" * 12],
        ["node3", "missing"],
    ]
    assert "differs" in text


def test_lines_are_printed_where_there_is_no_terminal():
    stream = io.StringIO()
    nodes = [NodeResult("node1", True, "direct", MIB), NodeResult("node2", False, "chain", error="dead")]
    with open_push_view(Console(file=stream, width=100)) as view:
        assert isinstance(view, PlainPushView)
        view.progress(nodes, MIB)
        view.progress(nodes, MIB)
        view.note("node2", "is lost")

    assert stream.getvalue().splitlines() == ["node1: done", "node2: failed", "note: node2: is lost"]


def test_a_terminal_shows_a_bar_per_node_that_fits_its_height():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, height=8)
    nodes = [NodeResult(f"node{k}", True, "chain", MIB) for k in range(20)]
    nodes.append(NodeResult("slow", False, "chain", MIB // 2))
    with open_push_view(console) as view:
        view.progress(nodes, MIB)

    assert "slow" in stream.getvalue()
    assert "512 KiB of 1 MiB" in stream.getvalue()
    assert "and 17 more" in stream.getvalue()
