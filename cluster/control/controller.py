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
    Requests,
    RunState,
    StopRequests,
    begin_attempt,
    controlling,
    find_controller,
    finish,
    follow_first_node,
    glance,
    lease_of,
    own_facts,
    write_cancel,
)
from cluster.control.fleet import Fleet
from cluster.control.hang import KILL_S, HangWatch, StepWatch
from cluster.control.judge import Signs, complete, judge
from cluster.control.link import (
    INTERRUPTED,
    Clock,
    LaunchObserver,
    LaunchOutcome,
    LaunchTiming,
    NodeLink,
    StartRefusedError,
)
from cluster.failure import Failure
from cluster.launch.runner import open_links, runner_of
from cluster.plan import LaunchPlan, node_spec, read_launch_plan
from engine.runs.folder import FINAL_STATES, RunFolder, RunFolderError
from engine.runs.records import utc_now

_START_POLL_S = 0.02  # a person waits for it
_SHOWN = 8  # refusals
_CATCH_UP_S = 1.0  # for the threads of the links to read what came while this process was stopped


@dataclass(frozen=True)
class Manner:
    """How a run is led. start: begin it; else take over what runs. detached: nodes go on without a launcher."""

    start: bool = True
    detached: bool = False
    timing: LaunchTiming = LaunchTiming()  # noqa: RUF009 - frozen
    clock: Clock = Clock()  # noqa: RUF009 - has no state


def control(
    plan: LaunchPlan,
    run: RunFolder,
    links: Sequence[NodeLink],
    observer: LaunchObserver,
    stop: StopRequests,
    manner: Manner = Manner(),
) -> LaunchOutcome:
    """Lead `run` to its end over `links`, one per node of `plan` in its order; the outcome, also written to run.json.

    The run folder holds the plan's files already. Whatever happens here, an exception of the observer included, the
    nodes are asked to kill what runs before this returns; the links are closed. Raises ControllerBusyError when
    somebody else leads the run, RunFolderError when its folder cannot be written.
    """
    try:
        with controlling(run):
            if manner.start:
                begin_attempt(plan, run, _lease_s(plan, manner))
                if stop.count:
                    return finish(run, LaunchOutcome("cancelled", INTERRUPTED))
            elif run.read_state()["state"] not in FINAL_STATES:
                run.record(**own_facts())
            own = links
            if run.read_state()["state"] not in FINAL_STATES:
                granted = runner_of(plan).await_nodes(plan, run, observer, stop, start=manner.start)
                if isinstance(granted, LaunchOutcome):
                    return finish(run, granted)
                if granted is not None:
                    plan, own = granted
                    links = [*links, *own]
            return finish(run, _Lead(plan, run, own, observer, stop, manner).to_the_end())
    finally:
        for link in links:
            link.close()


def _lease_s(plan: LaunchPlan, manner: Manner) -> float | None:
    return None if manner.detached or runner_of(plan).is_queued else plan.config.cluster.lease_s


