"""From a plan to nodes: the job is submitted, waits its turn, and its nodes say who they are."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.control.attempt import finish
from cluster.control.link import NodeLink
from cluster.control.outcome import INTERRUPTED, LaunchObserver, LaunchOutcome, Leftover
from cluster.control.stopping import StopRequests, read_cancel
from cluster.failure import Failure
from cluster.plan import LaunchPlan
from cluster.plan_record import write_launch_plan
from cluster.slurm.client import SlurmError
from cluster.slurm.granted import granted_plan, log_starts
from cluster.slurm.job import SlurmJob, find_job
from cluster.slurm.link import SlurmLink
from cluster.slurm.submit import submit_job
from engine.runs.folder import RunFolder

_TURN_S = 0.1
_SETTLE_S = 3.0  # between the end of a job and the last files of its nodes
_CANCEL_S = 15.0
_SILENT_S = 120.0


def await_nodes(
    plan: LaunchPlan, run: RunFolder, observer: LaunchObserver, stop: StopRequests, *, start: bool
) -> tuple[LaunchPlan, list[NodeLink]] | LaunchOutcome:
    """The plan with the nodes that Slurm gave, and links to them; or the outcome of a run that got none.

    start: submit a new job; else go on with the one of the run. The caller holds the lock of the run, whose state is
    starting. A request to stop cancels the job. Whatever happens here, no job is left in the queue.
    """
    try:
        job = submit_job(run, plan.config.cluster.slurm) if start else find_job(run)
    except SlurmError as error:
        return LaunchOutcome("failed", error.exit_code, _failure(str(error), error.exit_code))
    if job is None:
        return LaunchOutcome("failed", 1, _failure("the run was never given to Slurm"))
    try:
        run.record(job=job.job_id)
        return _Waiting(plan, run, job.watch(), observer, stop).until_granted()
    except BaseException as error:
        job.cancel()
        job.wait_ended(_CANCEL_S)
        finish(run, LaunchOutcome("failed", 1, Failure("launcher", type(error).__name__, str(error))))
        raise


class _Waiting:
    """One job, from its submission to its nodes."""

    def __init__(
        self, plan: LaunchPlan, run: RunFolder, job: SlurmJob, observer: LaunchObserver, stop: StopRequests
    ) -> None:
        self.plan, self.run, self.job, self.observer, self.stop = plan, run, job, observer, stop
        self._told = ""
        self._running_at: float | None = None

    def until_granted(self) -> tuple[LaunchPlan, list[NodeLink]] | LaunchOutcome:
        """See `await_nodes`."""
        while True:
            if self.job.is_begun_again:
                self.job = self.job.again().watch()
            token = self.job.record.token
            granted = granted_plan(self.plan, self.run, token)
            if granted is not None:
                return self._begin(granted, token), [SlurmLink(self.run, node.name, self.job) for node in granted.nodes]
            cancel = read_cancel(self.run)
            if self.stop.count or cancel is not None:
                return self._cancel(self.stop.cause or (cancel.cause if cancel is not None else ""))
            if (self.job.ended_s or 0.0) > _SETTLE_S:
                self.job.close()
                return LaunchOutcome("failed", 1, self.job.failure() or _failure(self.job.describe_end(), log=self.job))
            self._tell()
            self.observer.tick()
            time.sleep(_TURN_S)

    def _begin(self, granted: LaunchPlan, token: str) -> LaunchPlan:
        """Write down which nodes these are."""
        write_launch_plan(granted, self.run)
        names = [node.name for node in granted.nodes]
        self.run.record(nodes=names, log_starts=log_starts(self.run, token))
        self.run.append_event("phase", phase="starting the ranks")
        self.observer.note(f"Slurm job {self.job.job_id} runs on {', '.join(names)}")
        return granted

    def _cancel(self, cause: str) -> LaunchOutcome:
        self.observer.stopping(cause, 0.0)
        self.job.cancel()
        self._wait(lambda: self.job.ended_s is not None or self.stop.count >= 3, _CANCEL_S)
        has_ended = self.job.ended_s is not None
        self.job.close()
        job_id = self.job.job_id
        left = f"Slurm job {job_id} has not ended ({self.job.problem or 'no answer'}); `scancel {job_id}`"
        return LaunchOutcome("cancelled", INTERRUPTED, None, () if has_ended else (Leftover("Slurm", (), left),))

    def _wait(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_over() and time.monotonic() < deadline:
            self.observer.tick()
            time.sleep(_TURN_S)

    def _tell(self) -> None:
        """Record what the job waits for, each reason once: phases are shown by whoever looks at the run."""
        status, job_id = self.job.status, self.job.job_id
        if self.job.problem is not None:
            text = f"Slurm job {job_id}: {self.job.problem}"
        elif self.job.record.mode == "batch" and (status is None or status.phase == "pending"):
            text = f"Slurm job {job_id} waits for {'its turn' if status is None else status.waits_for}"
        else:
            self._running_at = self._running_at or time.monotonic()
            is_late = time.monotonic() > self._running_at + _SILENT_S
            text = f"Slurm job {job_id} runs; its nodes prepare" + (
                f", for long: see {self.job.log}" if is_late else ""
            )
        if text != self._told:
            self._told = text
            self.run.append_event("phase", phase=text)


def _failure(text: str, exit_code: int = 1, log: SlurmJob | None = None) -> Failure:
    return Failure("start", "SlurmError", text, exit_code=exit_code, log=None if log is None else str(log.log))
