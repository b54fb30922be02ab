"""The launcher is killed with SIGKILL at random moments: what it started is found again, once, with every line."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from testkit.fault_rig import FaultRig, send
from testkit.testbed_fixture import Testbeds
from testkit.waiting import wait_for

from engine.runs.folder import FINAL_STATES, RunFolder

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(2400)]

LANES = 2
TIMES = 4


@pytest.fixture(scope="module")
def rigs(module_testbeds: Testbeds, tmp_path_factory: pytest.TempPathFactory) -> list[FaultRig]:
    """One-node views of a testbed, so that several launches can be killed at the same time."""
    testbed, config_dir = module_testbeds.make(nodes=LANES), module_testbeds.config_dir
    return [FaultRig(testbed, config_dir, tmp_path_factory.mktemp("lane")) for _ in range(LANES)]


def test_run_of_a_launcher_killed_at_any_moment_is_found_cancelled_and_complete(rigs: list[FaultRig]) -> None:
    with ThreadPoolExecutor(LANES) as pool:
        trials = [pool.submit(_trials, rig, lane) for lane, rig in enumerate(rigs)]
        moments = [moment for trial in trials for moment in trial.result()]
    assert len(moments) == TIMES
    # Not all before the run folder was there, and not all after the ranks worked.
    assert {"starting", "running"} <= set(moments), moments


def _trials(rig: FaultRig, lane: int) -> list[str]:
    rng = random.Random(lane)
    share = TIMES // LANES + (lane < TIMES % LANES)
    return [_trial(rig, lane, rng, while_training=number % 2 == 1) for number in range(share)]


def _trial(rig: FaultRig, lane: int, rng: random.Random, *, while_training: bool) -> str:
    """What the kill met: nothing, or the state of the run at that moment."""
    node = rig.testbed.node_names[lane]
    words = rig.words(f"cluster.nodes={node}", "train.steps=100000", "cluster.lease_s=300")
    launched = rig.launch(*words, "--skip-checks")
    if while_training:
        launched.wait_for_step(1)
        time.sleep(rng.uniform(0.0, 2.0))
    elif lane:
        wait_for(lambda: rig.run_paths() - launched.known, "the run folder")  # however slow this machine is
        time.sleep(rng.uniform(0.0, 1.0))
    else:
        time.sleep(rng.uniform(0.5, 10.0))
    send(launched.process.pid, signal.SIGKILL)
    launched.process.wait()
    paths = sorted(rig.run_paths() - launched.known)
    if not paths:
        return "nothing"
    run = RunFolder(paths[0])
    met = str(run.read_state()["state"])
    status = rig.burst("status", run.run_id, "--json")
    assert status.returncode in (0, 1, 3, 130), status.stderr
    supervisors = {values["BURST_NODE"] for values in rig.processes(run.run_id).values() if "BURST_NODE" in values}
    assert supervisors <= {node}
    assert _torchruns(rig, run, node) <= 1
    logs = rig.burst("logs", run.run_id, "--tail", "5")
    assert logs.returncode in (0, 1, 130), logs.stderr
    cancelled = rig.burst("cancel", run.run_id)
    assert cancelled.returncode == 0, cancelled.stderr + cancelled.stdout
    assert run.read_state()["state"] in FINAL_STATES
    rig.wait_until_gone(run.run_id, 5.0)  # the supervisor itself leaves just after it has said how all ended
    _logs_are_whole(rig, run, node)
    return met


def _torchruns(rig: FaultRig, run: RunFolder, node: str) -> int:
    """How many there are; a fork of one that is about to become a rank does not count."""
    pids = rig.pids_of(run, node, "torch.distributed.run")
    return len([pid for pid in pids if _parent(pid) not in pids])


def _parent(pid: int) -> int | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).ppid()
    return None


def _logs_are_whole(rig: FaultRig, run: RunFolder, node: str) -> None:
    """Every file of the node has come over to the last byte, and metrics have every step exactly once."""
    there = rig.node_folder(run, node)
    for path in (there / "logs").glob("*/rank*.log"):
        assert (run.path / path.relative_to(there)).read_bytes() == path.read_bytes()
    if (there / "metrics.jsonl").exists():
        assert (run.path / "metrics.jsonl").read_bytes() == (there / "metrics.jsonl").read_bytes()
    steps = [row["step"] for row in run.read_metrics()]
    assert steps == list(range(1, len(steps) + 1))
