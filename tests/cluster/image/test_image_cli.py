"""`burst image` as a person meets it: mistakes in words, tables, one JSON document."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from test_image_plan import EMPTY, HAS, IDENTITY, MIB, nodes_with
from testkit.terminal import lines_of, text_of

from burst_cli.image.view import PushView, plan_view, results_view, status_view
from cluster.image.engine import build_status
from cluster.image.plan import ImagePlan, NodePlan, choose_feeders
from cluster.image.push import NodeResult

APP = ["--image", "app:1"]
COMMAND = "cluster.container.command"


@pytest.mark.needs("ssh")
def test_a_mistake_is_told_before_anything_is_reached(burst):
    for words, code, expected in [
        ([], 2, "give --image NAME:TAG, or set cluster.container.image"),
        (["--image", "app@sha256:12"], 2, "push it under NAME:TAG"),
        (["--image", "sha256:12"], 2, "push it under NAME:TAG"),
        ([*APP, "--limit", "fast"], 2, "expected one such as 200mbit or 50MB/s"),
        ([*APP, f"{COMMAND}=''"], 2, f"{COMMAND}: got '', expected a command line such as docker"),
        ([*APP, f"{COMMAND}=/nowhere/d"], 1, "engine of this machine cannot be asked: [Errno 2] No such file or"),
        ([*APP, f"{COMMAND}=/nowhere/d"], 1, "'/nowhere/d'"),
    ]:
        result = burst("image", "push", *words, "--hosts", "node1")
        assert (result.code, expected in " ".join(result.err.split())) == (code, True)


def plan_of(*nodes: NodePlan) -> ImagePlan:
    return ImagePlan("app:1", IDENTITY, 2, 6 * MIB, "zstd", None, choose_feeders(nodes))


def test_a_plan_folds_equal_nodes_and_shows_the_chain():
    dead = [NodePlan(f"dead{k}", "refused", problem="dead") for k in (1, 2)]
    assert lines_of(plan_view(plan_of(*(EMPTY[name] for name in "abc"), *dead, HAS))) == [
        f"app:1 identity {IDENTITY[:12]} 2 layers, 6 MiB",
        "nodes route",
        "a direct",
        "b,c chain",
        "dead[1-2] refused dead",
        "has none up to date",
        "chain: launcher → a → b → c",
        "to send: layers that a node lacks, packed with zstd",
    ]
    assert lines_of(plan_view(plan_of(HAS)))[-1] == "nothing to send"


def test_results_tell_failed_nodes_and_that_the_same_command_sends_the_rest():
    good = NodeResult("node1", True, "direct", 3 * MIB, 2.5, IDENTITY, notes=("slow", "alone"))
    hold = "nodes hold the image, 0:03"
    assert lines_of(results_view([good, NodeResult("node2", False, "chain", error="disk full")], 3.0)) == [
        "node result received time identity",
        f"node1 OK 3 MiB 2.5 s {IDENTITY[:12]} verified slow; alone",
        "node2 FAILED 0 B 0 ms – disk full",
        f"1 of 2 {hold}; failed: node2. The same command sends what they lack.",
    ]
    assert lines_of(results_view([good], 3.0))[-1] == f"1 of 1 {hold}"


def test_words_of_nodes_are_never_markup():
    assert "[red]x[/red]" in text_of(results_view([NodeResult("node1", False, "direct", error="[red]x[/red]")], 1.0))
    assert "[red]x[/red]" in text_of(status_view(build_status("app", nodes_with("", dead=["[red]x[/red]"]), None)))


def test_status_marks_what_differs_and_what_is_missing():
    assert lines_of(status_view(build_status("app:1", nodes_with("xy x"), "x"))) == [
        "app:1 should be x (as this machine)",
        "nodes image id created",
        "a,d x x today",
        "b y y today differs",
        "c missing",
    ]
    assert lines_of(status_view(build_status("app:1", nodes_with(" ", dead="d"), None))) == [
        "app:1 was seen nowhere, but not all could be asked",
        "nodes image id created",
        "a missing",
        "d unknown d: dead",
    ]
    assert lines_of(status_view(build_status("app:1", nodes_with(" "), None)))[0] == "app:1 nobody has it"


def test_nodes_that_ended_get_a_line_and_a_terminal_shows_how_far_the_others_are():
    class Half:
        """A push of which some nodes have something."""

        total_bytes = MIB

        def received_bytes(self) -> dict[str, int]:
            return {"a": MIB, "d": 0, **{f"slow{k}": MIB // 2 * k for k in range(6)}}

    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with console.status(view := PushView(console, Half())):
        for outcome in (*nodes_with("x"), *nodes_with("", dead="d")):
            view.tell(outcome)
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert [line for line in said.splitlines() if line[1:2] == ":"] == ["a: done", "d: failed"]
    assert "slow0 0 B of 1 MiB  slow1 512 KiB of 1 MiB  slow2 loading  slow3 loading  and 2 more" in said
