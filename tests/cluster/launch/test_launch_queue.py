"""Waiting for a scheduler: whatever happens meanwhile, no job is left in the queue."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from testkit.fake_plan import fake_plan
from testkit.fake_run import Observer
from testkit.waiting import wait_for

from cluster.control.attempt import StopRequests
from cluster.control.link import LaunchOutcome, NodeLink
from cluster.failure import Failure
from cluster.launch.runner import Asked, Survey
from cluster.launch.scheduler import QueuedRunner, WatchedJob
from cluster.plan import LaunchPlan, NodePlan
from engine.config.settings import RunConfig
from engine.runs.folder import RunFolder, create_run


class Waiting(WatchedJob):
    """A job that never gets nodes, and needs some looks to end."""

    looks_left: int | None = None
    asked = 0
    end_command = "end it"

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run, poll_s=0.2)

    def begin(self, *, start: bool) -> None:
        pass

    def look(self) -> bool:
        self.asked += 1
        return True

    def granted(self, plan: LaunchPlan) -> LaunchPlan | None:
        return None

    def link(self, node: NodePlan) -> NodeLink:
        raise AssertionError("it grants no nodes, so that nobody may ask for their links")

    def refusal(self) -> Failure | None:
        return None

    def waits_for(self) -> str:
        return "its turn"

    def cancel(self) -> None:
        self.looks_left = 3

    def has_ended(self) -> bool:
        if self.looks_left:
            self.looks_left -= 1
        return self.looks_left == 0


class Queue(QueuedRunner):
    def __init__(self, job: Waiting) -> None:
        self._job = job

    def survey(self, config: RunConfig, asked: Asked) -> Survey:
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
    ticks, stop = list[int](), StopRequests()
    stop.count = 1
    outcome = Queue(job).await_nodes(PLAN, job.run, Observer(lambda: ticks.append(1)), stop, start=True)
    assert outcome == LaunchOutcome("cancelled", 130)
    assert (job.looks_left, len(ticks)) == (0, 2)


def test_a_scheduler_is_asked_now_and_then_also_while_an_end_is_to_come(job: Waiting) -> None:
    begin = time.monotonic()
    job.end_after(60.0)
    wait_for(lambda: job.asked >= 3)
    job.close()
    assert time.monotonic() - begin > 0.19  # once at once, once because of the wish, then as often as it is asked
    assert job.asked < 20


def test_a_job_that_nobody_waits_for_any_more_has_ended_when_the_launcher_leaves(job: Waiting) -> None:
    def leave() -> None:
        raise BrokenPipeError("the reader left")

    with pytest.raises(BrokenPipeError):
        Queue(job).await_nodes(PLAN, job.run, Observer(leave), StopRequests(), start=True)
    assert job.looks_left == 0
    failure = job.run.read_state()["failure"]
    assert (failure["kind"], failure["type"], failure["message"]) == ("launcher", "BrokenPipeError", "the reader left")
    assert [event["phase"] for event in job.run.read_events() if event["kind"] == "phase"] == ["its turn"]
