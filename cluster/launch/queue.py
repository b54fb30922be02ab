"""Waiting for a scheduler: from a job that was submitted to nodes, or to the end of a run that got none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.control.attempt import finish
from cluster.control.link import NodeLink
from cluster.control.outcome import INTERRUPTED, LaunchObserver, LaunchOutcome, Leftover, StopRequests, read_cancel
from cluster.failure import Failure
from cluster.plan import LaunchPlan
from engine.runs.folder import RunFolder

Granted = tuple[LaunchPlan, Sequence[NodeLink]]
_TURN_S = 0.1
_CANCEL_S = 15.0


class QueuedJob(Protocol):
    """A job that waits for nodes. No call waits for the scheduler."""

    def granted(self) -> Granted | None:
        """The plan with the nodes that the job got, and links to them; None while it waits."""

    def refusal(self) -> Failure | None:
        """Why the job will never have nodes."""

    def waits_for(self) -> str:
        """What happens now, in words."""

    def cancel(self) -> None:
        """Have the scheduler end the job."""

    def has_ended(self) -> bool:
        """Whether the scheduler says so."""

    def leftover(self) -> str:
        """What to type where the job does not end."""

    def close(self) -> None:
        """Ask no more."""


def await_granted(
    job: QueuedJob, run: RunFolder, observer: LaunchObserver, stop: StopRequests
) -> Granted | LaunchOutcome:
    """The plan with the nodes that `job` got; or the outcome of a run that got none.

    The caller holds the lock of the run, whose state is starting. A request to stop cancels the job. Whatever happens
    here, no job is left in the queue.
    """
    told = ""
    try:
        while True:
            if (granted := job.granted()) is not None:
                run.append_event("phase", phase="starting the ranks")
                return granted
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
            time.sleep(_TURN_S)
    except BaseException as error:
        job.cancel()
        _wait(job.has_ended, lambda: None)
        finish(run, LaunchOutcome("failed", 1, Failure("launcher", type(error).__name__, str(error))))
        raise


def _cancelled(job: QueuedJob, observer: LaunchObserver, stop: StopRequests) -> LaunchOutcome:
    job.cancel()
    _wait(lambda: job.has_ended() or stop.count >= 3, observer.tick)
    left = () if job.has_ended() else (Leftover("the scheduler", (), job.leftover()),)
    job.close()
    return LaunchOutcome("cancelled", INTERRUPTED, None, left)


def _wait(is_over: Callable[[], bool], tick: Callable[[], None]) -> None:
    deadline = time.monotonic() + _CANCEL_S
    while not is_over() and time.monotonic() < deadline:
        tick()
        time.sleep(_TURN_S)
