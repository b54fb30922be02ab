"""The whole check with nodes that answer from memory: nobody hides or delays anybody, nothing unseen passes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
from testkit.check_fakes import FAKE_GROUP, GONE, GROUPS, HEALTHY, SILENCE, FakeFleet, SurveyedNode, answer
from testkit.machine_clock import machine_time

from cluster.checks.finding import Check, Finding, FleetReport, NodeReport, Verdict
from cluster.checks.group import CheckGroup
from cluster.checks.run import CheckObserver, CheckOptions, check_nodes, check_this_machine
from cluster.checks.selection import Selection
from cluster.errors import SshError, SshFailure
from cluster.ssh.connection import Connection
from cluster.survey.facts import NodeFacts
from cluster.survey.section import AbsentError
from engine.config.cluster import ClusterConfig

CONFIG = ClusterConfig(interface="prod")


def check(fleet: FakeFleet, config: ClusterConfig = CONFIG, **options: object) -> FleetReport:
    chosen = CheckOptions(**{"all_groups": GROUPS, "connect": fleet.connect, "timeout_s": 20.0, **options})
    return check_nodes(fleet.hosts, config, chosen)


def verdicts(report: FleetReport) -> dict[str, str]:
    return {name: node.verdict.value for name, node in report.nodes.items()}


def findings(report: FleetReport, node: str, check: str) -> list[Finding]:
    return [finding for finding in report.nodes[node].findings if finding.check == check]


def half(fence: str) -> Iterator[bytes]:
    yield f"\n{fence} begin host.disk\nok".encode()
    yield GONE


def silent(fence: str) -> Iterator[bytes]:
    yield SILENCE


def refused(name: str) -> SshError:
    return SshError(name, SshFailure.REFUSED, "refuses connections", "is sshd running?")


def test_each_node_gets_its_own_verdict() -> None:
    fleet = FakeFleet(
        {
            "good": HEALTHY,
            "warned": answer({"host.disk": "warn"}),
            "bad": answer({"host.disk": "fail"}),
            "refuses": refused("refuses"),
            "stumbles": AttributeError("NoneType has no attribute get_name"),  # of a library, over one server
            "dies": half,
            "lacks_tool": answer({"host.disk": ("sh: df: not found", 127)}),
            "blank": answer({}),
            "ahead": HEALTHY,
        },
        ahead_s={"ahead": 9.0},
    )
    report = check(fleet)
    assert verdicts(report) == {
        "good": "OK",
        "warned": "WARN",
        "bad": "FAIL",
        "refuses": "FAIL",
        "stumbles": "UNKNOWN",
        "dies": "UNKNOWN",
        "lacks_tool": "UNKNOWN",
        "blank": "UNKNOWN",
        "ahead": "FAIL",
    }
    assert report.usable == ("good", "warned")
    assert report.exit_code == 1
    assert findings(report, "refuses", "ssh.reach")[0].remedy == "is sshd running?"
    assert all(connection.is_closed for connection in fleet.connections.values())


def test_time_is_that_of_the_slowest_and_not_the_sum() -> None:
    fleet = FakeFleet({f"n{n}": silent for n in range(32)})
    begin, began = machine_time(), time.monotonic()
    report = check(fleet, timeout_s=0.6)
    assert time.monotonic() - began >= 0.6
    assert machine_time() - begin < 6.0
    assert set(verdicts(report).values()) == {"UNKNOWN"}


def test_connections_are_closed_after_an_interrupt() -> None:
    class Interrupted(CheckObserver):
        def finished(self, report: NodeReport) -> None:
            raise KeyboardInterrupt

    fleet = FakeFleet({"a": HEALTHY, "b": answer({}, delay_s=0.3)})
    kept = (replace(FAKE_GROUP, between=lambda config: {"host.disk": lambda connections, nodes: []}),)
    with pytest.raises(KeyboardInterrupt):
        check_nodes(fleet.hosts, CONFIG, CheckOptions(all_groups=kept, connect=fleet.connect), Interrupted())
    assert fleet.connections["a"].is_closed


def breaks(*_: object) -> Any:
    return [][0]


def check_nothing(*_: object) -> list[Finding]:
    return []


def absent(*_: object) -> Any:
    raise AbsentError("none here")


@pytest.mark.parametrize(
    ("group", "name", "severity", "text"),
    [
        (replace(FAKE_GROUP, look=breaks), "host", Verdict.UNKNOWN, "the check broke: IndexError: list index"),
        (replace(FAKE_GROUP, judges=(breaks,)), "host.breaks", Verdict.UNKNOWN, "the check broke: IndexError: list"),
        (replace(FAKE_GROUP, judges=(check_nothing,)), "host.nothing", Verdict.UNKNOWN, "this check gave no result"),
        (replace(FAKE_GROUP, judges=(absent,)), "host.absent", Verdict.SKIP, "none here"),
        (replace(FAKE_GROUP, look=absent), "host.disk", Verdict.SKIP, "none here"),
    ],
)
def test_a_check_that_breaks_or_says_nothing_is_unknown_and_one_that_does_not_apply_is_skipped(
    group: CheckGroup, name: str, severity: Verdict, text: str
) -> None:
    (finding,) = findings(check(FakeFleet({"n1": HEALTHY}), all_groups=(group,)), "n1", name)
    assert finding.severity is severity
    assert finding.observed.startswith(text)
    assert ("test_check_fleet.py:" in finding.evidence) == ("broke" in text)


def test_a_comparison_or_a_test_between_nodes_that_breaks_is_unknown_on_all_of_them() -> None:
    for group in (replace(FAKE_GROUP, compare=breaks), replace(FAKE_GROUP, between=lambda config: {"host.x": breaks})):
        report = check(FakeFleet({"n1": HEALTHY, "n2": HEALTHY}), all_groups=(group,))
        assert verdicts(report) == {"n1": "UNKNOWN", "n2": "UNKNOWN"}


@pytest.mark.parametrize(
    ("nodes", "tested"),
    [({"n1": HEALTHY, "n2": HEALTHY, "n3": half}, ["n1", "n2", "n3"]), ({"n1": HEALTHY, "n2": refused("n2")}, [])],
)
def test_nodes_are_tested_with_each_other_over_their_open_connections(nodes: Any, tested: list[str]) -> None:
    def test(connections: Mapping[str, Connection], facts: Mapping[str, NodeFacts]) -> list[Finding]:
        assert connections.keys() == facts.keys()
        assert not any(cast(SurveyedNode, connection).is_closed for connection in connections.values())
        return [Check(node, "host.x").fail("seen", "") for node in connections]

    report = check(FakeFleet(nodes), all_groups=(replace(FAKE_GROUP, between=lambda config: {"host.x": test}),))
    assert [name for name in nodes if findings(report, name, "host.x")] == tested
    skipped = check(
        FakeFleet(nodes),
        selection=Selection(skip=("host.x",)),
        all_groups=(replace(FAKE_GROUP, between=lambda config: {"host.x": test}),),
    )
    assert not any(findings(skipped, name, "host.x") for name in nodes)
    (alone,) = findings(
        check(
            FakeFleet({"n1": HEALTHY}),
            selection=Selection(only=("host.x",)),
            all_groups=(replace(FAKE_GROUP, between=lambda config: {"host.x": test}, compared={"host.x": "."}),),
        ),
        "n1",
        "host.x",
    )
    assert alone.observed == "it is made between nodes, and no other was reached"


def test_this_machine_alone_has_no_ssh_and_nobody_to_compare_with() -> None:
    report = check_this_machine(CONFIG, CheckOptions(selection=Selection(only=("host",)), timeout_s=60))
    (node,) = report.nodes.values()
    assert {finding.check.partition(".")[0] for finding in node.findings} == {"host"}
    (python,) = findings(report, node.node, "host.python")
    assert python.severity is Verdict.OK  # of this Python, which launches here take
