"""Waiting for a scheduler: whatever happens meanwhile, no job is left in the queue."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from testkit.fake_plan import fake_plan
from testkit.fake_run import Observer
from testkit.waiting import wait_for

from cluster.control.attempt import StopRequests
from cluster.control.link import LaunchOutcome, Leftover, NodeLink
from cluster.control.runner import Survey, SurveyOptions
from cluster.failure import Failure
from cluster.launch.scheduler import QueuedRunner, WatchedJob
from cluster.plan import LaunchPlan, NodePlan
from engine.config.settings import RunConfig
from engine.runs.folder import RunFolder, create_run


class Waiting(WatchedJob):
    """A job that never gets nodes, and needs some looks to end."""

    looks_left: int | None = None
    asked = ends = 0
    why: Failure | None = None
    end_command = "end it"

    def __init__(self, run: RunFolder, poll_s: float = 0.2) -> None:
        super().__init__(run, poll_s)

    def begin(self, *, start: bool) -> None:
        pass

    def look(self) -> bool:
        self.asked += 1
        self.ends += self._is_end_due(60.0)
        return True

    def granted(self, plan: LaunchPlan) -> LaunchPlan | None:
        return None

    def link(self, node: NodePlan) -> NodeLink:
        raise AssertionError("it grants no nodes, so that nobody may ask for their links")

    def refusal(self) -> Failure | None:
        return self.why

    def waits_for(self) -> str:
        return "its turn"

    def cancel(self) -> None:
        self.looks_left = self.looks_left or 3

    def has_ended(self) -> bool:
        if self.looks_left:
            self.looks_left -= 1
        return self.looks_left == 0


class Queue(QueuedRunner):
    def __init__(self, job: Waiting) -> None:
        self._job = job

    def survey(self, config: RunConfig, asked: SurveyOptions) -> Survey:
        raise AssertionError("its plan is there: nobody may ask its nodes for another one")

    def job(self, plan: LaunchPlan, run: RunFolder) -> Waiting:
        return self._job


PLAN = fake_plan(Path("/runs/run"))


@pytest.fixture
def job(tmp_path: Path) -> Waiting:
    run = create_run(tmp_path / "run", {})
    run.transition("starting")
    return Waiting(run)


def test_whoever_cancels_a_job_that_waits_is_kept_alive_until_it_has_ended(job: Waiting) -> None:
    ticks, stop, begin = list[float](), StopRequests(), time.monotonic()

    def tick() -> None:
        ticks.append(time.monotonic() - begin)
        stop.count = len(ticks) // 3

    outcome = Queue(job).await_nodes(PLAN, job.run, Observer(tick), stop, start=True)
    assert outcome == LaunchOutcome("cancelled", 130)
    assert (job.looks_left, len(ticks)) == (0, 5)  # three while it waits, two while it ends
    assert [at >= 0.09 * number for number, at in enumerate(ticks)] == [True] * 5  # it is not asked without a pause


def test_a_job_that_does_not_end_is_left_to_who_asks_three_times_and_one_that_is_refused_asked_no_more(
    job: Waiting,
) -> None:
    stop, observer, job.looks_left = StopRequests(), Observer(), 1000
    stop.count, stop.cause = 3, "Ctrl-C"
    left = Leftover("the scheduler", (), f"{job.name} has not ended (no answer); `end it`")
    outcome = Queue(job).await_nodes(PLAN, job.run, observer, stop, start=True)
    assert outcome == LaunchOutcome("cancelled", 130, None, (left,))
    assert observer.stops == [("Ctrl-C", 0.0)]
    refused = Waiting(job.run, poll_s=300.0)  # it does not wait for its next look
    refused.why = Failure("start", "SchedulerError", "never", exit_code=7)
    outcome = Queue(refused).await_nodes(PLAN, job.run, observer, StopRequests(), start=True)
    assert outcome == LaunchOutcome("failed", 7, refused.why)
    for one in (job, refused):
        wait_for(lambda one=one: one.name not in [thread.name for thread in threading.enumerate()])
        one.watch()
        assert one.name not in [thread.name for thread in threading.enumerate()]  # it is closed


def test_a_scheduler_is_asked_now_and_then_also_while_an_end_is_to_come(job: Waiting) -> None:
    begin = time.monotonic()
    job.end_after(60.0)
    wait_for(lambda: job.asked >= 3)
    assert time.monotonic() - begin > 0.19  # once at once, once because of the wish, then as often as it is asked
    assert (job.asked < 20, job.ends) == (True, 0)
    begin = time.monotonic()
    job.end_after(0.3)
    job.end_after(60.0)  # which puts nothing off
    wait_for(lambda: job.ends)
    assert time.monotonic() - begin > 0.29
    asked = job.asked
    wait_for(lambda: job.asked > asked + 1)
    job.close()
    assert job.ends == 1  # another time only after a while
    patient = Waiting(job.run, poll_s=300.0)
    patient.watch()
    wait_for(lambda: patient.asked)
    patient.end_after(0.0)  # which does not wait for the next look
    wait_for(lambda: patient.ends)
    patient.close()


def test_a_job_that_nobody_waits_for_any_more_has_ended_when_the_launcher_leaves(job: Waiting) -> None:
    def leave() -> None:
        raise BrokenPipeError("the reader left")

    with pytest.raises(BrokenPipeError):
        Queue(job).await_nodes(PLAN, job.run, Observer(leave), StopRequests(), start=True)
    assert job.looks_left == 0
    failure = job.run.read_state()["failure"]
    assert (failure["kind"], failure["type"], failure["message"]) == ("launcher", "BrokenPipeError", "the reader left")
    assert [event["phase"] for event in job.run.read_events() if event["kind"] == "phase"] == ["its turn"]
