"""A controller with a link to this machine: a stand-in for torchrun, and where it matters torchrun itself."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from testkit.fake_plan import fake_plan
from testkit.fake_run import Observer
from testkit.machine_clock import machine_time
from testkit.process_table import run_processes, supervisors
from testkit.waiting import wait_for

from cluster.control.attempt import StopRequests
from cluster.control.controller import Manner, control
from cluster.control.link import LaunchOutcome, LaunchTiming
from cluster.launch.local import LocalLink
from cluster.plan import LaunchPlan
from engine.runs.folder import RunFolder, create_run, new_run_path

TIMING = LaunchTiming(
    poll_s=0.02, stop_grace_s=0.5, failure_grace_s=0.5, evidence_s=0.2, early_exit_s=0.5, vanish_s=0.5
)
GONE_S = 5.0  # a killed process leaves the table in milliseconds; more only on a machine that is busy elsewhere


Act = Callable[[RunFolder, Observer], None]  # at every tick


def launch(
    tmp_path: Path, mode: str, act: Act = lambda *_: None, stop: StopRequests | None = None, *, real: bool = False
) -> tuple[LaunchOutcome, LaunchPlan, RunFolder]:
    """A run of two ranks of the fake trainer, led to its end."""
    path = new_run_path(tmp_path / "runs", "tiny")
    plan = fake_plan(path, real=real)
    run, observer = create_run(path, dict(plan.files)), Observer()
    observer.act = lambda: act(run, observer)
    os.environ["FAKE_MODE"] = mode
    links = [LocalLink(run.path, node.name) for node in plan.nodes]
    return control(plan, run, links, observer, stop or StopRequests(), Manner(timing=TIMING)), plan, run


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test here must end without a process of its run; also not in another session."""
    monkeypatch.setenv("FAKE_MODE", "ok")  # so that what `launch` sets is taken back
    yield
    wait_for(lambda: not leftovers(tmp_path), lambda: f"the end of {leftovers(tmp_path)}", GONE_S)


def leftovers(tmp_path: Path) -> list[psutil.Process]:
    runs = [path.name for path in tmp_path.glob("runs/*/*")]
    return [process for run in runs for process in [*supervisors(run), *run_processes(run)]]


def test_torchrun_itself_names_the_rank_that_was_killed(tmp_path: Path) -> None:
    outcome, _, run = launch(tmp_path, "kill", real=True)
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

    outcome, _, _ = launch(tmp_path, "wait", kill)
    known.append(machine_time())  # all may be over before there was time for a note
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.signal) == (1, "SIGKILL")
    assert known[0] - died[0] < 2.0


def test_what_is_run_is_what_the_plan_says(tmp_path: Path) -> None:
    """The process that was started has the argv, folder and environment of the plan, and nothing of its own."""
    seen: dict[str, object] = {}
    stop = StopRequests()

    def look(run: RunFolder, _: Observer) -> None:
        for process in run_processes(run.run_id) if not seen else []:
            with contextlib.suppress(psutil.Error):
                if not seen and "torch.distributed.run" in process.cmdline():
                    seen.update(argv=process.cmdline(), cwd=process.cwd(), environment=process.environ())
                    stop.count, stop.cause = 1, "Ctrl-C"

    _, plan, _ = launch(tmp_path, "wait", look, stop)
    (node,) = plan.nodes
    assert seen["argv"] == list(node.argv)
    assert seen["cwd"] == node.cwd
    assert seen["environment"] == {**os.environ, **{item.name: item.value for item in node.environment}}


def test_stop_requests_are_counted_and_handlers_return() -> None:
    former = signal.getsignal(signal.SIGTERM)
    stop = StopRequests()
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert (stop.count, stop.cause) == (2, "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) is former
