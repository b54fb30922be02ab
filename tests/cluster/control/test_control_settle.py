"""Runs that nobody leads any more: looked at, stopped and taken over from another terminal."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from control_fakes import FakeLink, Observer, World
from testkit import PYTHON_PATH

from cluster.control.attempt import CANCEL_FILE, LOCK_FILE, Controller, RunState, StopRequests, controlling, read_cancel
from cluster.control.controller import Manner, Opener, control, request_cancel, settle
from cluster.control.link import NodeLink
from cluster.plan import LaunchPlan, PlanFileError
from engine.runs.folder import RunFolder, create_run


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A run that has begun; the process that led it is gone."""
    world = World(tmp_path)
    world.run.transition("starting", lease_s=60.0)
    world.run.transition("running")
    for link in world.links:
        link.phase = "running"
    return world


def opener(world: World) -> Opener:
    def open_links(plan: LaunchPlan, run: RunFolder) -> Sequence[NodeLink]:
        assert (plan.run_id, run.run_id) == (world.run.run_id, world.run.run_id)
        return list(world.links)

    return open_links


def look(world: World) -> RunState:
    return settle(world.run, 5.0, opener(world), world.clock)


def test_run_that_goes_on_is_said_to_and_its_lease_not_renewed(world: World) -> None:
    settled = look(world)
    assert (settled.state, settled.problem, settled.is_final) == ("running", None, False)
    assert [status.phase for status in settled.nodes] == ["running", "running"]
    assert all(not link.beats and not link.stops and link.is_closed for link in world.links)


def test_run_whose_nodes_stopped_for_want_of_a_launcher_has_failed(world: World) -> None:
    for link in world.links:
        link.end(None, "lease", stop_at_ns=world.clock.time_ns(), stop_cause="no word from the launcher")
    world.links[0].rank_error(0, "peer_lost")
    settled = look(world)
    assert settled.state == "failed"
    failure = world.state["failure"]
    assert failure["type"] == "LauncherLost"
    assert "n1, n2" in failure["message"]


def test_failure_before_the_lease_ended_is_told_instead(world: World) -> None:
    world.links[1].rank_error(3, message="the tenth expert is missing")
    world.links[1].end(1)
    world.links[0].end(None, "lease", stop_at_ns=world.clock.time_ns() + 10**9)
    look(world)
    assert world.state["failure"]["message"] == "the tenth expert is missing"


def test_run_that_completed_unseen_is_completed(world: World) -> None:
    world.complete()
    look(world)
    assert (world.state["state"], world.state["exit_code"]) == ("completed", 0)


def test_run_that_somebody_stopped_on_the_nodes_was_cancelled(world: World) -> None:
    for link in world.links:
        link.end(None, "stop", stop_cause="SIGTERM")
    look(world)
    assert (world.state["state"], world.state["exit_code"]) == ("cancelled", 130)


def test_node_that_cannot_be_heard_leaves_the_truth_open(world: World) -> None:
    world.links[0].end(None, "lease")
    world.links[1].silent_since = world.clock.now
    settled = look(world)
    assert settled.state == "running"
    assert "n2 (timed out)" in str(settled.problem)
    assert world.clock.now < 1006.5


def test_supervisor_that_died_with_its_launcher_is_swept_and_judged(world: World) -> None:
    world.links[0].end(None, "lease")
    world.links[1].phase = "lost"
    look(world)
    assert world.state["state"] == "failed"
    assert world.links[1].sweeps == 1


def test_run_that_never_began_anywhere_has_failed(world: World) -> None:
    for link in world.links:
        link.phase = "none"
    look(world)
    assert "before any node had begun" in world.state["failure"]["message"]


def test_run_with_a_controller_is_only_reported(world: World) -> None:
    with controlling(world.run):
        settled = look(world)
    assert settled.controller is not None
    assert not world.links[0].is_followed


