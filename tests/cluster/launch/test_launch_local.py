"""A controller with a link to this machine: a stand-in for torchrun, and where it matters torchrun itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from testkit.fake_plan import fake_plan
from testkit.process_table import run_processes, supervisors
from testkit.waiting import wait_for

from cluster.control.controller import Manner, control
from cluster.control.link import NodeStatus
from cluster.control.outcome import LaunchObserver, LaunchOutcome, LaunchTiming, StopRequests
from cluster.launch.local import LocalLink
from cluster.plan import LaunchPlan
from engine.runs.folder import RunFolder, create_run, new_run_path

TIMING = LaunchTiming(
    poll_s=0.02, stop_grace_s=0.5, failure_grace_s=0.5, evidence_s=0.2, early_exit_s=0.5, vanish_s=0.5
)
GONE_S = 5.0  # a killed process leaves the table in milliseconds; more only on a machine that is busy elsewhere


class Observer:
    """Remembers what it was told; `act` is called at every tick with the run."""

    def __init__(self, run: RunFolder, act: Callable[[Observer], None] = lambda _: None) -> None:
        self.run, self.act = run, act
        self.stops: list[str] = []
        self.notes: list[str] = []
        self.noted_at: list[float] = []
        self.statuses: Sequence[NodeStatus] = ()

    def tick(self) -> None:
        self.act(self)

    def nodes(self, statuses: Sequence[NodeStatus]) -> None:
        self.statuses = statuses

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.noted_at.append(time.monotonic())

    def stopping(self, cause: str, grace_s: float) -> None:
        self.stops.append(cause)


def make_plan(tmp_path: Path, *, real: bool = False) -> tuple[LaunchPlan, RunFolder]:
    """A plan for two ranks of the fake trainer, and its run folder."""
    path = new_run_path(tmp_path / "runs", "tiny")
    plan = fake_plan(path, real=real)
    return plan, create_run(path, dict(plan.files))


def launch(
    tmp_path: Path,
    mode: str,
    act: Callable[[Observer], None] = lambda _: None,
    stop: StopRequests | None = None,
    *,
    real: bool = False,
) -> tuple[LaunchOutcome, RunFolder, Observer]:
    plan, run = make_plan(tmp_path, real=real)
    observer = Observer(run, act)
    os.environ["FAKE_MODE"] = mode
    return lead(plan, run, observer, stop or StopRequests()), run, observer


def lead(plan: LaunchPlan, run: RunFolder, observer: LaunchObserver, stop: StopRequests) -> LaunchOutcome:
    links = [LocalLink(run.path, node.name) for node in plan.nodes]
    return control(plan, run, links, observer, stop, Manner(timing=TIMING))


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test here must end without a process of its run; also not in another session."""
    monkeypatch.setenv("FAKE_MODE", "ok")  # so that what `launch` sets is taken back
    yield
    wait_for(lambda: not leftovers(tmp_path), lambda: f"the end of {leftovers(tmp_path)}", GONE_S)


def leftovers(tmp_path: Path) -> list[psutil.Process]:
    runs = [path.name for path in tmp_path.glob("runs/*/*")]
    return [process for run in runs for process in [*supervisors(run), *run_processes(run)]]


def steps_done(observer: Observer) -> int:
    return len(observer.run.read_metrics())


# --- against torchrun -------------------------------------------------------------------------------------------------


def test_torchrun_names_the_rank_that_was_killed(tmp_path: Path) -> None:
    outcome, run, _ = launch(tmp_path, "kill", real=True)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.signal, outcome.failure.step) == (1, "SIGKILL", 3)
    assert (run.read_state()["state"], run.read_state()["failure"]["rank"]) == ("failed", 1)


def test_killed_torchrun_takes_its_ranks_along(tmp_path: Path) -> None:
    def kill_torchrun(observer: Observer) -> None:
        if steps_done(observer) == 5:
            (agent,) = [p for p in run_processes(observer.run.run_id) if "torch.distributed.run" in p.cmdline()]
            agent.kill()
            observer.act = lambda _: None

    outcome, _, _ = launch(tmp_path, "sleep", kill_torchrun, real=True)
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert outcome.failure is not None
    assert "signal 9" in outcome.failure.message
    wait_for(lambda: not leftovers(tmp_path), "the end of the killed ranks")


# --- against the stand-in ---------------------------------------------------------------------------------------------


def test_rank_that_ignores_the_end_of_another_is_killed_and_not_blamed(tmp_path: Path) -> None:
    outcome, _, _ = launch(tmp_path, "raise_stubborn")
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.type) == (1, "ValueError")


def test_ranks_that_end_too_early_are_a_failure(tmp_path: Path) -> None:
    outcome, run, _ = launch(tmp_path, "incomplete")
    assert (outcome.exit_code, run.read_state()["state"]) == (1, "failed")
    assert outcome.failure is not None
    assert "before training was complete" in outcome.failure.message


def test_failing_observer_stops_the_run_and_passes_on(tmp_path: Path) -> None:
    def fail(observer: Observer) -> None:
        if steps_done(observer) == 5:
            raise BrokenPipeError("the reader left")

    with pytest.raises(BrokenPipeError):
        launch(tmp_path, "sleep", fail)
    (path,) = tmp_path.glob("runs/*/*")
    assert RunFolder(path).read_state()["state"] == "failed"


def test_death_of_a_rank_is_known_within_two_seconds_although_its_peers_wait_for_ever(tmp_path: Path) -> None:
    died: list[float] = []

    def kill(observer: Observer) -> None:
        if steps_done(observer) == 5 and not died:
            for rank in (p for p in run_processes(observer.run.run_id) if p.environ().get("RANK") == "1"):
                rank.kill()  # as soon as there is one: rank 0 may have made its steps before
                died.append(time.monotonic())

    outcome, _, observer = launch(tmp_path, "wait", kill)
    known_at = [*observer.noted_at, time.monotonic()][0]  # all may be over before there was time for a note
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.signal) == (1, "SIGKILL")
    assert known_at - died[0] < 2.0


def test_what_is_run_is_what_the_plan_says(tmp_path: Path) -> None:
    """The process that was started has the argv, folder and environment of the plan, and nothing of its own."""
    plan, run = make_plan(tmp_path)
    seen: dict[str, object] = {}
    stop = StopRequests()
    os.environ["FAKE_MODE"] = "wait"

    def look(observer: Observer) -> None:
        for process in run_processes(observer.run.run_id) if not seen else []:
            with contextlib.suppress(psutil.Error):
                if not seen and "torch.distributed.run" in process.cmdline():
                    seen.update(argv=process.cmdline(), cwd=process.cwd(), environment=process.environ())
                    stop.count, stop.cause = 1, "Ctrl-C"

    lead(plan, run, Observer(run, look), stop)
    node = plan.nodes[0]
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
