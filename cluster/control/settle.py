"""Runs that nobody leads, or somebody else: what became of them, how to have them stopped, how to lead them again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.control.attempt import (
    Controller,
    ControllerBusyError,
    controlling,
    find_controller,
    finish,
    follow_first_node,
    lease_of,
    read_log_starts,
)
from cluster.control.controller import Manner, control
from cluster.control.fleet import Fleet
from cluster.control.judge import Case, judge
from cluster.control.link import NodeLink, NodeStatus
from cluster.control.outcome import (
    CANCEL_FILE,
    INTERRUPTED,
    Clock,
    LaunchObserver,
    LaunchOutcome,
    SilentObserver,
    StopRequests,
    SystemClock,
    write_cancel,
)
from cluster.launch.runner import open_links, runner_of
from cluster.plan import LaunchPlan
from cluster.plan_record import read_launch_plan
from engine.runs.folder import FINAL_STATES, RunFolder

Opener = Callable[[LaunchPlan, RunFolder], Sequence[NodeLink]]
_POLL_S = 0.1
_NEVER_S = 1e12
_SYSTEM_CLOCK = SystemClock()


@dataclass(frozen=True)
class Settled:
    """What became of a run: its state in run.json now, who leads it, and what its nodes say if they were asked.

    problem: why the truth is not known. leftover: what may still run although the run has ended.
    """

    state: str
    controller: Controller | None = None
    nodes: tuple[NodeStatus, ...] = ()
    problem: str | None = None
    leftover: tuple[str, ...] = ()

    @property
    def is_final(self) -> bool:
        """Whether the run has ended."""
        return self.state in FINAL_STATES

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "state": self.state,
            "controller": None if self.controller is None else str(self.controller),
            "nodes": {status.node: status.phase for status in self.nodes},
            "problem": self.problem,
            "leftover": list(self.leftover),
        }


def settle(
    run: RunFolder, timeout_s: float = 5.0, opener: Opener = open_links, clock: Clock = _SYSTEM_CLOCK
) -> Settled:
    """The truth about `run`, written to run.json if it has ended without anybody to say so.

    Nothing is done while a controller lives or the run has ended. The leases of nodes that go on are not renewed: this
    only looks. Raises PlanFileError for a run that no launcher started.
    """
    state = str(run.read_state()["state"])
    controller = find_controller(run)
    if controller is not None or state not in ("starting", "running"):
        return Settled(state, controller)
    plan = read_launch_plan(run.path)
    try:
        with controlling(run):
            return _settle(plan, run, timeout_s, opener, clock)
    except ControllerBusyError as error:
        return Settled(str(run.read_state()["state"]), error.controller)


def request_cancel(
    run: RunFolder,
    cause: str = "burst cancel",
    grace_s: float | None = None,
    wait_s: float = 60.0,
    observer: LaunchObserver | None = None,
    stop: StopRequests | None = None,
    opener: Opener = open_links,
) -> Settled:
    """Have `run` stopped, by the controller that it has or, if that is gone, from here; the state afterwards.

    grace_s: as in a launch when None; 0 kills. wait_s: how long the end is waited for while another process leads the
    run. Raises PlanFileError for a run that no launcher started.
    """
    document = run.read_state()
    if find_controller(run) is None:
        if document["state"] in FINAL_STATES:
            return Settled(document["state"])
        if document["state"] == "planned":
            with contextlib.suppress(ControllerBusyError), controlling(run):
                if run.read_state()["state"] == "planned":  # nobody has begun it meanwhile
                    return Settled(finish(run, LaunchOutcome("cancelled", INTERRUPTED)).status)
    deadline = time.monotonic() + wait_s
    is_led_elsewhere = False
    while True:
        if find_controller(run) is None:
            if (state := str(run.read_state()["state"])) in FINAL_STATES:
                return Settled(state, leftover=tuple(run.read_state().get("leftover") or ()))
            plan = read_launch_plan(run.path)
            write_cancel(run, cause, grace_s)
            try:
                manner = Manner(start=False, detached=lease_of(run) is None)
                control(plan, run, opener(plan, run), observer or SilentObserver(), stop or StopRequests(), manner)
            except ControllerBusyError:
                is_led_elsewhere = True  # it was just taken over, and whoever did so sees our request
            continue
        if not is_led_elsewhere or _is_forgotten(run):
            write_cancel(run, cause, grace_s)
            is_led_elsewhere = True
        if time.monotonic() > deadline or (stop is not None and stop.count):
            controller = find_controller(run)
            text = f"it was asked to stop, but has not ended after {wait_s:g} s"
            return Settled(str(run.read_state()["state"]), controller, problem=text)
        time.sleep(_POLL_S)


def _is_forgotten(run: RunFolder) -> bool:
    """Whether a controller that was just beginning took our request for that of an earlier attempt."""
    return not (run.path / CANCEL_FILE).exists() and run.read_state()["state"] not in FINAL_STATES


def _settle(plan: LaunchPlan, run: RunFolder, timeout_s: float, opener: Opener, clock: Clock) -> Settled:
    """Look until all nodes have said how it stands, at most `timeout_s`. The caller holds the lock of the run."""
    fleet = Fleet(plan, run, opener(plan, run), lease_of(run))
    fleet.log_starts = read_log_starts(run)
    deadline = clock.monotonic() + timeout_s
    try:
        fleet.follow()
        while True:
            fleet.look(clock.monotonic())
            fleet.find_lost(clock, _NEVER_S)
            state = follow_first_node(plan, run)
            if fleet.is_over(clock.monotonic(), timeout_s):
                return _conclude(plan, run, fleet)
            is_late = clock.monotonic() > deadline
            is_queued = runner_of(plan).is_queued
            if is_late and not is_queued and not any(part.is_running or part.is_mute for part in fleet.parts):
                # Nothing of the run was ever begun on the nodes that know nothing of it.
                return _conclude(plan, run, fleet)
            if is_late or all(part.is_running for part in fleet.parts):
                return Settled(state, None, tuple(fleet.statuses), _why_unknown(fleet))
            clock.sleep(_POLL_S)
    finally:
        for part in fleet.parts:
            part.link.close()


def _conclude(plan: LaunchPlan, run: RunFolder, fleet: Fleet) -> Settled:
    outcome = finish(run, judge(Case(plan, run, fleet.findings, leftover=fleet.leftover, is_orphan=True)))
    state = str(run.read_state()["state"])
    return Settled(state, None, tuple(fleet.statuses), leftover=tuple(map(str, outcome.leftover)))


def _why_unknown(fleet: Fleet) -> str | None:
    """Which nodes do not answer, when that keeps the truth from us."""
    mute = [f"{part.name} ({part.status.problem})" for part in fleet.parts if part.is_mute]
    if not mute or any(part.is_running for part in fleet.parts):
        return None
    return f"no answer of {', '.join(mute[:8])}{' and others' if len(mute) > 8 else ''}"
