"""Ranks that really run out of memory: by a limit of their own, and by the kernel in a control group."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from testkit import ROOT
from testkit.fake_plan import fake_plan
from testkit.process_table import run_processes

from cluster.agent.messages import Spec
from cluster.control.attempt import StopRequests
from cluster.control.controller import Manner, control
from cluster.control.link import LaunchObserver, LaunchOutcome, LaunchTiming, NodeStatus
from cluster.launch.local import LocalLink
from engine.runs.folder import RunFolder, create_run, new_run_path
from engine.runs.host_memory import memory_groups
from engine.runs.records import json_text

TIMING = LaunchTiming(poll_s=0.02, stop_grace_s=0.5, failure_grace_s=0.5, evidence_s=0.2)
LIMIT_BYTES = 300 * 2**20  # two ranks and their parent without torch take about 100 MiB


class OtherMachine(LocalLink):
    """A link whose supervisor sees the procfs in folder `proc`."""

    def __init__(self, run: Path, node: str, proc: Path) -> None:
        super().__init__(run, node)
        self._proc = proc

    def start(self, spec: Spec) -> None:
        command = [sys.executable, str(Path(__file__).with_name("memory_supervisor.py")), str(self._proc)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
        assert process.stdin is not None
        process.stdin.write(json.dumps(spec._asdict()).encode())
        process.stdin.close()
        while self.poll().phase == "none":
            assert process.poll() is None, f"the supervisor ended with exit code {process.returncode} and began nothing"
            time.sleep(0.02)
        self.process = process

    def poll(self) -> NodeStatus:
        status = super().poll()
        return dataclasses.replace(status, is_begun=status.phase != "none")


@dataclass(frozen=True)
class Killer:
    """Who kills a rank that takes too much: its mode, what starts the ranks, whose procfs says so, where it counts."""

    mode: str
    prefix: tuple[str, ...]
    proc: Path | None
    counted_in: str


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Killer:
    """No kernel: the rank kills itself and counts that, in the procfs of a machine of LIMIT_BYTES without groups."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {LIMIT_BYTES // 1024} kB\n", encoding="ascii")
    (proc / "vmstat").write_text("pgfault 5\noom_kill 0\n", encoding="ascii")
    monkeypatch.setenv("FAKE_VMSTAT", str(proc / "vmstat"))
    return Killer("counted", (), proc, f"oom_kill of the whole machine in {proc / 'vmstat'}")


@pytest.fixture
def kernel(stand_in: Killer) -> Iterator[Killer]:
    """The kernel, by a new memory control group with a limit of LIMIT_BYTES.

    A container may not let anybody make one. Nothing is skipped there: all but the kernel's part runs with the
    stand-in, which has a test of its own on every machine.
    """
    # The root of the hierarchy: under v2 no group that holds processes may hand out the controller.
    folder = Path((memory_groups() or ("/nowhere",))[-1]) / f"burst-test-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        name = "memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes"
        (folder / name).write_text(str(LIMIT_BYTES))
    except OSError:
        yield stand_in
    else:
        enter = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
        yield Killer("hoard", ("sh", "-c", enter, "sh"), None, f"oom_kill in {folder}")
    remove(folder)


def remove(group: Path) -> None:
    """Remove a control group: it is busy until the kernel has buried its last process."""
    deadline = time.monotonic() + 200
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def launch(
    tmp_path: Path, mode: str, prefix: tuple[str, ...] = (), proc: Path | None = None
) -> tuple[LaunchOutcome, RunFolder]:
    """Two fake ranks in `mode`; `prefix` goes before the command that starts them, `proc` is the procfs seen."""
    path = new_run_path(tmp_path / "runs", "tiny")
    plan = fake_plan(path)
    node = dataclasses.replace(plan.nodes[0], argv=(*prefix, *plan.nodes[0].argv))
    plan = dataclasses.replace(plan, nodes=(node,))
    predicted = json_text({"device_peak_bytes": 12345, "host_peak_bytes": 0})
    run = create_run(path, {**dict(plan.files), "memory_plan.json": predicted})
    os.environ["FAKE_MODE"] = mode
    name = plan.nodes[0].name
    link = LocalLink(path, name) if proc is None else OtherMachine(path, name, proc)
    outcome = control(plan, run, [link], LaunchObserver(), StopRequests(), Manner(timing=TIMING))
    if isinstance(link, OtherMachine):
        link.process.wait(200)
    return outcome, run


@pytest.fixture(autouse=True)
def restored_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "ok")  # so that what `launch` sets is taken back


def check_kill(tmp_path: Path, killer: Killer) -> None:
    outcome, run = launch(tmp_path, killer.mode, killer.prefix, killer.proc)
    failure = outcome.failure
    assert failure is not None
    assert (outcome.status, outcome.exit_code, run.read_state()["state"]) == ("oom", 1, "oom"), failure
    assert (failure.rank, failure.step, failure.signal) == (1, 3, "SIGKILL")
    assert killer.counted_in in failure.message
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
