"""Rows of the table of faults with real sshd, torchrun, torch and gloo, by the command line."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from testkit.fault_rig import FOREVER, FaultRig, send, unanswered
from testkit.fault_table import HANG_S, INJURIES, RUNNING, Row
from testkit.testbed_fixture import Testbeds

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

HANG = "cluster.hang_timeout_s=8"
(STRAGGLER,) = (row for row in INJURIES if row.do == "slow")
(PARTITION,) = (row for row in RUNNING if row.do == "partition")
(RESUMED,) = (row for row in RUNNING if row.do == "resume")
INJURED = [row for row in INJURIES if row.is_real and row != STRAGGLER]


@pytest.fixture(scope="module")
def rig(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultRig]:
    folder = tmp_path_factory.mktemp("faults")
    testbeds = Testbeds(folder / "config")
    try:
        rig = FaultRig(testbeds.make(nodes=2), folder / "config", folder)
        done = rig.burst("launch", *rig.words("train.steps=2"))
        assert done.returncode == 0, done.stderr  # and from here on code and tokens lie on the nodes
        yield rig
    finally:
        testbeds.close()


@pytest.mark.parametrize("row", INJURED, ids=lambda row: row.do)
def test_injured_rank_is_blamed_and_everything_stops(rig: FaultRig, row: Row) -> None:
    rank = 0 if row.do == "disk" else 1  # rank 0 records
    launched = rig.launch(*rig.words(FOREVER, HANG, f'cluster.environment=["BURST_FAULT={row.do};{rank};4"]'))
    run = launched.wait_for_step(2)  # the last that rank 0 is sure to record before rank 1 comes to the fourth
    begin = time.monotonic()
    code = launched.end()
    assert time.monotonic() - begin <= (row.limit_s or 0.0)
    rig.conclude(row, run, code)
    if row.limit_s == HANG_S:
        stacks = list(run.path.glob("logs/*/rank*.stacks"))
        assert any("File " in path.read_text(errors="replace") for path in stacks), stacks


def test_straggler_slows_the_run_and_is_named(rig: FaultRig) -> None:
    launched = rig.launch(*rig.words("train.steps=12", 'cluster.environment=["BURST_FAULT=slow:0.3;1;3"]'))
    run = launched.run()
    rig.conclude(STRAGGLER, run, launched.end())
    late = [row.get("straggler_rank") for row in run.read_metrics()[5:]]
    assert late.count(1) > len(late) / 2, late


def test_nodes_that_cannot_reach_each_other_end_with_a_reason(rig: FaultRig) -> None:
    first, second = rig.testbed.node_names
    launched = rig.launch(*rig.words(FOREVER, HANG))
    run = launched.wait_for_step()
    begin = time.monotonic()
    with unanswered(rig.testbed, second, [first]):
        code = launched.end()
    assert time.monotonic() - begin <= HANG_S
    rig.conclude(PARTITION, run, code)


def test_run_of_a_killed_launcher_is_taken_up_again_and_ends_well(rig: FaultRig) -> None:
    launched = rig.launch(*rig.words("train.steps=600", "cluster.lease_s=60"))
    run = launched.wait_for_step()
    send(launched.process.pid, signal.SIGKILL)
    launched.process.wait()
    assert rig.burst("status", run.run_id).returncode == 0
    done = rig.burst("resume", run.run_id)
    rig.conclude(RESUMED, run, done.returncode)
    assert [row["step"] for row in run.read_metrics()] == list(range(1, 601))
