"""The whole check: nobody hides or delays anybody, nothing unseen passes. Most nodes answer from memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
from testkit.check_fakes import FAKE_GROUP, GONE, GROUPS, HEALTHY, SILENCE, FakeFleet, SurveyedNode, answer, told
from testkit.machine_clock import machine_time
from testkit.testbed_fixture import Testbeds

from cluster.checks.check import Check, CheckGroup, Finding, FleetReport, NodeReport, Selection, Verdict
from cluster.checks.run import CheckObserver, CheckOptions, check_nodes, check_this_machine
from cluster.checks.selection import GROUPS as ALL_GROUPS
from cluster.errors import ClusterError, SshError, SshFailure
from cluster.ssh.connection import Connection
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NotApplicableError
from cluster.testbed.faults import set_fault
from cluster.testbed.status import read_status
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


REACH = "ssh.reach: {}; expected: a connection"
# What a node does, and what is said of it: of what is not fine its verdict, words and remedy.
NODES: dict[str, tuple[Any, str, str]] = {
    "good": (HEALTHY, "OK", ""),
    "warned": (answer({"host.disk": "warn"}), "WARN host.disk: warn", ""),
    "bad": (answer({"host.disk": "fail"}), "FAIL host.disk: fail", ""),
    "refuses": (refused("refuses"), f"FAIL {REACH.format('refuses connections')}", "is sshd running?"),
    "hangs": (SshError("n", SshFailure.TIMEOUT, "silent"), f"FAIL {REACH.format('silent')}", "look at the node's cons"),
    "odd": (SshError("n", SshFailure.LOST, "went\n\x1b[31mwrong"), f"FAIL {REACH.format('went wrong')}", "look at the"),
    "unsure": (ClusterError("went wrong"), f"FAIL {REACH.format('went wrong')}", ""),
    "stumbles": (AttributeError("of a library"), "UNKNOWN ssh.reach: the check broke: AttributeError", "report this"),
    "dies": (half, "UNKNOWN ssh.probe: the connection ended while a command ran; expected: a complete", "run it again"),
    "lacks_tool": (
        answer({"host.disk": ("sh: df: not found", 127)}),
        "UNKNOWN host.disk: host.disk: exit code 127",
        "",
    ),
    "blank": (answer({}), "UNKNOWN host.disk: host.disk: missing", ""),
    "ahead": (HEALTHY, "FAIL ssh.clock: its clock is ", "start chrony"),
}


def test_each_node_gets_its_own_verdict() -> None:
    fleet = FakeFleet({name: does for name, (does, _, _) in NODES.items()}, ahead_s={"ahead": 9.0})
    report = check(fleet)
    for name, (_, words, remedy) in NODES.items():
        odd = [finding for finding in report.nodes[name].findings if not finding.severity.is_fine]
        assert [line[: len(words)] for line in told(odd)[:1]] == [words] * (words != "OK"), name
        assert all(finding.remedy.startswith(remedy) for finding in odd[:1]), name
    assert (report.usable, report.exit_code) == (("good", "warned"), 1)
    assert findings(report, "refuses", "ssh.reach")[0].evidence == SshFailure.REFUSED
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
    raise NotApplicableError("none here")


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


def seen_together(connections: Mapping[str, Connection], facts: Mapping[str, NodeFacts]) -> list[Finding]:
    assert connections.keys() == facts.keys()
    assert not any(cast(SurveyedNode, connection).is_closed for connection in connections.values())
    return [Check(node, "host.x").fail("seen", "") for node in connections]


BETWEEN = (replace(FAKE_GROUP, between=lambda config: {"host.x": seen_together}, compared={"host.x": "."}),)
ALONE = ["it is made between nodes, and no other was reached"]


@pytest.mark.parametrize(
    ("nodes", "selection", "said"),
    [
        ({"n1": HEALTHY, "n2": HEALTHY, "n3": half}, {}, [["seen"]] * 3),
        ({"n1": HEALTHY, "n2": HEALTHY}, {"skip": ("host.x",)}, [[]] * 2),
        ({"n1": HEALTHY, "n2": refused("n2")}, {}, [[]] * 2),
        ({"n1": HEALTHY}, {"only": ("host.x",)}, [ALONE]),
    ],
)
def test_nodes_are_tested_with_each_other_over_their_open_connections(nodes: Any, selection: Any, said: Any) -> None:
    report = check(FakeFleet(nodes), selection=Selection(**selection), all_groups=BETWEEN)
    assert [[one.observed for one in findings(report, name, "host.x")] for name in nodes] == said


def test_this_machine_alone_has_no_ssh_and_nobody_to_compare_with() -> None:
    report = check_this_machine(CONFIG, CheckOptions(ALL_GROUPS, Selection(only=("host",)), timeout_s=60))
    (node,) = report.nodes.values()
    assert {finding.check.partition(".")[0] for finding in node.findings} == {"host"}
    (python,) = findings(report, node.node, "host.python")
    assert python.severity is Verdict.OK  # of this Python, which launches here take


# --- over real sshd ---------------------------------------------------------------------------------------------------

# Of every node but the first, which is healthy.
FAULTS = (
    *(("link_down", None), ("sshd_stop", None), ("sshd_hang", None), ("key_swap", None)),
    *(("hardware", "busy:0"), ("hardware", "driver:535.104.05")),
)


def test_each_node_is_named_with_its_own_fault_and_no_other(module_testbeds: Testbeds) -> None:
    testbed = module_testbeds.make(nodes=7, hardware="h100x8")
    for node, (kind, value) in zip(testbed.node_names[1:], FAULTS, strict=True):
        set_fault(testbed, node, kind, value)
    hosts = [replace(testbed.host(name), connect_timeout_s=4.0) for name in testbed.node_names]
    report = check_nodes(hosts, ClusterConfig(), CheckOptions(ALL_GROUPS, Selection(only=("ssh", "gpu", "net"))))
    names = list(report.nodes)
    odd = [[one for one in node.findings if not one.severity.is_fine] for node in report.nodes.values()]
    told = [[(one.check, one.severity, one.device, one.evidence) for one in found] for found in odd]
    reach = ("ssh.reach", Verdict.FAIL, None)
    assert told == [
        [],
        [(*reach, SshFailure.TIMEOUT)],
        [(*reach, SshFailure.REFUSED)],
        [(*reach, SshFailure.TIMEOUT)],
        [(*reach, SshFailure.HOST_KEY_CHANGED)],
        [("gpu.busy", Verdict.FAIL, "GPU 0", "")],
        [("gpu.driver", Verdict.FAIL, None, "")],
    ]
    assert (report.usable, report.exit_code) == ((names[0],), 1)
    status = read_status(testbed.name).nodes
    assert [str(node.sshd) for node in status] == ["up", "unreachable", "refused", "silent", "up", "up", "up"]
    assert [node.faults for node in status[:3]] == [(), ("link_down",), ("sshd_stop",)]
    assert ["silent" in found.observed for (found,) in odd[1:4]] == [False, False, True]
    (key,), (busy,), (driver,) = odd[4:]
    assert len(report.nodes[names[4]].findings) == 1  # it was asked nothing
    assert "burst hosts" in key.remedy
    assert "root" in busy.observed
    assert (driver.observed, driver.expected) == ("535.104.05", "550.127.05, as 2 of 3 nodes have")
    for name in (names[0], *names[5:]):  # which talk to each other
        found = {f.check: f.severity for f in report.nodes[name].findings}
        assert found["net.pairs"] is Verdict.OK
