"""A controller with a link to this machine: what is run, ranks that die, and ranks that run out of memory, by a limit
of their own and by the kernel in a control group. Ranks are fakes, and where it matters torchrun is itself."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from testkit import PYTHON_PATH
from testkit.fake_plan import fake_plan
from testkit.fake_run import Observer
from testkit.machine_clock import machine_time
from testkit.process_table import run_processes, supervisors
from testkit.waiting import wait_for

from cluster.agent.memory import memory_groups
from cluster.agent.messages import Spec
from cluster.control.attempt import StopRequests
from cluster.control.controller import ControlOptions, control
from cluster.control.link import LaunchOutcome, LaunchTiming, NodeStatus
from cluster.env.plan import EnvironmentVariable
from cluster.launch.local import LocalLink
from engine.runs.files import json_text
from engine.runs.folder import RunFolder, create_run, new_run_path

TIMING = LaunchTiming(
    poll_s=0.02, stop_grace_s=0.5, failure_grace_s=0.5, evidence_s=0.2, early_exit_s=0.5, vanish_s=0.5
)
GONE_S = 5.0  # a killed process leaves the table in milliseconds; more only on a machine that is busy elsewhere
LIMIT_BYTES = 300 * 2**20  # two ranks and their parent without torch take about 100 MiB


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path: Path) -> Iterator[None]:
    """Every test here must end without a process of its run; also not in another session."""

    def left() -> list[psutil.Process]:
        runs = [path.name for path in tmp_path.glob("runs/*/*")]
        return [process for run in runs for process in [*supervisors(run), *run_processes(run)]]

    yield
    wait_for(lambda: not left(), lambda: f"the end of {left()}", GONE_S)


@dataclass(frozen=True)
class Killer:
    """Who kills a rank that takes too much: its mode, what starts the ranks, whose procfs says so, where it counts."""

    mode: str
    prefix: tuple[str, ...] = ()
    proc: Path | None = None
    counted_in: str = ""


class OtherMachine(LocalLink):
    """A link whose supervisor sees the procfs in folder `proc`."""

    def __init__(self, run: Path, node: str, proc: Path) -> None:
        super().__init__(run, node)
        self._proc = proc

    def start(self, spec: Spec) -> None:
        command = [sys.executable, "-m", "testkit.supervise_rig", str(self._proc), "1"]
        environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(spec._asdict()).encode())
        self.process.stdin.close()
        while self.poll().phase == "none":
            assert self.process.poll() is None, f"the supervisor ended with {self.process.returncode} and began nothing"
            time.sleep(0.02)

    def poll(self) -> NodeStatus:
        status = super().poll()
        return replace(status, has_started=status.phase != "none")


Act = Callable[[RunFolder, Observer], None]  # at every tick


def launch(
    tmp_path: Path, ranks: Killer | str, act: Act = lambda *_: None, *, real: bool = False
) -> tuple[LaunchOutcome, RunFolder]:
    """A run of two ranks of the fake trainer, led to its end."""
    killer = Killer(ranks) if isinstance(ranks, str) else ranks
    path = new_run_path(tmp_path / "runs", "tiny")
    plan = fake_plan(path, real=real)
    mode = EnvironmentVariable("FAKE_MODE", killer.mode, "for the test")
    node = replace(plan.nodes[0], argv=(*killer.prefix, *plan.nodes[0].argv))
    plan = replace(plan, nodes=(replace(node, environment=(*node.environment, mode)),))
    predicted = json_text({"device_peak_bytes": 12345, "host_peak_bytes": 0})
    run, observer = create_run(path, {**dict(plan.files), "memory_plan.json": predicted}), Observer()
    observer.act = lambda: act(run, observer)
    link = LocalLink(path, node.name) if killer.proc is None else OtherMachine(path, node.name, killer.proc)
    outcome = control(plan, run, [link], observer, StopRequests(), ControlOptions(timing=TIMING))
    if isinstance(link, OtherMachine):
        link.process.wait(200)
    return outcome, run


def test_torchrun_itself_names_the_rank_that_was_killed(tmp_path: Path) -> None:
    outcome, run = launch(tmp_path, "kill", real=True)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.signal, outcome.failure.step) == (1, "SIGKILL", 3)
    assert (run.read_state()["state"], run.read_state()["failure"]["rank"]) == ("failed", 1)


def test_death_of_a_rank_is_known_within_two_seconds_although_its_peers_wait_for_ever(tmp_path: Path) -> None:
    died: list[float] = []
    known: list[float] = []

    def kill(run: RunFolder, observer: Observer) -> None:
        if len(run.read_metrics()) == 5 and not died:
            for rank in (p for p in run_processes(run.run_id) if p.environ().get("RANK") == "1"):
                rank.kill()  # as soon as there is one: rank 0 may have made its steps before
                died.append(machine_time())
        known.extend([machine_time()] * bool(observer.notes))

    outcome, _ = launch(tmp_path, "wait", kill)
    known.append(machine_time())  # all may be over before there was time for a note
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.signal) == (1, "SIGKILL")
    assert known[0] - died[0] < 2.0


def test_stop_requests_are_counted_and_handlers_return() -> None:
    former = signal.getsignal(signal.SIGTERM)
    stop = StopRequests()
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert (stop.count, stop.cause) == (2, "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) is former


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

    def is_removed() -> bool:
        """It is busy until the kernel has buried its last process."""
        with contextlib.suppress(OSError):
            folder.rmdir()
        return not folder.exists()

    wait_for(is_removed, f"the end of {folder}")


@pytest.mark.parametrize("killer", ["kernel", "stand_in"])
def test_kill_for_memory_gives_oom_with_rank_and_peak(
    tmp_path: Path, killer: str, request: pytest.FixtureRequest
) -> None:
    by: Killer = request.getfixturevalue(killer)
    outcome, run = launch(tmp_path, by)
    failure = outcome.failure
    assert failure is not None
    assert (outcome.status, outcome.exit_code, run.read_state()["state"]) == ("oom", 1, "oom"), failure
    assert (failure.rank, failure.step, failure.signal) == (1, 3, "SIGKILL")
    assert by.counted_in in failure.message
    assert failure.memory is not None
    assert failure.memory["capacity_bytes"] == LIMIT_BYTES
    assert 0.2 * LIMIT_BYTES < failure.memory["peak_bytes"] <= LIMIT_BYTES


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
