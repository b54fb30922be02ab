"""The launcher is killed with SIGKILL at some moment: what it started is found again, once, with every line."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from testkit.fault_rig import FaultRig, Launched, send
from testkit.process_table import run_processes
from testkit.testbed_fixture import Testbeds

from engine.runs.folder import FINAL_STATES, RunFolder

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def rig(module_testbeds: Testbeds, tmp_path_factory: pytest.TempPathFactory) -> FaultRig:
    return FaultRig(module_testbeds.make(nodes=1), module_testbeds.config_dir, tmp_path_factory.mktemp("killed"))


def at_any_time(_: Launched) -> None:
    time.sleep(random.uniform(0.5, 10.0))


def while_it_starts(launched: Launched) -> None:
    launched.run()  # however slow this machine is
    time.sleep(random.uniform(0.0, 1.0))


def while_it_trains(launched: Launched) -> None:
    launched.wait_for_step(1)
    time.sleep(random.uniform(0.0, 2.0))


@pytest.mark.parametrize(
    ("wait", "states"),
    [(at_any_time, set()), (while_it_starts, {"planned", "starting"}), (while_it_trains, {"running"})],
)
def test_run_of_a_launcher_killed_at_any_moment_is_found_cancelled_and_complete(
    rig: FaultRig, wait: Callable[[Launched], None], states: set[str]
) -> None:
    launched = rig.launch(*rig.words("train.steps=100000", "cluster.lease_s=300"), "--skip-checks")
    wait(launched)
    send(launched.process.pid, signal.SIGKILL)
    launched.process.wait()
    paths = rig.run_paths() - launched.known
    assert paths or not states
    for run in map(RunFolder, paths):
        assert not states or run.read_state()["state"] in states
        assert rig.burst("status", run.run_id, "--json").returncode in (0, 1, 3, 130)
        assert torchruns(run) <= 1
        assert rig.burst("logs", run.run_id, "--tail", "5").returncode in (0, 1, 130)
        cancelled = rig.burst("cancel", run.run_id)
        assert cancelled.returncode == 0, cancelled.stderr + cancelled.stdout
        assert run.read_state()["state"] in FINAL_STATES
        rig.wait_until_gone(run.run_id, 5.0)  # the supervisor itself leaves just after it has said how all ended
        logs_are_whole(run, rig.node_folder(run, *rig.testbed.node_names))


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


def logs_are_whole(run: RunFolder, there: Path) -> None:
    """Every file of the node has come over to the last byte, and metrics have every step exactly once."""
    files = [*there.glob("logs/*/rank*.log"), *there.glob("metrics.jsonl")]
    assert [path for path in files if (run.path / path.relative_to(there)).read_bytes() != path.read_bytes()] == []
    steps = [row["step"] for row in run.read_metrics()]
    assert steps == list(range(1, len(steps) + 1))
