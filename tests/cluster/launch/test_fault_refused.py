"""Launches that must not start, by the command line on a virtual cluster: the reason is said, nothing is started."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.command_line import Burst
from testkit.fake_run import HURRIED, TestbedRun
from testkit.fault_rig import SMALL
from testkit.fault_table import REFUSED, Row
from testkit.testbed_fixture import Testbeds

from cluster.control.attempt import StopRequests
from cluster.plan import with_exclusive
from cluster.testbed.faults import clear_faults, set_fault
from cluster.testbed.testbed import Testbed
from engine.runs.folder import list_runs

PORT_HOLDER = "import socket,sys; s=socket.create_server(('',29555)); print('ready',flush=True); sys.stdin.read()"
SPECIAL = ("hold the port", "put a file there", "run another")


@pytest.fixture(scope="module")
def testbed(module_testbeds: Testbeds) -> Testbed:
    return module_testbeds.make(nodes=2)


@pytest.fixture
def words(
    module_testbeds: Testbeds, testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """The settings of a small run on the testbed, whose nodes are healthy again afterwards."""
    homes = {"CONFIG": module_testbeds.config_dir, "STATE": tmp_path / "state", "CACHE": tmp_path / "cache"}
    for name, folder in homes.items():
        monkeypatch.setenv(f"XDG_{name}_HOME", str(folder))
    monkeypatch.setenv("BURST_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "1000")
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    yield [*SMALL, f"data.paths=[{tmp_path}/corpus.txt]", f"cluster={testbed.name}"]
    for node in testbed.node_names:
        clear_faults(testbed, node)


def check(row: Row, words: list[str], burst: Burst) -> str:
    """What the refused launch says."""
    code, _, said = burst("launch", *words, *row.words)
    assert code == row.exit_code, said
    assert row.blamed in said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("row", [row for row in REFUSED if row.do not in SPECIAL], ids=lambda row: row.fault)
def test_launch_that_cannot_work_is_refused_with_its_reason_and_starts_nothing(
    testbed: Testbed, words: list[str], tmp_path: Path, burst: Burst, row: Row
) -> None:
    node = testbed.node_names[1]
    if row.do:
        folder = testbed.node(node).home / ".burst"
        folder.mkdir(exist_ok=True)
        set_fault(testbed, node, row.do, str(folder) if row.do == "disk_full" else None)
        words = [*words, "cluster.ssh.connect_timeout_s=2"]  # a healthy node may be slow
    said = check(row, words, burst)
    assert node in said or not row.do
    assert list_runs(tmp_path / "runs") == []


def test_port_that_somebody_uses_is_refused_before_anything_starts(
    testbed: Testbed, words: list[str], burst: Burst
) -> None:
    (row,) = (row for row in REFUSED if row.do == "hold the port")
    command = testbed.node(testbed.node_names[0]).inside(sys.executable, "-c", PORT_HOLDER)
    with contextlib.ExitStack() as stack:
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(holder.communicate)
        stack.callback(holder.kill)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        check(row, words, burst)


def test_runs_folder_that_cannot_be_written_is_named_before_any_node_is_asked(
    words: list[str], tmp_path: Path, burst: Burst
) -> None:
    (row,) = (row for row in REFUSED if row.do == "put a file there")
    (tmp_path / "file").write_text("")
    check(row, [*words, "cluster.ssh.port=1", "--runs-dir", str(tmp_path / "file" / "runs")], burst)


def test_second_launch_on_busy_nodes_is_refused_and_the_first_goes_on(
    testbed: Testbed, words: list[str], tmp_path: Path, burst: Burst
) -> None:
    (row,) = (row for row in REFUSED if row.do == "run another")
    first, stop, said = TestbedRun(testbed, tmp_path / "first", "wait"), StopRequests(), []
    first.plan = with_exclusive(first.plan, exclusive=True)

    def launch_another() -> None:
        if first.is_under_way and not said:
            said.append(check(row, words, burst))
            stop.count, stop.cause = 1, "Ctrl-C"

    outcome, _ = first.lead(launch_another, stop, HURRIED)
    assert first.run.run_id in said[0]
    assert outcome.status == "cancelled"
