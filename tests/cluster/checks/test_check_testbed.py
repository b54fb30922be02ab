"""The check against real sshd: every fault is named on its node, and nobody waits for the sum of the timeouts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.testbed_fixture import Testbeds

from burst_cli.app import main
from cluster.checks.finding import Finding, FleetReport, Verdict
from cluster.checks.run import CheckOptions, check_nodes
from cluster.checks.selection import read_selection
from cluster.errors import SshFailure
from cluster.ssh.nodes import fold_nodes
from cluster.testbed.build import Testbed
from cluster.testbed.faults import clear_faults, set_fault
from engine.config.cluster import ClusterConfig

CONNECT_TIMEOUT_S = 4.0
# (node number, kind of fault, value): number 1 is healthy.
FAULTS = (
    (2, "link_down", None),
    (3, "sshd_stop", None),
    (4, "sshd_hang", None),
    (5, "key_swap", None),
    (6, "slow_shell", "1.5"),
    (6, "hardware", "busy:0"),
    (7, "hardware", "driver:535.104.05"),
)


@pytest.fixture(scope="module")
def config_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """XDG_CONFIG_HOME of the testbed."""
    return tmp_path_factory.mktemp("broken")


@pytest.fixture(scope="module")
def broken(testbed_machine: None, config_dir: Path) -> Iterator[Testbed]:
    """Seven nodes with fake GPUs, six of them with faults."""
    testbeds = Testbeds(config_dir)
    try:
        testbed = testbeds.make(nodes=7, hardware="h100x8")
        for number, kind, value in FAULTS:
            set_fault(testbed, testbed.node_names[number - 1], kind, value)
        yield testbed
    finally:
        testbeds.close()


@pytest.fixture(scope="module")
def report(broken: Testbed) -> FleetReport:
    return check(broken, ["ssh", "gpu"])


def check(testbed: Testbed, only: list[str], *names: str) -> FleetReport:
    hosts = [host for host in testbed.hosts(CONNECT_TIMEOUT_S) if not names or host.name in names]
    return check_nodes(hosts, ClusterConfig(), CheckOptions(read_selection(only)))


def bad(report: FleetReport, name: str) -> list[Finding]:
    return [f for f in report.nodes[name].findings if f.severity not in (Verdict.OK, Verdict.SKIP)]


def test_each_node_is_named_with_its_own_fault_and_no_other(report: FleetReport) -> None:
    names = list(report.nodes)
    told = {number: [(f.check, f.severity) for f in bad(report, names[number - 1])] for number in range(1, 8)}
    unreachable = [("ssh.reach", Verdict.FAIL)]
    assert told == {
        1: [],
        2: unreachable,
        3: unreachable,
        4: unreachable,
        5: unreachable,
        6: [("gpu.busy", Verdict.FAIL)],
        7: [("gpu.driver", Verdict.FAIL)],
    }
    assert report.usable == (names[0],)
    assert report.exit_code == 1


def test_ways_of_not_being_reached_are_different_answers(report: FleetReport) -> None:
    names = list(report.nodes)
    assert [bad(report, names[number - 1])[0].evidence for number in (2, 3, 4, 5)] == [
        SshFailure.TIMEOUT.value,
        SshFailure.REFUSED.value,
        SshFailure.TIMEOUT.value,
        SshFailure.HOST_KEY_CHANGED.value,
    ]
    assert "silent" in bad(report, names[3])[0].observed
    assert "silent" not in bad(report, names[1])[0].observed


def test_findings_say_what_was_seen_and_what_should_be(report: FleetReport) -> None:
    names = list(report.nodes)
    (busy,), (driver,) = bad(report, names[5]), bad(report, names[6])
    assert busy.device == "GPU 0"
    assert "root" in busy.observed
    assert driver.observed == "535.104.05"
    assert "as 2 of 3 nodes have" in driver.expected
    assert busy.remedy
    assert driver.remedy


def test_the_whole_takes_as_long_as_the_slowest_node(report: FleetReport) -> None:
    seconds = [node.elapsed_s for node in report.nodes.values()]
    assert report.elapsed_s < max(seconds) + 2.0
    assert report.elapsed_s < sum(seconds) / 2


def test_a_node_with_a_changed_host_key_is_asked_nothing(broken: Testbed) -> None:
    """The script that this verb replaces took any host key."""
    name = broken.node_names[4]
    report = check(broken, ["host"], name)
    assert [finding.check for finding in report.nodes[name].findings] == ["ssh.reach"]
    assert "burst hosts" in report.nodes[name].findings[0].remedy


def test_two_checks_at_once_see_their_own_nodes(broken: Testbed) -> None:
    reports: dict[str, FleetReport] = {}
    names = broken.node_names[0], broken.node_names[5]

    def run(name: str) -> None:
        reports[name] = check(broken, ["gpu.busy"], name)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reports[name].nodes[name].verdict for name in names] == [Verdict.OK, Verdict.FAIL]


def test_a_node_that_hangs_after_the_login_is_given_up(broken: Testbed) -> None:
    name = broken.node_names[0]
    set_fault(broken, name, "slow_shell", "8")
    try:
        (host,) = [host for host in broken.hosts(CONNECT_TIMEOUT_S) if host.name == name]
        report = check_nodes([host], ClusterConfig(), CheckOptions(read_selection(["gpu"]), timeout_s=2.0))
    finally:
        clear_faults(broken, name)
    assert not report.nodes[name].usable
    assert report.elapsed_s < 6


def test_healthy_nodes_can_talk_to_each_other(broken: Testbed) -> None:
    names = broken.node_names[0], broken.node_names[5], broken.node_names[6]
    report = check(broken, ["net", "host.runs"], *names)
    for name in names:
        found = {f.check: f.severity for f in report.nodes[name].findings}
        assert found["net.pairs"] is Verdict.OK
        assert found["net.subnet"] is Verdict.OK
        assert found["host.runs"] in (Verdict.OK, Verdict.WARN)  # the fake hardware hides no process


def test_the_verb_lists_the_usable_nodes_and_nothing_else(
    broken: Testbed,
    config_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config_dir))
    timeout = f"cluster.ssh.connect_timeout_s={CONNECT_TIMEOUT_S}"
    names = broken.node_names
    hosts = fold_nodes([names[number - 1] for number in (1, 3, 6)])  # the others take as long as the timeout
    code = main(["check-nodes", f"cluster={broken.name}", timeout, "--hosts", hosts, "--only", "gpu", "--list"])
    assert capsys.readouterr().out == names[0] + "\n"
    assert code == 1
