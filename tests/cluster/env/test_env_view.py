"""Environments as people see them: equal nodes once, foreign text as text."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from env_topologies import SISTERS, machine, node, port
from testkit.terminal import text_of

from burst_cli.nodes.env import CheckReport, check_report, fleet_view, fold_environments, report_view
from cluster.checks.check import Finding, Verdict
from cluster.env.ask import FleetEnvironment
from cluster.env.live import LiveSource
from cluster.env.plan import plan_fleet
from engine.config.cluster import ClusterConfig


def rows_of(text: str) -> list[list[str]]:
    """The cells of all tables in a text."""
    lines = (line.replace("┃", "│") for line in text.splitlines())
    return [[cell.strip() for cell in line[1:-1].split("│")] for line in lines if line.startswith("│")]


def equal_nodes(*names: str) -> FleetEnvironment:
    return FleetEnvironment(plan_fleet([machine("h100_12nics", node=name) for name in names], ClusterConfig()))


def test_other_addresses_do_not_make_another_class_and_sisters_do() -> None:
    facts = [machine("h100_12nics", node=name) for name in ("a", "b")]
    moved = tuple(replace(one, addresses=("10.0.0.99/24",)) for one in facts[1].network.interfaces)
    bond = next(one for one in moved if one.name == "bond0")
    facts[1] = machine("h100_12nics", node="b", interfaces=moved, interface=bond)
    for nodes, classes in ((facts, [["a", "b"]]), ([machine(name) for name in SISTERS], [[name] for name in SISTERS])):
        assert [names for names, _ in fold_environments(plan_fleet(nodes, ClusterConfig()))] == classes


def test_equal_nodes_are_shown_once_and_foreign_text_is_text_and_not_markup() -> None:
    one = node(port("mlx5_0", netdev="[bold]ib0[/bold]"), trouble="[red]x[/red][/]")
    text = text_of(fleet_view(FleetEnvironment({"node1": one, "node2": replace(one, node="node2")}), "--hosts"))
    why = "up, InfiniBand, 400 Gbit/s; GPU 0 by taking turns, for no port is nearer than another"
    assert rows_of(text) == [
        ["variable", "value", "why"],
        *([told.name, told.value, told.reason.strip()] for told in one.variables),
        *([told.name, "not set", told.reason] for told in one.left_out),
        ["port", "interface", "GPU", "", "why"],
        ["mlx5_0:1", "[bold]ib0[/bold]", "0", "kept", why],
    ]
    others = [line for line in text.splitlines() if line[:1] not in "┏┡└│┃"]
    assert others == ["node[1-2]  (2 nodes)", "warning: [red]x[/red][/]", "2 nodes from --hosts"]
    down = node(port("mlx5_0", state="DOWN"))
    text = text_of(fleet_view(FleetEnvironment({"node1": down}), "--hosts"))
    assert rows_of(text)[-1] == ["mlx5_0:1", "-", "-", "dropped", down.hcas[0].reason]
    assert [text.splitlines()[place] for place in (0, -1)] == ["node1", "1 node from --hosts"]


def test_findings_about_a_log_are_a_table_and_a_document() -> None:
    finding = Finding("env.nccl_log", "[b]n[/b]", Verdict.FAIL, "[red]x[/]", "y", remedy="[/]")
    report = CheckReport(findings=(finding,))
    assert rows_of(text_of(report_view(report))) == [
        ["node", "", "observed", "expected", "what to do"],
        ["[b]n[/b]", "FAIL", "[red]x[/]", "y", "[/]"],
    ]
    assert report.to_dict() == {"nodes": {}, "errors": {}, "exit_code": 1, "nccl_log": [asdict(finding)]}


def test_the_same_difference_on_many_nodes_is_one_line() -> None:
    fleet = equal_nodes("tb1", "tb2", "tb3")
    live = {name: (LiveSource("login", {"NCCL_DEBUG": "[b]TRACE"}),) for name in fleet.environments}
    report = check_report(replace(fleet, live=live, errors={"tb4": "refused"}), None)
    text = text_of(report_view(report))
    assert rows_of(text) == [
        ["nodes", "where", "variable", "", "set", "planned"],
        ["tb[1-3]", "login", "NCCL_DEBUG", "unknown", "[b]TRACE", "-"],
    ]
    assert text.splitlines()[-1] == "1 difference on 3 nodes"
    told = {"place": "login", "name": "NCCL_DEBUG", "planned": None, "live": "[b]TRACE", "kind": "unknown"}
    nodes = {name: {"differences": [told]} for name in live}
    assert report.to_dict() == {"nodes": nodes, "errors": {"tb4": "refused"}, "exit_code": 1}


def test_exit_codes_tell_differences_from_the_unknown() -> None:
    cases: list[tuple[dict[str, Any], str | None, int]] = [
        ({}, None, 0),
        ({"errors": {"tb2": "refused"}}, None, 3),
        ({}, "nothing", 3),
        ({"live": {"tb1": (LiveSource("login", {"NCCL_X": "1"}),)}, "errors": {"tb2": "refused"}}, None, 1),
    ]
    for changes, log, code in cases:
        assert check_report(replace(equal_nodes("tb1"), **changes), log).exit_code == code


def test_nothing_to_complain_of_says_what_was_looked_at() -> None:
    rank = LiveSource("rank 0", {one.name: one.value for one in equal_nodes("tb1").environments["tb1"].variables}, True)
    fleet = replace(equal_nodes("tb1"), live={"tb1": (rank,)})
    told = "tb1: nothing differs from the plan (looked at: login, nccl.conf, 1 running rank)\n"
    assert text_of(report_view(check_report(fleet, None))) == told
    assert text_of(report_view(CheckReport())) == "no node could be looked at\n"
