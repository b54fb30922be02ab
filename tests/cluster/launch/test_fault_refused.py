"""Launches that must not start, by the command line on a virtual cluster: the reason is said, nothing is started.

Rows of nodes that a launch tells all at once are tried at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.command_line import Burst
from testkit.fake_run import HURRIED, TestbedRun
from testkit.fault_rig import SMALL, port_held
from testkit.fault_table import REFUSED, Row
from testkit.testbed_fixture import Testbeds

from cluster.control.attempt import StopRequests
from cluster.plan import with_exclusive
from cluster.testbed.faults import clear_faults, set_fault
from cluster.testbed.testbed import Testbed
from engine.runs.folder import list_runs

ROWS = {row.do or row.fault: row for row in REFUSED}
SICK = (("link_down", "sshd_stop"), ("sshd_hang", "login_refused"), ("key_swap", "disk_full"))  # on a node each
LACKING = ("interface missing", "data file missing", "no engine for containers", "hold the port")
ELSEWHERE = ("put a file there", "run another")
ALONE = ROWS.keys() - {*LACKING, *ELSEWHERE}.union(*SICK)


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


def refused(burst: Burst, words: list[str], *rows: Row) -> list[str]:
    """The lines that the refused launch says, of each row the one with its reason."""
    code, _, said = burst("launch", *words, *(word for row in rows for word in row.words))
    assert {code} == {row.exit_code for row in rows}, said
    assert "Traceback" not in said
    lines = [[line for line in said.splitlines() if row.blamed in line] for row in rows]
    assert all(lines), said
    return [line for line, *_ in lines]


@pytest.mark.parametrize("fault", sorted(ALONE))
def test_launch_that_cannot_work_is_refused_with_its_reason_and_starts_nothing(
    words: list[str], tmp_path: Path, burst: Burst, fault: str
) -> None:
    refused(burst, words, ROWS[fault])
    assert list_runs(tmp_path / "runs") == []


@pytest.mark.parametrize("kinds", SICK, ids=" ".join)
def test_nodes_that_cannot_work_are_named_with_their_reasons(
    testbed: Testbed, words: list[str], tmp_path: Path, burst: Burst, kinds: tuple[str, str]
) -> None:
    for node, kind in zip(testbed.node_names, kinds, strict=True):
        folder = testbed.node(node).home / ".burst"
        folder.mkdir(exist_ok=True)
        set_fault(testbed, node, kind, str(folder) if kind == "disk_full" else None)
    patient = [*words, "cluster.ssh.connect_timeout_s=2"]  # a healthy node may be slow
    said = refused(burst, patient, *(ROWS[kind] for kind in kinds))
    assert all(node in line for node, line in zip(testbed.node_names, said, strict=True)), said
    assert list_runs(tmp_path / "runs") == []


def test_what_nodes_lack_and_a_port_that_somebody_uses_are_told_before_anything_starts(
    testbed: Testbed, words: list[str], tmp_path: Path, burst: Burst
) -> None:
    with port_held(testbed, testbed.node_names[0], 29555):
        refused(burst, words, *(ROWS[fault] for fault in LACKING))
    assert list_runs(tmp_path / "runs") == []


def test_runs_folder_that_cannot_be_written_is_named_before_any_node_is_asked(
    words: list[str], tmp_path: Path, burst: Burst
) -> None:
    (tmp_path / "file").write_text("")
    nowhere = ["cluster.ssh.port=1", "--runs-dir", str(tmp_path / "file" / "runs")]
    refused(burst, [*words, *nowhere], ROWS["put a file there"])


def test_second_launch_on_busy_nodes_is_refused_and_the_first_goes_on(
    testbed: Testbed, words: list[str], tmp_path: Path, burst: Burst
) -> None:
    first, stop, said = TestbedRun(testbed, tmp_path / "first", "wait"), StopRequests(), list[str]()
    first.plan = with_exclusive(first.plan, exclusive=True)

    def launch_another() -> None:
        if first.is_under_way and not said:
            said.extend(refused(burst, words, ROWS["run another"]))
            stop.count, stop.cause = 1, "Ctrl-C"

    outcome, _ = first.lead(launch_another, stop, HURRIED)
    assert first.run.run_id in said[0]
    assert outcome.status == "cancelled"