class _Lead:
    """One run, from its first to its last moment."""

    def __init__(
        self,
        plan: LaunchPlan,
        run: RunFolder,
        links: Sequence[NodeLink],
        observer: LaunchObserver,
        stop: StopRequests,
        manner: Manner,
    ) -> None:
        self.plan, self.run, self.observer, self.stop = plan, run, observer, stop
        self.manner, self.timing, self.clock = manner, manner.timing, manner.clock
        self.fleet = Fleet(plan, run, links, _lease_s(plan, manner), self.clock)
        self.requests = Requests(self.stop, run)
        self.signs, self.steps = Signs(run), StepWatch(run, self.clock.monotonic)
        self.hang = HangWatch(plan, run, links, self.steps, self.clock, self.observer.note)
        self.failure: Failure | None = None  # what was found here rather than by looking at what is left
        self.is_cancelled = False
        self._request: tuple[str, float] | None = None  # what was last asked for: cause and grace
        self.trouble_at: float | None = None
        self._is_begun = not manner.start
        self._early_at: float | None = None
        self._completed_at: float | None = None
        self._turn_at = self._hears_from = self._cut_off_until = self._now

    def to_the_end(self) -> LaunchOutcome:
        """The outcome. Should anything go wrong here, everything is killed first."""
        try:
            return self._until_end()
        except BaseException as error:
            self.fleet.abandon(self.timing)
            if self.stop.count:
                finish(self.run, LaunchOutcome("cancelled", INTERRUPTED, None, self.fleet.leftover))
            else:
                failure = complete(Failure("launcher", type(error).__name__, str(error)), self.fleet)
                finish(self.run, LaunchOutcome("failed", 1, failure, self.fleet.leftover))
            raise

    def _until_end(self) -> LaunchOutcome:
        if self.manner.start:
            self._start()
        self.fleet.follow()
        self.steps.touch()
        while self.requests.level < 3:
            self._look()
            if self.fleet.is_over(self.timing.sync_s):
                break
            self.fleet.beat(self.timing.beat_s)
            self._heed_requests()
            self._heed_losses()
            if self._completed_at is not None:
                self._heed_completion()
            elif not self.requests.level and self.failure is None and not self.fleet.is_at_limit:
                self._heed_signs()
                self._heed_hang()
            self.fleet.give_up(self.timing)
            self._show()
            self.clock.sleep(self.timing.poll_s)
        self._show()
        if self.requests.level >= 3:
            return LaunchOutcome("cancelled", INTERRUPTED, None, self.fleet.leftover)
        if self.fleet.unsynced:
            self.observer.note(f"the last lines of the logs of {', '.join(self.fleet.unsynced)} did not arrive")
        return judge(self.fleet, self.failure, cancelled=self.is_cancelled)

    @property
    def _stop_grace_s(self) -> float:
        """How long ranks may take to end when somebody asks them to: longer where they save what they have first."""
        checkpoint = self.plan.config.train.checkpoint
        return max(self.timing.stop_grace_s, checkpoint.stop_grace_s) if checkpoint.is_on else self.timing.stop_grace_s

    # --- the beginning -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin on all nodes. After a refusal, or a request to stop, those that did begin are asked to end."""
        for part in self.fleet.parts:
            part.is_absent = True
            part.link.start(node_spec(self.plan, part.node, lease_s=self.fleet.lease_s))
        try:
            self._await_starts()
        finally:
            for part in self.fleet.parts:  # left in a hurry: what was asked to begin may do so all the same
                if part.is_absent and part.status.refusal is None:
                    part.is_absent, part.was_alive = False, True
        if refusals := {part.name: part.status.refusal for part in self.fleet.parts if part.status.refusal}:
            self._after_refusal(refusals)

    def _await_starts(self) -> None:
        """Return once all have begun or refused, or somebody wants to leave at once."""
        parts = self.fleet.parts
        while self.requests.level < 3:
            waiting = [part for part in parts if part.is_absent]
            self._look()
            if self._request is not None:  # they were being started when the request came
                self.fleet.stop(*self._request, [part for part in waiting if not part.is_absent])
            if not any(part.is_absent and part.status.refusal is None for part in parts):
                break
            self.fleet.beat(self.timing.beat_s)
            self._heed_requests()
            self._show()
            self.clock.sleep(min(self.timing.poll_s, _START_POLL_S))

    def _after_refusal(self, refusals: Mapping[str, StartRefusedError]) -> None:
        if not self.requests.level:
            self._fail(start_failure(refusals), "start")
        for part in self.fleet.parts:
            if part.name in refusals and refusals[part.name].kind == "unreachable":
                part.link.stop("start", 0.0)
                part.is_absent, part.was_alive = False, True
                part.given_up = "it could not be reached while it was asked to start, and may have begun all the same"

    # --- every turn --------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return self.clock.monotonic()

    def _look(self) -> None:
        self.fleet.look()
        self.steps.poll()
        if not self._is_begun and self.fleet.is_begun:
            self._is_begun = True
            with contextlib.suppress(RunFolderError):
                self.run.record(nodes_started_at=utc_now())
        if follow_first_node(self.plan, self.run) == "completed" and self._completed_at is None:
            self._completed_at = self._now

    def _show(self) -> None:
        self.observer.nodes(self.fleet.statuses)
        self.observer.tick()

    def _heed_requests(self) -> None:
        """Pass on what somebody asks for. Who stops a run that is failing does not make it a cancelled one."""
        level = self.requests.level
        for request in self.requests.poll():
            grace_s = self._stop_grace_s if request.grace_s is None else request.grace_s
            if grace_s > 0:
                self.observer.stopping(request.cause, grace_s)
            else:
                self.observer.note(f"{request.cause}: killing what is left")
            self._request = (request.cause, grace_s)
            self.fleet.stop(request.cause, grace_s)
        if self.requests.level and not level:
            self.is_cancelled = self.trouble_at is None and self.failure is None

    def _heed_losses(self) -> None:
        """Nodes that cannot be heard, or whose supervisor is gone without a word, end the run."""
        lost_s = self.timing.lost_s if self.timing.lost_s is not None else self.plan.config.cluster.lease_s / 2
        if self._now > self._turn_at + lost_s / 2:  # stopped, or starved: it was not the nodes that were silent
            self._hears_from = self._now + _CATCH_UP_S
        self._turn_at = self._now
        if self._now < self._hears_from:
            return
        # Ranks wait for each other: if one advances, all live. And who hears of no node of a run that needs no
        # launcher is likelier cut off itself; nodes then come back one after the other.
        if self.fleet.is_mute and self.fleet.lease_s is None:
            self._cut_off_until = self._now + lost_s
        if self.steps.silence_s <= lost_s or self._now < self._cut_off_until:
            lost_s = max(lost_s, KILL_S)
        lines = self.fleet.find_lost(lost_s)
        if lines and self._completed_at is None:
            self._note_trouble(lines[0])
            self._stop_rest("node lost", {})

    def _heed_completion(self) -> None:
        """Ranks that go on although training is complete are stopped in the end."""
        assert self._completed_at is not None
        if self._now > self._completed_at + self.timing.finish_s:
            self._stop_rest("completed", {})

    def _heed_signs(self) -> None:
        """A failure: first let every node see what it sees, then stop those that see nothing, then kill the rest."""
        signs = self.signs.strong(self.fleet.parts)
        if not signs and self.trouble_at is None:
            signs = self._early_ends()
        if signs and self.trouble_at is None:
            name, text = next(iter(signs.items()))
            self._note_trouble(f"{name}: {text}")
        if self.trouble_at is None:
            return
        if self._now >= self.trouble_at + self.timing.evidence_s:
            self._stop_rest("failure", signs)
        if self._now >= self.trouble_at + self.timing.failure_grace_s:
            self.fleet.stop("failure", 0.0)  # no SIGTERM before: torchrun is on its way to say which rank failed first

    def _early_ends(self) -> dict[str, str]:
        """Ranks that ended well although training is not complete, after time for the news that it is."""
        weak = self.signs.weak(self.fleet.parts)
        if not weak:
            self._early_at = None
            return {}
        if self._early_at is None:
            self._early_at = self._now
        is_last = self.steps.step >= self.plan.config.train.steps
        patience_s = self.timing.early_exit_s if is_last else self.timing.vanish_s
        return weak if self._now > self._early_at + patience_s else {}

    def _heed_hang(self) -> None:
        failure = self.hang.poll(self.fleet.statuses, self.timing) if self.trouble_at is None else None
        if failure is not None:
            self._fail(failure, "hang")

    # --- stopping ----------------------------------------------------------------------------------------------------

    def _fail(self, failure: Failure, cause: str) -> None:
        """The run is over for a reason that was found here: kill it everywhere."""
        self.failure = failure
        self._note_trouble(failure.message)
        self.fleet.stop(cause, 0.0)

    def _note_trouble(self, text: str) -> None:
        if self.trouble_at is None:
            self.trouble_at = self._now
            self.observer.note(f"{text}; stopping the run")

    def _stop_rest(self, cause: str, signs: Mapping[str, str]) -> None:
        """Stop the nodes that show no sign of a failure of their own."""
        rest = [part for part in self.fleet.parts if part.name not in signs and part.order is None]
        self.fleet.stop(cause, self.timing.failure_grace_s, rest)


def start_failure(refusals: Mapping[str, StartRefusedError]) -> Failure:
    """Why a run did not begin, from the nodes that refused; the first by name is named, the others are listed."""
    (first, error), *others = sorted(refusals.items())
    details = tuple(str(other) for _, other in others[:_SHOWN])
    if len(others) > _SHOWN:
        details = (*details, f"and {len(others) - _SHOWN} more")
    return Failure("start", error.kind, str(error), host=first, details=details)


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
