"""Rows of the table of faults with real sshd, torchrun, torch and gloo, by the command line."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from testkit.fault_rig import FOREVER, FaultRig, Launched, send, take_ssh_away, unanswered
from testkit.fault_table import HANG_S, INJURIES, RUNNING, Row
from testkit.machine_clock import machine_time
from testkit.process_table import run_processes
from testkit.testbed_fixture import Testbeds
from testkit.waiting import wait_for

from cluster.testbed.faults import clear_faults
from engine.runs.folder import FINAL_STATES, RunFolder

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

HANG = "cluster.hang_timeout_s=8"
(STRAGGLER,) = (row for row in INJURIES if row.do == "slow")
(PARTITION,) = (row for row in RUNNING if row.do == "partition")
(RESUMED,) = (row for row in RUNNING if row.do == "resume")
(LEFT_ALONE,) = (row for row in RUNNING if row.do == "take SSH away")
(HANGING,) = (row for row in RUNNING if row.do == "hang_sleep")
NAMED_S = 45.0
AWAY_S = 60.0  # as long as the lease of a run that is not detached
INJURED = [row for row in INJURIES if row.is_real and row != STRAGGLER]


@pytest.fixture(scope="module")
def rig(module_testbeds: Testbeds, tmp_path_factory: pytest.TempPathFactory) -> FaultRig:
    rig = FaultRig(module_testbeds.make(nodes=2), module_testbeds.config_dir, tmp_path_factory.mktemp("faults"))
    done = rig.burst("launch", *rig.words("train.steps=2"))
    assert done.returncode == 0, done.stderr  # and from here on code and tokens lie on the nodes
    return rig


@pytest.mark.parametrize("row", INJURED, ids=lambda row: row.do)
def test_injured_rank_is_blamed_and_everything_stops(rig: FaultRig, row: Row) -> None:
    rank = 0 if row.do == "disk" else 1  # rank 0 records
    launched = rig.launch(*rig.words(FOREVER, HANG, f'cluster.environment=["BURST_FAULT={row.do};{rank};4"]'))
    run = launched.wait_for_step(2)  # the last that rank 0 is sure to record before rank 1 comes to the fourth
    begin = machine_time()
    code = launched.end()
    assert machine_time() - begin <= (row.limit_s or 0.0)
    rig.conclude(row, run, code)
    if row.limit_s == HANG_S:
        stacks = list(run.path.glob("logs/*/rank*.stacks"))
        assert any("File " in path.read_text(errors="replace") for path in stacks), stacks


def test_hang_is_named_soon_and_ended_at_its_limit(rig: FaultRig) -> None:
    limit_s = NAMED_S + 10.0
    hang = 'cluster.environment=["BURST_FAULT=hang_sleep;1;4"]'
    launched = rig.launch(*rig.words(FOREVER, f"cluster.hang_timeout_s={limit_s}", hang))
    run = launched.wait_for_step(3)
    begin, since = machine_time(), time.monotonic()
    wait_for(lambda: "no rank has advanced for" in launched.said(), launched.said)
    assert machine_time() - begin <= NAMED_S
    assert "rank 1" in launched.said()
    code = launched.end()
    assert time.monotonic() - since >= limit_s
    rig.conclude(HANGING, run, code)


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
    begin = machine_time()
    with unanswered(rig.testbed, second, [first]):
        code = launched.end()
    assert machine_time() - begin <= HANG_S
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


def test_detached_run_trains_on_while_nobody_reaches_its_nodes(rig: FaultRig) -> None:
    steps = 100
    slow = 'cluster.environment=["BURST_FAULT=slow:1;1;1"]'  # for so long that SSH is back before the end
    launched = rig.launch(*rig.words(f"train.steps={steps}", slow), "--detach")
    assert launched.end() == 0, launched.said()
    run, names = launched.run(), rig.testbed.node_names
    wait_for(lambda: len(run.read_metrics()) >= 3)
    for node in names:
        take_ssh_away(rig.testbed, node)
    seen, back_at = len(run.read_metrics()), time.monotonic() + AWAY_S
    wait_for(lambda: time.monotonic() > back_at)
    assert shown(rig, run)["status"] == "running"
    made = len(RunFolder(rig.node_folder(run, names[0])).read_metrics())
    assert made > seen + AWAY_S / 10
    for node in names:
        clear_faults(rig.testbed, node)
    wait_for(lambda: shown(rig, run)["step"] >= made, launched.said)
    wait_for(lambda: run.read_state()["state"] in FINAL_STATES)
    rig.wait_until_gone(run.run_id)
    rig.conclude(LEFT_ALONE, run, run.read_state()["exit_code"])
    assert [row["step"] for row in run.read_metrics()] == list(range(1, steps + 1))


def shown(rig: FaultRig, run: RunFolder) -> dict[str, Any]:
    """What `burst status` says, which fails for a run that failed."""
    status: dict[str, Any] = json.loads(rig.burst("status", run.run_id, "--json").stdout)
    return status


# --- a launcher that is killed at some moment: what it started is found again, once, with every line ------------------


@pytest.mark.parametrize(
    ("seen", "states"), [(None, set()), (Launched.run, {"planned", "starting"}), (Launched.wait_for_step, {"running"})]
)
def test_run_of_a_launcher_killed_at_any_moment_is_found_cancelled_and_complete(
    rig: FaultRig, seen: Callable[[Launched], RunFolder] | None, states: set[str]
) -> None:
    launched = rig.launch(*rig.words("train.steps=100000", "cluster.lease_s=300"), "--skip-checks")
    if seen is not None:
        seen(launched)  # however slow this machine is
    time.sleep(random.uniform(0.0, 1.0) if seen is not None else random.uniform(0.5, 10.0))
    send(launched.process.pid, signal.SIGKILL)
    launched.process.wait()
    paths = rig.run_paths() - launched.known
    assert paths or not states
    for run in map(RunFolder, paths):
        assert not states or run.read_state()["state"] in states
        assert rig.burst("status", run.run_id, "--json").returncode in (0, 1, 3, 130)
        assert torchruns(run) <= len(rig.testbed.node_names)
        assert rig.burst("logs", run.run_id, "--tail", "5").returncode in (0, 1, 130)
        cancelled = rig.burst("cancel", run.run_id)
        assert cancelled.returncode == 0, cancelled.stderr + cancelled.stdout
        assert run.read_state()["state"] in FINAL_STATES
        steps = [row["step"] for row in run.read_metrics()]
        assert steps == list(range(1, len(steps) + 1))
        rig.wait_until_gone(run.run_id, 5.0)  # the supervisor itself leaves just after it has said how all ended
        for there in (rig.node_folder(run, node) for node in rig.testbed.node_names):
            files = [*there.glob("logs/*/rank*.log"), *there.glob("metrics.jsonl")]
            assert all((run.path / one.relative_to(there)).read_bytes() == one.read_bytes() for one in files)


def torchruns(run: RunFolder) -> int:
    """How many there are; a fork of one that is about to become a rank does not count."""
    found: set[int] = set()
    parents: list[int] = []
    for process in run_processes(run.run_id):
        with contextlib.suppress(psutil.Error):
            if "torch.distributed.run" in process.cmdline() and "RANK" not in process.environ():
                found.add(process.pid)
                parents.append(process.ppid())
    return len([parent for parent in parents if parent not in found])
