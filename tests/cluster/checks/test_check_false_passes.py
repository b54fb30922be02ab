"""Mistakes that scripts for checking nodes make, each as a test: what would let a bad node pass, or a good one fail."""

from __future__ import annotations

import io
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from testkit.check_fakes import GROUPS, HEALTHY, FakeFleet, FakeGroup, answer, run_script
from testkit.machine_clock import machine_time

from burst_cli.check_view import print_usable
from cluster.access.nodes import parse_nodes
from cluster.checks.finding import Finding, Verdict
from cluster.checks.group import CheckGroup
from cluster.checks.profile import profile_findings
from cluster.checks.run import CheckOptions, check_nodes
from cluster.checks.selection import GROUP_NAMES
from cluster.checks.verdicts import FleetReport
from cluster.probe.script import build_script, is_complete, new_fence
from cluster.probe.section import NodeProbe, SectionState
from engine.config_cluster import ClusterConfig, ExpectedHardware

CONFIG = ClusterConfig()


def check(fleet: FakeFleet, timeout_s: float = 60.0, groups: tuple[CheckGroup, ...] = GROUPS) -> FleetReport:
    return check_nodes(fleet.hosts, CONFIG, CheckOptions(all_groups=groups, connect=fleet.connect, timeout_s=timeout_s))


def listed(report: FleetReport, *, one_per_line: bool = False) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        print_usable(report, one_per_line=one_per_line)
    return out.getvalue()


# The script that this verb replaces.


def test_no_node_numbers_in_the_machine_readable_list() -> None:
    """It printed the number of every node that it looked at into the list of good nodes."""
    fleet = FakeFleet({f"bjdx{n}": HEALTHY for n in (1, 2, 3, 7)} | {"bjdx4": answer({"host.disk": "fail"})})
    report = check(fleet)
    assert listed(report) == "bjdx[1-3,7]\n"
    assert listed(report, one_per_line=True) == "bjdx1\nbjdx2\nbjdx3\nbjdx7\n"
    assert parse_nodes(listed(report), "list").names == report.usable


def test_an_empty_list_is_empty() -> None:
    report = check(FakeFleet({"n1": answer({"host.disk": "fail"})}))
    assert listed(report) == listed(report, one_per_line=True) == ""


def test_results_are_waited_for_and_not_slept_for() -> None:
    """It slept five seconds and read what was there: slower nodes were lost, and fast fleets waited."""
    begin = machine_time()
    check(FakeFleet({"n1": HEALTHY, "n2": HEALTHY}))
    assert machine_time() - begin < 1.5
    slow = check(FakeFleet({"fast": HEALTHY, "slow": answer({"host.disk": "fail"}, delay_s=1.0)}))
    assert slow.nodes["slow"].verdict is Verdict.FAIL


def test_checks_at_the_same_time_share_nothing() -> None:
    """It kept results in files of fixed names in /tmp, so two runs read each other's answers."""
    meet = threading.Barrier(2)
    reports: dict[str, FleetReport] = {}

    def run(verdict: str) -> None:
        def tell(fence: str) -> Iterator[bytes]:
            meet.wait(200)
            yield from answer({"host.disk": verdict})(fence)

        reports[verdict] = check(FakeFleet({"n1": tell}))

    threads = [threading.Thread(target=run, args=(verdict,)) for verdict in ("ok", "fail")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reports["ok"].nodes["n1"].verdict is Verdict.OK
    assert reports["fail"].nodes["n1"].verdict is Verdict.FAIL


def test_probes_write_no_files(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    fence = new_fence()
    command = subprocess.run(
        ["sh", "-s"],
        input=build_script(GROUP_NAMES, fence),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=200,
    )
    assert is_complete(command.stdout, fence)
    assert list(tmp_path.iterdir()) == []


def test_busy_nodes_are_reported_and_not_usable() -> None:
    """It counted a node as good as soon as its GPUs could be listed, whoever was using them."""

    class Busy(FakeGroup):
        def check(self, probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
            owner = probe.section("gpu.busy").output
            severity = Verdict.FAIL if owner else Verdict.OK
            return [Finding("gpu.busy", probe.node, severity, owner or "free", device="GPU 0")]

    fleet = FakeFleet({"n1": answer({"gpu.busy": "70 GiB by alice, 3 h"}), "n2": answer({"gpu.busy": ""})})
    report = check(fleet, groups=(Busy(),))
    assert listed(report) == "n2\n"
    assert "alice" in next(f for f in report.nodes["n1"].findings if f.check == "gpu.busy").observed


# "Host keys ignored" is tested against a real sshd in test_check_testbed.py.


# Mistakes of other tools.


def test_a_count_of_unique_values_that_is_always_one_passes_nobody() -> None:
    traits = {"n1": {"gpu.driver": "550"}, "n2": {"gpu.driver": "550"}, "n3": {"gpu.driver": "535"}}
    severities = [finding.severity for finding in profile_findings(traits, ExpectedHardware())]
    assert severities == [Verdict.OK, Verdict.OK, Verdict.FAIL]


@pytest.mark.parametrize("shell", [["dash"], ["busybox", "sh"]], ids=lambda shell: shell[0])
def test_a_filter_that_finds_nothing_because_its_tool_failed_is_not_healthy(shell: list[str]) -> None:
    """`tool | grep error` has exit code 1 both when all is well and when the tool itself failed."""
    sections = run_script("section t.log 5 <<'END'\nno_such_tool 2>/dev/null | grep error\nEND\n", shell)
    assert sections["t.log"].output == ""
    assert not sections["t.log"].ok


def test_a_log_that_is_not_there_does_not_pass() -> None:
    sections = run_script("section t.log 5 <<'END'\ncat /no/such/log\nEND\n", ["dash"])
    assert sections["t.log"].state is SectionState.ENDED
    assert not sections["t.log"].ok
    report = check(FakeFleet({"n1": answer({"host.disk": ("cat: /no/such/log: No such file or directory", 1)})}))
    assert report.nodes["n1"].verdict is Verdict.UNKNOWN


def test_an_empty_answer_does_not_pass() -> None:
    assert check(FakeFleet({"n1": answer({})})).usable == ()
