"""A run that loses a rank, then a node, and soon trains again: how many seconds that takes, and what takes them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from testkit.fault_rig import FaultRig, Launched, send
from testkit.machine_clock import machine_time
from testkit.testbed_fixture import Testbeds
from testkit.waiting import wait_for

from engine.runs.folder import RunFolder

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

LIMIT_S = 60.0  # from the loss to the next optimizer step
EVERY, FAR = 4, 100_000
END_S = 600.0


@pytest.fixture
def rig(testbeds: Testbeds, tmp_path: Path) -> FaultRig:
    return FaultRig(testbeds.make(nodes=3), testbeds.config_dir, tmp_path)


def test_run_recovers_within_a_minute_of_each_loss(rig: FaultRig, tmp_path: Path) -> None:
    first, second, third = rig.testbed.node_names
    saves = (f"train.checkpoint.every_steps={EVERY}", f"train.checkpoint.folder={tmp_path / 'saved'}")
    slow = 'cluster.environment=["BURST_FAULT=slow:0.2;1;1"]'  # or saves would be all it does
    words = rig.words(f"train.steps={FAR}", slow, *saves, "cluster.max_restarts=1", f"cluster.spare_nodes={third}")
    launched = rig.launch(*words, "--hosts", f"{first},{second}")
    run = launched.wait_for_step(2 * EVERY + 1, END_S)

    begin, at = machine_time(), datetime.now(UTC)
    (rank,) = (pid for pid, values in rig.processes(run.run_id).items() if values.get("RANK") == "1")
    send(rank, signal.SIGKILL)
    await_step_of(launched, run, attempt=2)
    rank_s = machine_time() - begin
    print(told := f"rank killed, {rank_s:.1f} s: {seconds_per_phase(run, at)}")
    assert restored_step(run) >= 2 * EVERY

    launched.wait_for_step(restored_step(run) + 2 * EVERY, END_S)
    begin, at = machine_time(), datetime.now(UTC)
    rig.lose(run, second)
    await_step_of(launched, run, attempt=3)
    node_s = machine_time() - begin
    print(told := f"{told}; node lost, {node_s:.1f} s: {seconds_per_phase(run, at)}")
    assert run.read_state()["nodes"] == [first, third]
    assert rig.burst("cancel", run.run_id).returncode == 0
    launched.process.wait(END_S)
    assert max(rank_s, node_s) <= LIMIT_S, told


def await_step_of(launched: Launched, run: RunFolder, attempt: int) -> None:
    """Return once that attempt has made a step."""

    def is_made() -> bool:
        assert launched.process.poll() is None, launched.said()
        return run.read_state()["attempt"] == attempt and bool(run.read_metrics())

    wait_for(is_made, launched.said, END_S)


def restored_step(run: RunFolder) -> int:
    """Of the checkpoint from which the present attempt goes on."""
    (restored,) = [event for event in run.read_events() if event["kind"] == "restored"]
    return int(restored["step"])


def seconds_per_phase(run: RunFolder, since: datetime) -> str:
    """How long everything took that the run went through: its states, then the phases of its ranks."""
    moments = sorted((at, name) for at, name in _moments(run) if at >= since)
    begins = [(since, "until known"), *moments]
    ends = [*(at for at, _ in moments), datetime.now(UTC)]
    spent = ((name, (end - at).total_seconds()) for (at, name), end in zip(begins, ends, strict=True))
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent)


def _moments(run: RunFolder) -> Iterator[tuple[datetime, str]]:
    for move in run.read_state()["history"]:
        yield datetime.fromisoformat(move["at"]), move["state"]
    for event in run.read_events():
        if event["kind"] == "phase":
            yield datetime.fromisoformat(event["at"]), event["phase"]