def test_run_that_gets_a_controller_meanwhile_is_only_reported(world: World) -> None:
    with (world.run.path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # as seen by who looks, nobody's; as seen by who takes it, somebody's
        settled = look(world)
    assert (settled.state, settled.controller) == ("running", Controller(None, None, None))
    assert not world.links[0].is_followed


_ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from cluster.control.attempt import controlling, find_controller
from cluster.control.controller import request_cancel
from engine.runs.folder import RunFolder, RunFolderError
run = RunFolder(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
with controlling(run):
    print(find_controller(run))
    try:
        request_cancel(run)
    except RunFolderError as error:
        print(error)
"""


def test_a_full_disk_hinders_nobody_from_leading_a_run_and_who_cannot_ask_for_its_end_is_told(world: World) -> None:
    words = [sys.executable, "-c", _ON_A_FULL_DISK, str(world.run.path)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": PYTHON_PATH}, capture_output=True, timeout=200)
    assert done.stdout.decode().splitlines() == [
        "process ? on an unknown host, since an unknown time",
        f"{world.run.path / CANCEL_FILE} cannot be written, so nobody is asked to stop: File too large.",
    ]


def test_run_that_no_launcher_started_is_told_apart(tmp_path: Path) -> None:
    run = create_run(tmp_path / "tiny" / "20260101-000000-aaaaaa", {})
    run.transition("starting")
    with pytest.raises(PlanFileError):
        settle(run)


# --- cancel -----------------------------------------------------------------------------------------------------------


class EndingLink(FakeLink):
    """A node on which everything ends at once when it is asked to: the clock here is the real one."""

    def stop(self, cause: str, grace_s: float) -> None:
        self.stops.append((0.0, cause, grace_s))
        self.end(None, "stop", stop_cause=cause)


def test_run_that_nobody_leads_is_stopped_from_here(world: World) -> None:
    world.links = [EndingLink(link.node, world.run, world.clock, phase="running") for link in world.links]
    settled = request_cancel(world.run, opener=opener(world))
    assert (settled.state, world.state["exit_code"]) == ("cancelled", 130)
    assert [link.stops[0][1:] for link in world.links] == [("burst cancel", 12.0)] * 2


def test_run_that_is_led_elsewhere_gets_the_request(world: World) -> None:
    with controlling(world.run):
        settled = request_cancel(world.run, grace_s=0.0, wait_s=0.3, opener=opener(world))
    assert settled.problem is not None
    request = read_cancel(world.run)
    assert request is not None
    assert (request.cause, request.grace_s) == ("burst cancel", 0.0)


def test_planned_run_is_cancelled_without_any_node(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert request_cancel(world.run).state == "cancelled"


def test_run_that_has_ended_stays_as_it_is(world: World) -> None:
    world.run.transition("completed")
    assert request_cancel(world.run).state == "completed"


def test_damaged_request_counts(world: World) -> None:
    (world.run.path / "cancel.json").write_text("{")
    request = read_cancel(world.run)
    assert request is not None
    assert request.grace_s is None


# --- take over --------------------------------------------------------------------------------------------------------


def test_run_is_taken_over_and_led_to_its_end(world: World) -> None:
    world.at(5, world.complete)
    manner = Manner(start=False, clock=world.clock)
    outcome = control(world.plan, world.run, world.links, Observer(), StopRequests(), manner)
    assert (outcome.status, world.state["attempt"], world.state["pid"]) == ("completed", 1, os.getpid())
    assert all(link.beats and not link.specs for link in world.links)


def test_request_that_a_beginning_controller_forgot_is_made_again(world: World) -> None:
    path, leave = world.run.path / CANCEL_FILE, StopRequests()
    seen: list[float] = []

    def begin() -> None:
        for _ in range(2):
            while not path.exists():
                time.sleep(0.01)
            seen.append(time.monotonic())
            path.unlink()
        leave.count = 1  # who asks has seen enough

    with controlling(world.run):
        controller = threading.Thread(target=begin, daemon=True)
        controller.start()
        settled = request_cancel(world.run, wait_s=60.0, stop=leave)
    assert len(seen) == 2
    assert settled.problem is not None


def test_planned_run_that_is_just_being_launched_is_not_declared_cancelled(tmp_path: Path) -> None:
    run = World(tmp_path).run
    with controlling(run):
        request_cancel(run, wait_s=0.1)
        assert run.read_state()["state"] != "cancelled"
        assert (run.path / CANCEL_FILE).exists()
