"""Ranks that really run out of memory: by a limit of their own, and by the kernel in a control group."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.control_group import memory_groups
from cluster.facts import NodeFacts
from cluster.launch import LaunchOutcome, LaunchTiming, StopRequests, launch_local
from cluster.memory_watch import MemoryWatch
from cluster.plan import build_launch_plan
from cluster.processes import run_processes
from engine.config import RunConfig
from engine.config_cluster import ClusterConfig
from engine.run.records import json_text
from engine.runs import RunFolder, create_run, new_run_path

HERE = Path(__file__).parent
TIMING = LaunchTiming(poll_s=0.02, stop_grace_s=0.5, failure_grace_s=0.5, report_grace_s=5.0)
LIMIT_BYTES = 300 * 2**20  # two ranks and their parent without torch take about 100 MiB


class Quiet:
    """An observer that shows nothing."""

    def tick(self) -> None:
        pass

    def stopping(self, cause: str, grace_s: float) -> None:
        pass


@dataclass(frozen=True)
class Killer:
    """Who kills a rank that takes too much: its mode, what starts the ranks, who watches, and where it is counted."""

    mode: str
    prefix: tuple[str, ...]
    watch: MemoryWatch | None
    counted_in: str


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Killer:
    """No kernel: the rank kills itself and counts that, in the procfs of a machine of LIMIT_BYTES without groups."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {LIMIT_BYTES // 1024} kB\n", encoding="ascii")
    (proc / "vmstat").write_text("pgfault 5\noom_kill 0\n", encoding="ascii")
    monkeypatch.setenv("FAKE_VMSTAT", str(proc / "vmstat"))
    return Killer("counted", (), MemoryWatch(proc=proc), f"oom_kill of the whole machine in {proc / 'vmstat'}")


@pytest.fixture
def kernel(stand_in: Killer) -> Iterator[Killer]:
    """The kernel, by a new memory control group with a limit of LIMIT_BYTES.

    A container may not let anybody make one. Nothing is skipped there: all but the kernel's part runs with the
    stand-in, which has a test of its own on every machine.
    """
    # The root of the hierarchy: under v2 no group that holds processes may hand out the controller.
    folder = (memory_groups() or (Path("/nowhere"),))[-1] / f"burst-test-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        name = "memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes"
        (folder / name).write_text(str(LIMIT_BYTES))
    except OSError:
        yield stand_in
    else:
        enter = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
        yield Killer("hoard", ("sh", "-c", enter, "sh"), None, f"oom_kill in {folder}")
    if folder.exists():
        folder.rmdir()


def launch(
    tmp_path: Path, mode: str, prefix: tuple[str, ...] = (), watch: MemoryWatch | None = None
) -> tuple[LaunchOutcome, RunFolder]:
    """Two fake ranks in `mode`; `prefix` goes before the command that starts them, `watch` is told of their memory."""
    path = new_run_path(tmp_path / "runs", "tiny")
    python_path = f"{HERE.parent.parent}{os.pathsep}{HERE}"
    facts = NodeFacts(socket.gethostname(), 2, 0, sys.executable, str(tmp_path), python_path)
    plan = build_launch_plan(RunConfig(cluster=ClusterConfig(ranks_per_node=2)), facts, path, module="fake_trainer")
    argv = (*prefix, sys.executable, str(HERE / "fake_torchrun.py"), "2", "fake_trainer", str(path / "config.yaml"))
    plan = dataclasses.replace(plan, nodes=(dataclasses.replace(plan.nodes[0], argv=argv),))
    predicted = json_text({"device_peak_bytes": 12345, "host_peak_bytes": 0})
    run = create_run(path, {**dict(plan.files), "memory_plan.json": predicted})
    os.environ["FAKE_MODE"] = mode
    return launch_local(plan, run, Quiet(), StopRequests(), TIMING, watch), run


@pytest.fixture(autouse=True)
def restored_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "ok")  # so that what `launch` sets is taken back


def check_kill(tmp_path: Path, killer: Killer) -> None:
    outcome, run = launch(tmp_path, killer.mode, killer.prefix, killer.watch)
    failure = outcome.failure
    assert failure is not None
    assert (outcome.status, outcome.exit_code, run.read_state()["state"]) == ("oom", 1, "oom"), failure
    assert (failure.rank, failure.step, failure.signal) == (1, 3, "SIGKILL")
    assert killer.counted_in in failure.message or "the kernel's log" in failure.message
    assert failure.memory is not None
    assert failure.memory["capacity_bytes"] == LIMIT_BYTES
    assert 0.2 * LIMIT_BYTES < failure.memory["peak_bytes"] <= LIMIT_BYTES
    assert run_processes(run.run_id) == []


def test_kernel_that_kills_a_rank_for_memory_gives_oom_with_rank_and_peak(tmp_path: Path, kernel: Killer) -> None:
    check_kill(tmp_path, kernel)


def test_kill_that_only_the_whole_machine_counts_gives_it_too(tmp_path: Path, stand_in: Killer) -> None:
    check_kill(tmp_path, stand_in)


def test_allocation_that_fails_gives_oom_with_rank_phase_and_advice(tmp_path: Path) -> None:
    outcome, run = launch(tmp_path, "limited")
    failure = outcome.failure
    assert failure is not None
    assert (outcome.status, outcome.exit_code, run.read_state()["state"]) == ("oom", 1, "oom")
    assert (failure.rank, failure.step, failure.phase, failure.type) == (1, 3, "forward", "MemoryError")
    recorded = run.read_state()["failure"]
    assert recorded["memory"]["peak_bytes"] > 2**20
    assert recorded["memory"]["predicted_peak_bytes"] == 12345
    assert recorded["advice"] == failure.advice
    assert "memory.tile_tokens=" in recorded["advice"]
    assert run_processes(run.run_id) == []


def test_rank_that_somebody_else_killed_is_not_out_of_memory(tmp_path: Path) -> None:
    outcome, _ = launch(tmp_path, "killed")
    assert outcome.failure is not None
    assert (outcome.status, outcome.failure.kind, outcome.failure.memory) == ("failed", "signal", None)
