"""Runs that nobody leads, or somebody else: what became of them, how to have them stopped, how to lead them again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from cluster.control.attempt import (
    CANCEL_FILE,
    ControllerBusyError,
    RunState,
    StopRequests,
    controlling,
    find_controller,
    finish,
    follow_first_node,
    glance,
    lease_of,
    write_cancel,
)
from cluster.control.controller import Manner, control
from cluster.control.fleet import Fleet
from cluster.control.judge import judge
from cluster.control.link import INTERRUPTED, Clock, LaunchObserver, LaunchOutcome, NodeLink
from cluster.launch.runner import open_links, runner_of
from cluster.plan import LaunchPlan, read_launch_plan
from engine.runs.folder import FINAL_STATES, RunFolder

Opener = Callable[[LaunchPlan, RunFolder], Sequence[NodeLink]]
_POLL_S = 0.1
_NEVER_S = 1e12
_CLOCK = Clock()


def settle(run: RunFolder, timeout_s: float = 5.0, opener: Opener = open_links, clock: Clock = _CLOCK) -> RunState:
    """The truth about `run`, written to run.json if it has ended without anybody to say so.

    Nothing is done while a controller lives or the run has ended. The leases of nodes that go on are not renewed: this
    only looks. Raises PlanFileError for a run that no launcher started.
    """
    seen = glance(run)
    if seen.controller is not None or seen.state not in ("starting", "running"):
        return seen
    plan = read_launch_plan(run.path)
    try:
        with controlling(run):
            return _settle(plan, run, timeout_s, opener, clock)
    except ControllerBusyError as error:
        return RunState(run.read_state(), error.controller)


def request_cancel(
    run: RunFolder,
    cause: str = "burst cancel",
    grace_s: float | None = None,
    wait_s: float = 60.0,
    observer: LaunchObserver | None = None,
    stop: StopRequests | None = None,
    opener: Opener = open_links,
) -> RunState:
    """Have `run` stopped, by the controller that it has or, if that is gone, from here; the state afterwards.

    grace_s: as in a launch when None; 0 kills. wait_s: how long the end is waited for while another process leads the
    run. Raises PlanFileError for a run that no launcher started.
    """
    document = run.read_state()
    if find_controller(run) is None:
        if document["state"] in FINAL_STATES:
            return RunState(document)
        if document["state"] == "planned":
            with contextlib.suppress(ControllerBusyError), controlling(run):
                if run.read_state()["state"] == "planned":  # nobody has begun it meanwhile
                    finish(run, LaunchOutcome("cancelled", INTERRUPTED))
                    return RunState(run.read_state())
    deadline = time.monotonic() + wait_s
    is_led_elsewhere = False
    while True:
        if find_controller(run) is None:
            if (seen := RunState(run.read_state())).is_final:
                return seen
            plan = read_launch_plan(run.path)
            write_cancel(run, cause, grace_s)
            try:
                manner = Manner(start=False, detached=lease_of(run) is None)
                control(plan, run, opener(plan, run), observer or LaunchObserver(), stop or StopRequests(), manner)
            except ControllerBusyError:
                is_led_elsewhere = True  # it was just taken over, and whoever did so sees our request
            continue
        if not is_led_elsewhere or _is_forgotten(run):
            write_cancel(run, cause, grace_s)
            is_led_elsewhere = True
        if time.monotonic() > deadline or (stop is not None and stop.count):
            text = f"it was asked to stop, but has not ended after {wait_s:g} s"
            return RunState(run.read_state(), find_controller(run), problem=text)
        time.sleep(_POLL_S)


def _is_forgotten(run: RunFolder) -> bool:
    """Whether a controller that was just beginning took our request for that of an earlier attempt."""
    return not (run.path / CANCEL_FILE).exists() and run.read_state()["state"] not in FINAL_STATES


def _settle(plan: LaunchPlan, run: RunFolder, timeout_s: float, opener: Opener, clock: Clock) -> RunState:
    """Look until all nodes have said how it stands, at most `timeout_s`. The caller holds the lock of the run."""
    fleet = Fleet(plan, run, opener(plan, run), lease_of(run), clock)
    deadline = clock.monotonic() + timeout_s
    try:
        fleet.follow()
        while True:
            fleet.look()
            fleet.find_lost(_NEVER_S)
            follow_first_node(plan, run)
            if fleet.is_over(timeout_s):
                return _conclude(run, fleet)
            is_late = clock.monotonic() > deadline
            is_queued = runner_of(plan).is_queued
            if is_late and not is_queued and not any(part.is_running or part.is_mute for part in fleet.parts):
                # Nothing of the run was ever begun on the nodes that know nothing of it.
                return _conclude(run, fleet)
            if is_late or all(part.is_running for part in fleet.parts):
                return RunState(run.read_state(), None, True, _why_unknown(fleet), tuple(fleet.statuses))
            clock.sleep(_POLL_S)
    finally:
        for part in fleet.parts:
            part.link.close()


def _conclude(run: RunFolder, fleet: Fleet) -> RunState:
    finish(run, judge(fleet, is_orphan=True))
    return RunState(run.read_state(), nodes=tuple(fleet.statuses))


def _why_unknown(fleet: Fleet) -> str | None:
    """Which nodes do not answer, when that keeps the truth from us."""
    mute = [f"{part.name} ({part.status.problem})" for part in fleet.parts if part.is_mute]
    if not mute or any(part.is_running for part in fleet.parts):
        return None
    return f"no answer of {', '.join(mute[:8])}{' and others' if len(mute) > 8 else ''}"
