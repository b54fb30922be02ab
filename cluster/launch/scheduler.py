"""What Slurm and Kubernetes have in common: a client program that may fail, a job that a thread asks about, and waiting
for the nodes of that job, or for the end of a run that got none."""

from __future__ import annotations

import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from cluster.control.attempt import StopRequests, finish, read_cancel
from cluster.control.link import INTERRUPTED, LaunchObserver, LaunchOutcome, Leftover, NodeLink
from cluster.control.runner import Runner, runner_of
from cluster.errors import ClusterError
from cluster.failure import Failure
from cluster.plan import LaunchPlan, NodePlan
from engine.runs.folder import RunFolder

_POLL_S = 0.1
_CANCEL_S = 15.0


class SchedulerError(ClusterError):
    """A command of a scheduler failed. kind: missing, silent, refused, or what else the scheduler may lack."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        self.exit_code = 1 if kind == "refused" else 3
        super().__init__(text)


def run_client(
    words: Sequence[str],
    package: str,
    *,
    timeout_s: float,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """What came of a client program, which `package` has. Raises SchedulerError when it cannot be run, or is silent."""
    try:
        return subprocess.run(
            words,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise SchedulerError("missing", f"{words[0]} not found: install {package}, or put it on PATH") from error
    except OSError as error:
        raise SchedulerError("missing", f"{words[0]} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerError("silent", f"{words[0]} got no answer in {timeout_s:g} s") from error


class WatchedJob(ABC):
    """The job of one attempt of `run`, asked about by a thread, because the commands take seconds. No call but `begin`
    and `look` waits.

    Several links share it. name: by which it can be found. error: how a failure of the scheduler is called. problem:
    why it cannot be asked now.
    """

    error: str

    def __init__(self, run: RunFolder, poll_s: float) -> None:
        self.run, self.name, self._poll_s = run, f"burst-{run.run_id}", poll_s
        self.problem: str | None = None
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._end_at: float | None = None  # when the scheduler is to end the job

    @property
    def title(self) -> str:
        """What people call it."""
        return self.name

    @property
    @abstractmethod
    def end_command(self) -> str:
        """What to type where the job does not end."""

    @abstractmethod
    def begin(self, *, start: bool) -> None:
        """Submit the job; without `start` it is one that was submitted before. Raises ClusterError."""

    @abstractmethod
    def look(self) -> bool:
        """Do what is due, and ask; whether there is more to be asked. The thread calls it again and again."""

    @abstractmethod
    def granted(self, plan: LaunchPlan) -> LaunchPlan | None:
        """`plan` with the nodes that the job got; None while it waits."""

    @abstractmethod
    def link(self, node: NodePlan) -> NodeLink:
        """To a node that it got."""

    @abstractmethod
    def refusal(self) -> Failure | None:
        """Why the job will never have nodes."""

    @abstractmethod
    def waits_for(self) -> str:
        """What happens now, in words."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the scheduler says so."""

    def cancel(self) -> None:
        """Have the scheduler end the job."""
        self.end_after(0.0)

    def watch(self) -> None:
        """Begin to ask, if that has not begun."""
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                self._thread.start()

    def end_after(self, seconds: float) -> None:
        """Have the scheduler end the job, after so many seconds; a later request may only bring that forward."""
        with self._lock:
            at = time.monotonic() + seconds
            self._end_at = at if self._end_at is None else min(self._end_at, at)
        self._wake.set()
        self.watch()

    def close(self) -> None:
        """Ask no more. The job goes on."""
        self._is_closed = True
        self._wake.set()

    def _is_end_due(self, again_s: float) -> bool:
        """Whether the scheduler is to be told now; once more after `again_s`, should it have missed it."""
        now = time.monotonic()
        if self._end_at is None or now < self._end_at:
            return False
        self._end_at = now + again_s
        return True

    def _serve(self) -> None:
        while not self._is_closed and self.look():
            left = self._poll_s if self._end_at is None else min(self._poll_s, self._end_at - time.monotonic())
            self._wake.wait(max(0.05, left))
            self._wake.clear()


class QueuedRunner(Runner):
    """A launcher whose nodes come with a job."""

    is_queued = True

    @abstractmethod
    def job(self, plan: LaunchPlan, run: RunFolder) -> WatchedJob:
        """That of the run's present attempt, or of one to come; nothing is asked yet."""

    def await_nodes(
        self, plan: LaunchPlan, run: RunFolder, observer: LaunchObserver, stop: StopRequests, *, start: bool
    ) -> tuple[LaunchPlan, Sequence[NodeLink]] | LaunchOutcome:
        """The plan with the nodes that a job got; or the outcome of a run that got none.

        The caller holds the lock of the run, whose state is starting. A request to stop cancels the job. Whatever
        happens here, no job is left in the queue.
        """
        job = self.job(plan, run)
        try:
            job.begin(start=start)
        except SchedulerError as error:
            failure = Failure("start", job.error, str(error), exit_code=error.exit_code)
            return LaunchOutcome("failed", error.exit_code, failure)
        job.watch()
        return _await_granted(job, plan, observer, stop)


def open_links(plan: LaunchPlan, run: RunFolder) -> list[NodeLink]:
    """See `cluster.control.runner.open_links`."""
    runner = cast(QueuedRunner, runner_of(plan))
    return list(map(runner.job(plan, run).link, plan.nodes))


def _await_granted(
    job: WatchedJob, plan: LaunchPlan, observer: LaunchObserver, stop: StopRequests
) -> tuple[LaunchPlan, Sequence[NodeLink]] | LaunchOutcome:
    run, told = job.run, ""
    try:
        while True:
            if (granted := job.granted(plan)) is not None:
                observer.note(f"{job.title} runs on {', '.join(node.name for node in granted.nodes)}")
                run.append_event("phase", phase="starting the ranks")
                return granted, list(map(job.link, granted.nodes))
            cancel = read_cancel(run)
            if stop.count or cancel is not None:
                observer.stopping(stop.cause or (cancel.cause if cancel is not None else ""), 0.0)
                return _cancelled(job, observer, stop)
            if (refusal := job.refusal()) is not None:
                job.close()
                return LaunchOutcome("failed", refusal.exit_code, refusal)
            # Each reason once: phases are shown by whoever looks at the run.
            if (text := job.waits_for()) != told:
                told = text
                run.append_event("phase", phase=text)
            observer.tick()
            time.sleep(_POLL_S)
    except BaseException as error:
        job.cancel()
        _wait(job.has_ended)
        finish(run, LaunchOutcome("failed", 1, Failure("launcher", type(error).__name__, str(error))))
        raise


def _cancelled(job: WatchedJob, observer: LaunchObserver, stop: StopRequests) -> LaunchOutcome:
    job.cancel()
    _wait(lambda: job.has_ended() or stop.count >= 3, observer.tick)
    text = f"{job.title} has not ended ({job.problem or 'no answer'}); `{job.end_command}`"
    left = () if job.has_ended() else (Leftover("the scheduler", (), text),)
    job.close()
    return LaunchOutcome("cancelled", INTERRUPTED, None, left)


def _wait(is_over: Callable[[], bool], tick: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + _CANCEL_S
    while not is_over() and time.monotonic() < deadline:
        tick()
        time.sleep(_POLL_S)
