"""The check against real sshd: every fault is named on its node, and nobody waits for the sum of the timeouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testkit.testbed_fixture import Testbeds

from cluster.checks.finding import Finding, FleetReport, Verdict
from cluster.checks.run import CheckOptions, check_nodes
from cluster.checks.selection import GROUPS, read_selection
from cluster.errors import SshFailure
from cluster.testbed.faults import set_fault
from cluster.testbed.status import read_status
from cluster.testbed.testbed import Testbed
from engine.config.cluster import ClusterConfig

CONNECT_TIMEOUT_S = 4.0
# (node number, kind of fault, value): number 1 is healthy.
FAULTS = (
    (2, "link_down", None),
    (3, "sshd_stop", None),
    (4, "sshd_hang", None),
    (5, "key_swap", None),
    (6, "hardware", "busy:0"),
    (7, "hardware", "driver:535.104.05"),
)


@pytest.fixture(scope="module")
def broken(module_testbeds: Testbeds) -> Testbed:
    """Seven nodes with fake GPUs, six of them with faults."""
    testbed = module_testbeds.make(nodes=7, hardware="h100x8")
    for number, kind, value in FAULTS:
        set_fault(testbed, testbed.node_names[number - 1], kind, value)
    return testbed


def bad(report: FleetReport, name: str) -> list[Finding]:
    return [f for f in report.nodes[name].findings if f.severity not in (Verdict.OK, Verdict.SKIP)]


def test_each_node_is_named_with_its_own_fault_and_no_other(broken: Testbed) -> None:
    hosts = [replace(broken.host(name), connect_timeout_s=CONNECT_TIMEOUT_S) for name in broken.node_names]
    report = check_nodes(hosts, ClusterConfig(), CheckOptions(GROUPS, read_selection(["ssh", "gpu", "net"])))
    names = list(report.nodes)
    told = [[(f.check, f.severity, f.device, f.evidence) for f in bad(report, name)] for name in names]
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
    status = read_status(broken.name).nodes
    assert [str(node.sshd) for node in status] == ["up", "unreachable", "refused", "silent", "up", "up", "up"]
    assert [node.faults for node in status[:3]] == [(), ("link_down",), ("sshd_stop",)]
    assert ["silent" in bad(report, name)[0].observed for name in names[1:4]] == [False, False, True]
    (key,), (busy,), (driver,) = (bad(report, name) for name in names[4:])
    assert len(report.nodes[names[4]].findings) == 1  # it was asked nothing
    assert "burst hosts" in key.remedy
    assert "root" in busy.observed
    assert (driver.observed, driver.expected) == ("535.104.05", "550.127.05, as 2 of 3 nodes have")
    for name in (names[0], *names[5:]):  # which talk to each other
        found = {f.check: f.severity for f in report.nodes[name].findings}
        assert found["net.pairs"] is Verdict.OK
