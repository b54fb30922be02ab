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
from typing import Any

import pytest
from control_fakes import FakeLink, Observer, Scene, World, node, put
from testkit import PYTHON_PATH
from testkit.clock import Clock

from cluster.control.attempt import (
    CANCEL_FILE,
    LOCK_FILE,
    CancelFile,
    Controller,
    RunState,
    StopRequests,
    controlling,
    read_cancel,
    write_cancel,
)
from cluster.control.controller import ControlOptions, Opener, control, request_cancel, settle
from cluster.control.link import NodeLink
from cluster.plan import LaunchPlan
from engine.runs.folder import RunFolder


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


LEASE = {"stop_at_ns": Clock().time_ns(), "stop_cause": "no word from the launcher"}
NOW_NS, HOUR_NS = Clock().time_ns(), 3_600 * 10**9
BOTH_BY_LEASE = [(0, node(at, "end", None, "lease", **LEASE)) for at in (0, 1)]


@pytest.mark.parametrize(
    ("story", "state", "exit_code", "words"),
    [
        ([], "running", 0, ""),
        (
            [*BOTH_BY_LEASE, (0, node(0, "rank_error", 0, "peer_lost"))], "failed", 1,
            "LauncherLost the launcher was gone for 60 s, so these nodes stopped their ranks: n1, n2",
        ),
        (  # a node whose clock is an hour ahead said something after it had stopped
            [
                (0, node(0, "rank_error", 0, message="the true cause", time_ns=NOW_NS + 5 * 10**9)),
                (0, node(0, "end", 1)), (0, put(1, ahead_ns=HOUR_NS)),
                (0, node(1, "end", None, "lease", stop_at_ns=NOW_NS + HOUR_NS)),
                (0, node(1, "rank_error", 3, time_ns=NOW_NS + HOUR_NS + 10**9)),
            ],
            "failed", 1, "the true cause",
        ),
        (  # a failure before the lease ended
            [
                (0, node(1, "rank_error", 3, message="the tenth expert is missing")), (0, node(1, "end", 1)),
                (0, node(0, "end", None, "lease", stop_at_ns=Clock().time_ns() + 10**9)),
            ],
            "failed", 1, "the tenth expert is missing",
        ),
        ([(0, World.complete)], "completed", 0, ""),
        ([(0, node(at, "end", None, "stop", stop_cause="SIGTERM")) for at in (0, 1)], "cancelled", 130, ""),
        (
            [BOTH_BY_LEASE[0], (0, put(1, is_silent=True))], "running", 3, "no answer of n2 (timed out)",
        ),
        ([BOTH_BY_LEASE[0], (0, put(1, phase="lost"))], "failed", 1, ""),
        ([(0, put(0, 1, phase="none"))], "failed", 1, "before any node had begun"),
    ],
)  # fmt: skip
def test_what_became_of_a_run_is_found_out_and_nothing_is_done_to_it(
    world: World, story: list[Scene], state: str, exit_code: int, words: str
) -> None:
    world.play(*story)
    settled, failure = look(world), world.state["failure"] or {"type": "", "message": ""}
    is_final = state != "running"
    assert (settled.state, settled.exit_code, settled.is_final) == (state, exit_code, is_final)
    assert (world.state["state"], world.state["exit_code"]) == (state, exit_code if is_final else None)
    assert words in (settled.problem or f"{failure['type']} {failure['message']}")
    assert [status.phase for status in settled.nodes] == [link.phase for link in world.links]
    assert not any(link.beats or link.stops for link in world.links)
    assert all(link.is_closed for link in world.links)
    assert [link.sweeps for link in world.links] == [0, world.links[1].phase == "lost"]
    assert world.clock.now < 1006.5


def test_run_that_is_led_or_gets_a_controller_meanwhile_is_only_reported(world: World) -> None:
    with controlling(world.run):
        led = look(world)
    with (world.run.path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # as seen by who looks, nobody's; as seen by who takes it, somebody's
        taken = look(world)
    assert led.controller is not None
    assert led.controller.pid == os.getpid()
    assert (taken.state, taken.controller) == ("running", Controller(None, None, None))
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


# --- cancel and take over ---------------------------------------------------------------------------------------------


class EndingLink(FakeLink):
    """A node on which everything ends at once when it is asked to: the clock here is the real one."""

    def stop(self, cause: str, grace_s: float) -> None:
        self.stops.append((0.0, cause, grace_s))
        self.end(None, "stop", stop_cause=cause)


def test_run_that_nobody_leads_is_stopped_from_here(world: World) -> None:
    world.links = [EndingLink(link.node, world.run, world.clock, phase="running") for link in world.links]
    settled = request_cancel(world.run, opener=opener(world))
    assert (settled.state, world.state["exit_code"]) == ("cancelled", 130)
    codes = {"completed": 0, "failed": 1, "oom": 1, "cancelled": 130, "running": 0}
    assert {state: RunState({"state": state}).exit_code for state in codes} == codes
    assert [link.stops[0][1:] for link in world.links] == [("burst cancel", 12.0)] * 2
    assert request_cancel(world.run).state == "cancelled"  # it stays as it is


class Watched(RunFolder):
    """Somebody else asks for something else after the first look."""

    looks = 0
    seen: CancelFile | None = None

    def read_state(self) -> dict[str, Any]:
        self.looks += 1
        if self.looks == 2:
            self.seen = read_cancel(self)
            write_cancel(self, "another", 7.0)
        return super().read_state()


def test_run_that_is_led_elsewhere_gets_the_request_and_a_damaged_one_counts(world: World) -> None:
    watched = Watched(world.run.path)
    with controlling(world.run):
        settled = request_cancel(watched, grace_s=0.0, wait_s=0.3, opener=opener(world))
    assert watched.looks <= 6  # in three pauses
    assert settled.problem == "it was asked to stop, but has not ended after 0.3 s"
    assert (watched.seen, read_cancel(world.run)) == (CancelFile("burst cancel", 0.0), CancelFile("another", 7.0))
    (world.run.path / CANCEL_FILE).write_text("{")
    assert read_cancel(world.run) == CancelFile("burst cancel", None)


def test_planned_run_is_cancelled_without_any_node_unless_it_is_just_being_launched(tmp_path: Path) -> None:
    run = World(tmp_path).run
    with controlling(run):
        request_cancel(run, wait_s=0.1)
        assert run.read_state()["state"] == "planned"
        assert (run.path / CANCEL_FILE).exists()
    assert request_cancel(run).state == "cancelled"


def test_run_is_taken_over_and_led_to_its_end(world: World) -> None:
    world.at(5, world.complete)
    options = ControlOptions(start=False, clock=world.clock)
    outcome = control(world.plan, world.run, world.links, Observer(), StopRequests(), options)
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
