"""Environments as people see them: equal nodes once, foreign text as text."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

from env_topologies import SISTERS, machine, node, port
from rich.console import Console, RenderableType

from burst_cli.nodes.env_view import CheckReport, check_report, files_view, fleet_view, fold_environments, report_view
from cluster.checks.finding import Finding, Verdict
from cluster.env.ask import FleetEnvironment
from cluster.env.live import LiveSource
from cluster.env.plan import plan_fleet
from engine.config.cluster import ClusterConfig

MARKUP = "[red]x[/red][/] \x1b[31m"


def shown(view: RenderableType) -> str:
    console = Console(file=StringIO(), width=200, highlight=False, emoji=False)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined]


def equal_nodes(*names: str) -> FleetEnvironment:
    return FleetEnvironment(plan_fleet([machine("h100_12nics", node=name) for name in names], ClusterConfig()))


def test_equal_nodes_are_shown_once_under_a_folded_name() -> None:
    text = shown(fleet_view(equal_nodes("tb1", "tb2", "tb3", "tb4"), "--hosts"))
    assert "tb[1-4]  (4 nodes)" in text
    assert text.count("NCCL_IB_HCA") == 1
    assert "4 nodes from --hosts" in text


def test_other_addresses_do_not_make_another_class() -> None:
    facts = [machine("h100_12nics", node=name) for name in ("a", "b")]
    moved = tuple(replace(one, addresses=("10.0.0.99/24",)) for one in facts[1].interfaces)
    other = next(one for one in moved if one.name == "bond0")
    environments = plan_fleet([facts[0], replace(facts[1], interfaces=moved, interface=other)], ClusterConfig())
    assert len(fold_environments(environments)) == 1


def test_sisters_are_classes_of_their_own() -> None:
    environments = plan_fleet([machine(name) for name in SISTERS], ClusterConfig())
    assert [names for names, _ in fold_environments(environments)] == [[name] for name in SISTERS]


def test_foreign_text_is_text_and_not_markup() -> None:
    environment = node(port("mlx5_0", netdev="[bold]ib0[/bold]"), notes=(MARKUP.replace("\x1b[31m", ""),))
    text = shown(fleet_view(FleetEnvironment({"node1": environment}), "--hosts"))
    assert "[bold]ib0[/bold]" in text
    assert "[red]x[/red][/]" in text
    finding = Finding("env.nccl_log", "[b]n[/b]", Verdict.FAIL, "[red]x[/]", remedy="[/]")
    assert "[red]x[/]" in shown(report_view(CheckReport(findings=(finding,))))


def test_the_same_difference_on_many_nodes_is_one_line() -> None:
    fleet = equal_nodes("tb1", "tb2", "tb3")
    live = {name: (LiveSource("login", {"NCCL_DEBUG": "[b]TRACE"}),) for name in fleet.environments}
    report = check_report(replace(fleet, live=live), None)
    text = shown(report_view(report))
    assert report.exit_code == 1
    assert text.count("[b]TRACE") == 1
    assert "tb[1-3]" in text
    assert "1 difference on 3 nodes" in text


def test_exit_codes_tell_differences_from_the_unknown() -> None:
    fleet = equal_nodes("tb1")
    assert check_report(fleet, None).exit_code == 0
    assert check_report(replace(fleet, errors={"tb2": "refused"}), None).exit_code == 3
    assert check_report(fleet, "nothing").exit_code == 3
    odd = {"tb1": (LiveSource("login", {"NCCL_X": "1"}),)}
    assert check_report(replace(fleet, live=odd, errors={"tb2": "refused"}), None).exit_code == 1


def test_nothing_to_complain_of_says_what_was_looked_at() -> None:
    rank = LiveSource("rank 0", {one.name: one.value for one in equal_nodes("tb1").environments["tb1"].variables}, True)
    fleet = replace(equal_nodes("tb1"), live={"tb1": (rank,)})
    assert "looked at: login, nccl.conf, 1 running rank" in shown(report_view(check_report(fleet, None)))
    assert "no node could be looked at" in shown(report_view(CheckReport()))


def test_written_files_are_listed_with_warnings_once() -> None:
    fleet = equal_nodes("tb1", "tb2")
    warned = {name: replace(one, warnings=("beware",)) for name, one in fleet.environments.items()}
    text = shown(files_view({name: Path(f"/x/{name}.env") for name in warned}, replace(fleet, environments=warned)))
    assert "/x/tb2.env" in text
    assert text.count("beware") == 1
    assert "tb[1-2]: beware" in text
