"""The one process that leads a run: starts it on all nodes, watches, stops, judges, and keeps run.json true.

It works through `NodeLink`s alone, so it does not know whether a node is this machine, far away or given by Slurm. It
may die at any moment: nodes then stop by themselves when their lease ends, unless another controller comes in time.
What became of a run that nobody leads `settle` finds out; `request_cancel` has any run stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.control.attempt import (
    CANCEL_FILE,
    ControllerBusyError,
    RunState,
    StopRequests,
    begin_attempt,
    controlling,
    find_controller,
    finish,
    follow_first_node,
    read_run_state,
    write_cancel,
)
from cluster.control.fleet import Fleet
from cluster.control.judge import KILL_S, HangWatch, StepWatch, complete, judge
from cluster.control.link import (
    INTERRUPTED,
    TIME_LIMIT,
    Clock,
    LaunchObserver,
    LaunchOutcome,
    LaunchTiming,
    NodeLink,
)
from cluster.control.runner import open_links, read_run_plan, runner_of
from cluster.failure import Failure
from cluster.plan import LaunchPlan
from cluster.remote_text import number
from engine.runs.files import utc_now
from engine.runs.folder import FINAL_STATES, RunFolder, RunFolderError, process_facts

_START_POLL_S = 0.02  # a person waits for it
_SHOWN = 8  # refusals
_CATCH_UP_S = 1.0  # for the threads of the links to read what came while this process was stopped
_CANCELLED = LaunchOutcome("cancelled", INTERRUPTED)


@dataclass(frozen=True)
class ControlOptions:
    """How a run is led. start: begin it; else take over what runs. detached: nodes go on without a launcher."""

    start: bool = True
    detached: bool = False
    timing: LaunchTiming = LaunchTiming()  # noqa: RUF009 - frozen
    clock: Clock = time


def control(
    plan: LaunchPlan,
    run: RunFolder,
    links: Sequence[NodeLink],
    observer: LaunchObserver,
    stop: StopRequests,
    options: ControlOptions = ControlOptions(),
) -> LaunchOutcome:
    """Lead `run` to its end over `links`, one per node of `plan` in its order; the outcome, also written to run.json.

    The run folder holds the plan's files already. Whatever happens here, an exception of the observer included, the
    nodes are asked to kill what runs before this returns; the links are closed. Raises ControllerBusyError when
    somebody else leads the run, RunFolderError when its folder cannot be written.
    """
    opened = list(links)
    try:
        with controlling(run):
            lease_s = None if options.detached or runner_of(plan).is_queued else plan.config.cluster.lease_s
            if options.start:
                begin_attempt(plan, run, lease_s)
                if stop.count:
                    return finish(run, _CANCELLED)
            if run.read_state()["state"] not in FINAL_STATES:
                run.record(**process_facts(), detached=options.detached)
                granted = runner_of(plan).await_nodes(plan, run, observer, stop, start=options.start)
                if isinstance(granted, LaunchOutcome):
                    return finish(run, granted)
                if granted is not None:
                    plan, links = granted
                    opened += links
            fleet = Fleet(plan, run, links, lease_s, options.clock)
            return finish(run, _Lead(fleet, observer, stop, options).to_the_end())
    finally:
        for link in opened:
            link.close()


class _Lead:
    """One run, from its first to its last moment."""

    def __init__(self, fleet: Fleet, observer: LaunchObserver, stop: StopRequests, options: ControlOptions) -> None:
        self.fleet, self.plan, self.run, self.observer, self.stop = fleet, fleet.plan, fleet.run, observer, stop
        self.options, self.timing, self.clock = options, options.timing, options.clock
        self.steps = StepWatch(self.run, self.clock.monotonic)
        self.hang = HangWatch(fleet, self.steps, self.clock, observer.note)
        self.failure: Failure | None = None  # what was found here rather than by looking at what is left
        self.is_cancelled = False
        self.trouble_at: float | None = None
        self._asked: tuple[str, float] | None = None  # for the end: by whom, and after what grace
        self._has_started = not options.start
        self._early_at: float | None = None
        self._completed_at: float | None = None
        self._polled_at = self._hears_from = self._cut_off_until = self._now

    def to_the_end(self) -> LaunchOutcome:
        """The outcome. Should anything go wrong here, everything is killed first."""
        try:
            return self._until_end()
        except BaseException as error:
            self.fleet.abandon(self.timing)
            outcome = LaunchOutcome("cancelled", INTERRUPTED, None, self.fleet.leftover)
            if not self.stop.count:
                failure = complete(Failure("launcher", type(error).__name__, str(error)), self.fleet)
                outcome = LaunchOutcome("failed", 1, failure, self.fleet.leftover)
            finish(self.run, outcome)
            raise

    def _until_end(self) -> LaunchOutcome:
        self.fleet.follow(start=self.options.start)
        self.steps.touch()
        while self.stop.count < 3:
            self._look()
            self._handle_refusals()
            if self.fleet.is_over(self.timing.sync_s):
                break
            self.fleet.beat(self.timing.heartbeat_s)
            self._handle_requests()
            if not self.fleet.is_starting:
                self._handle_nodes()
            self.observer.nodes(self.fleet.statuses)
            self.observer.tick()
            self.clock.sleep(min(self.timing.poll_s, _START_POLL_S) if self.fleet.is_starting else self.timing.poll_s)
        self.observer.nodes(self.fleet.statuses)
        self.observer.tick()
        if self.stop.count >= 3:
            return LaunchOutcome("cancelled", INTERRUPTED, None, self.fleet.leftover)
        ended = [part for part in self.fleet.parts if part.status.outcome is not None]
        if unsynced := [part.name for part in ended if not part.status.is_synced]:
            self.observer.note(f"the last lines of the logs of {', '.join(unsynced)} did not arrive")
        return judge(self.fleet, self.failure, cancelled=self.is_cancelled)

    # --- every turn --------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return self.clock.monotonic()

    def _look(self) -> None:
        self.fleet.look()
        self.steps.poll()
        if self.fleet.is_starting:
            self.steps.touch()
        if not self._has_started and all(part.has_started for part in self.fleet.parts):
            self._has_started = True
            with contextlib.suppress(RunFolderError):
                self.run.record(nodes_started_at=utc_now())
        if follow_first_node(self.plan, self.run) == "completed" and self._completed_at is None:
            self._completed_at = self._now

    def _handle_refusals(self) -> None:
        """Once all nodes have answered to the start, those that began are asked to end if others refused."""
        refusals = sorted((part.name, part.status.refusal) for part in self.fleet.parts if part.status.refusal)
        if refusals and not self.fleet.is_starting and self._asked is None and self.trouble_at is None:
            (first, error), *others = refusals
            more = (f"and {len(others) - _SHOWN} more",) if len(others) > _SHOWN else ()
            details = (*(str(other) for _, other in others[:_SHOWN]), *more)
            self._fail(Failure("start", error.kind, str(error), host=first, details=details), "start")

    def _handle_requests(self) -> None:
        """Pass on what somebody asks for. Who stops a run that is failing does not make it a cancelled one."""
        checkpoint, grace_s = self.plan.config.train.checkpoint, self.timing.stop_grace_s
        asked = self.stop.most_urgent(self.run, max(grace_s, checkpoint.stop_grace_s if checkpoint.is_on else 0.0))
        if asked is None:
            return
        if asked != self._asked:
            if asked[1] > 0:
                self.observer.stopping(*asked)
            else:
                self.observer.note(f"{asked[0]}: killing what is left")
        if self._asked is None:
            self.is_cancelled = self.trouble_at is None
        self._asked = asked
        self.fleet.stop(*asked)  # in every turn: nodes may have begun since

    def _handle_nodes(self) -> None:
        self._handle_losses()
        # Ends that ranks come to before a time limit are no failures.
        is_at_limit = any(status.supervisor.get("stop_cause") == TIME_LIMIT for status in self.fleet.statuses)
        if self._completed_at is not None:
            # Ranks that go on although training is complete are stopped in the end.
            if self._now > self._completed_at + self.timing.finish_s:
                self._stop_rest("completed", {})
        elif self._asked is None and self.failure is None and not is_at_limit:
            self._handle_signs()
            if self.trouble_at is None and (failure := self.hang.poll(self.timing)) is not None:
                self._fail(failure, "hang")
        self.fleet.give_up(self.timing)

    def _handle_losses(self) -> None:
        """Nodes that cannot be heard, or whose supervisor is gone without a word, end the run."""
        lost_s = self.timing.lost_s if self.timing.lost_s is not None else self.plan.config.cluster.lease_s / 2
        if self._now > self._polled_at + lost_s / 2:  # stopped, or starved: it was not the nodes that were silent
            self._hears_from = self._now + _CATCH_UP_S
        self._polled_at = self._now
        if self._now < self._hears_from:
            return
        # Ranks wait for each other: if one advances, all live. And who hears of no node of a run that needs no
        # launcher is likelier cut off itself; nodes then come back one after the other.
        is_unreachable = [part.is_unreachable for part in self.fleet.parts if part.is_open]
        if self.fleet.lease_s is None and is_unreachable and all(is_unreachable):
            self._cut_off_until = self._now + lost_s
        if self.steps.silence_s <= lost_s or self._now < self._cut_off_until:
            lost_s = max(lost_s, KILL_S)
        lines = self.fleet.find_lost(lost_s)
        if lines and self._completed_at is None:
            self._note_trouble(lines[0])
            self._stop_rest("node lost", {})

    def _handle_signs(self) -> None:
        """A failure: first let every node see what it sees, then stop those that see nothing, then kill the rest."""
        signs = {part.name: sign for part in self.fleet.parts if (sign := part.strong_sign) is not None}
        if not signs and self.trouble_at is None:
            signs = self._early_ends()
        for name, text in signs.items():
            self._note_trouble(f"{name}: {text}")
        if self.trouble_at is None:
            return
        if self._now >= self.trouble_at + self.timing.evidence_s:
            self._stop_rest("failure", signs)
        if self._now >= self.trouble_at + self.timing.failure_grace_s:
            self.fleet.stop("failure", 0.0)  # no SIGTERM before: torchrun is on its way to say which rank failed first

    def _early_ends(self) -> dict[str, str]:
        """Ranks that ended well although training is not complete, after time for the news that it is."""
        weak = {part.name: sign for part in self.fleet.parts if (sign := part.weak_sign) is not None}
        if not weak or self._early_at is None:
            self._early_at = self._now if weak else None
        is_last = self.steps.step >= self.plan.config.train.steps
        patience_s = self.timing.early_exit_s if is_last else self.timing.vanish_s
        return weak if self._early_at is not None and self._now > self._early_at + patience_s else {}

    def _fail(self, failure: Failure, cause: str) -> None:
        """The run is over for a reason that was found here: kill it everywhere."""
        self.failure = failure
        self._note_trouble(failure.message)
        self.fleet.stop(cause, 0.0)

    def _note_trouble(self, text: str) -> None:
        """Only the first is told."""
        if self.trouble_at is None:
            self.trouble_at = self._now
            self.observer.note(f"{text}; stopping the run")

    def _stop_rest(self, cause: str, signs: Mapping[str, str]) -> None:
        """Stop the nodes that show no sign of a failure of their own."""
        rest = [part for part in self.fleet.parts if part.name not in signs and part.stopped_ns is None]
        self.fleet.stop(cause, self.timing.failure_grace_s, rest)


Opener = Callable[[LaunchPlan, RunFolder], Sequence[NodeLink]]
_POLL_S = 0.1
_NEVER_S = 1e12


def settle(run: RunFolder, timeout_s: float = 5.0, opener: Opener = open_links, clock: Clock = time) -> RunState:
    """The truth about `run`, written to run.json if it has ended without anybody to say so.

    Nothing is done while a controller lives or the run has ended. The leases of nodes that go on are not renewed: this
    only looks. Raises PlanFileError for a run that no launcher started.
    """
    seen = read_run_state(run)
    if seen.controller is not None or seen.state not in ("starting", "running"):
        return seen
    plan = read_run_plan(run.path)
    try:
        with controlling(run), contextlib.ExitStack() as closing:
            fleet = Fleet(plan, run, opener(plan, run), number(run.read_state(), "lease_s"), clock)
            for part in fleet.parts:
                closing.callback(part.link.close)
            return _settle(fleet, timeout_s, clock)
    except ControllerBusyError as error:
        return RunState(run.read_state(), error.controller)


def _settle(fleet: Fleet, timeout_s: float, clock: Clock) -> RunState:
    """Look until all nodes have said how it stands. The caller holds the lock of the run."""
    run, parts, deadline = fleet.run, fleet.parts, clock.monotonic() + timeout_s
    fleet.follow(start=False)
    while True:
        fleet.look()
        fleet.find_lost(_NEVER_S)
        follow_first_node(fleet.plan, run)
        is_late = clock.monotonic() > deadline
        mute = [f"{part.name} ({part.status.problem})" for part in parts if part.is_unreachable]
        runs = [part.is_open and not part.is_unreachable and part.status.is_running for part in parts]
        # Of nodes that know nothing of it to the end nothing was ever begun, unless they wait in a queue.
        never_began = is_late and not (mute or any(runs) or runner_of(fleet.plan).is_queued)
        if never_began or fleet.is_over(timeout_s):
            finish(run, judge(fleet, is_orphan=True))
            return RunState(run.read_state(), nodes=tuple(fleet.statuses))
        if is_late or all(runs):
            names = f"{', '.join(mute[:_SHOWN])}{' and others' if len(mute) > _SHOWN else ''}"
            problem = f"no answer of {names}" if mute and not any(runs) else None
            return RunState(run.read_state(), None, True, problem, tuple(fleet.statuses))
        clock.sleep(_POLL_S)


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
    stop, deadline, is_requested = stop or StopRequests(), time.monotonic() + wait_s, False
    while True:
        is_led, seen = find_controller(run) is not None, RunState(run.read_state())
        if not is_led and seen.is_final:
            return seen
        with contextlib.suppress(ControllerBusyError):  # it was just taken over, and whoever did so sees our request
            if not is_led and seen.state == "planned":
                with controlling(run):
                    if run.read_state()["state"] == "planned":  # nobody has begun it meanwhile
                        finish(run, _CANCELLED)
                continue
            # A controller that was just beginning may have taken our request for that of an earlier attempt.
            is_forgotten = not (run.path / CANCEL_FILE).exists() and not seen.is_final
            if not is_led:
                plan = read_run_plan(run.path)
                write_cancel(run, cause, grace_s)
                is_requested = True
                options = ControlOptions(start=False, detached=number(run.read_state(), "lease_s") is None)
                control(plan, run, opener(plan, run), observer or LaunchObserver(), stop, options)
                continue
            if not is_requested or is_forgotten:
                write_cancel(run, cause, grace_s)
                is_requested = True
        if time.monotonic() > deadline or stop.count:
            text = f"it was asked to stop, but has not ended after {wait_s:g} s"
            return RunState(run.read_state(), find_controller(run), problem=text)
        time.sleep(_POLL_S)
