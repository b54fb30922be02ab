"""`NodeLink` for a node of a Slurm job: its files lie in the run folder, which all share; its life is also Slurm's.

A node can go without a word (power, time limit, scancel): then what Slurm says of the job is the answer.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cluster.agent.messages import Spec
from cluster.control.link import TIME_LIMIT, NodeStatus, StartRefusedError
from cluster.launch.local import LocalLink
from cluster.slurm.job import SlurmJob
from cluster.slurm.plan import look_again, node_folder
from engine.runs.folder import RunFolder

_START_S = 60.0
_SETTLE_S = 3.0  # between the end of the job and the last files of its nodes
# Of a supervisor that Slurm killed before it could say so.
_CANCELLED: Mapping[str, Any] = {"cause": "stop", "stop_cause": "scancel"}
_AT_LIMIT: Mapping[str, Any] = {"cause": "stop", "stop_cause": TIME_LIMIT}
_SIGNALS = frozenset(number.name for number in signal.Signals)


class SlurmLink(LocalLink):
    """One node of `run`. job: None: none was ever submitted."""

    def __init__(self, run: RunFolder, node: str, job: SlurmJob | None) -> None:
        super().__init__(run.path, node)
        self._run, self._job = run, job
        self._news: Any = None
        self._heard_at = time.monotonic()
        self._is_at_limit = self._is_begun = False
        self._due: float | None = None  # of a start
        self._refusal: StartRefusedError | None = None

    def start(self, spec: Spec) -> None:
        """Wait for the supervisor, which the job starts."""
        self._due = time.monotonic() + _START_S

    def follow(self) -> None:
        """Begin to ask Slurm."""
        if self._job is not None:
            self._job.watch()

    def poll(self) -> NodeStatus:
        """What the files say now, and what Slurm says where they are silent; what became of a start and of a sweep."""
        if self._due is not None and not self._is_begun and self._refusal is None:
            self._begin(self._read())
        status = self._look()
        is_swept = self._job is None or self._job.ended_s is not None
        return replace(status, is_begun=self._is_begun, refusal=self._refusal, swept=() if is_swept else None)

    def _begin(self, seen: NodeStatus) -> None:
        """Note whether the supervisor has begun, or cannot own the run."""
        outcome = seen.outcome or {}
        if outcome.get("cause") == "start_failed":
            self._refusal = StartRefusedError(self.node, "command", str(outcome.get("error")))
        elif seen.phase != "none":
            self._is_begun = True
        elif self._job is not None and (self._job.ended_s or 0.0) > _SETTLE_S:
            self._refusal = StartRefusedError(self.node, "command", self._job.describe_end())
        elif time.monotonic() > (self._due or 0.0):
            text = f"no supervisor began there within {_START_S:g} s"
            self._refusal = StartRefusedError(self.node, "unreachable", text)

    def _look(self) -> NodeStatus:
        seen, job = self._read(), self._job
        supervisor, outcome = seen.supervisor, seen.outcome
        news = (supervisor.get("updated_at"), (seen.health or {}).get("at"), outcome is not None)
        if news != self._news:
            self._news, self._heard_at = news, time.monotonic()
        has_job_ended = job is None or (job.ended_s or 0.0) > _SETTLE_S
        heard_s = 0.0 if outcome is not None else time.monotonic() - self._heard_at
        status = replace(seen, heard_s=heard_s, failure=None if job is None else job.failure())
        self._is_at_limit = self._is_at_limit or supervisor.get("stop_cause") == TIME_LIMIT
        if job is not None and job.is_begun_again:
            return replace(status, phase="ended", heard_s=0.0, is_synced=True, outcome=_AT_LIMIT)
        if self._is_at_limit and job is not None and job.ended_s is None:
            # Its files may be put aside meanwhile; what comes of it is for the job to say.
            stopping = {**supervisor, "stop_cause": TIME_LIMIT}
            return replace(status, phase="stopping", heard_s=0.0, is_synced=False, outcome=None, supervisor=stopping)
        if outcome is not None:
            return self._explained(status, outcome)
        if has_job_ended and job is not None and job.status is not None and job.status.state == "CANCELLED":
            return replace(status, phase="ended", heard_s=0.0, is_synced=True, outcome=_CANCELLED)
        if has_job_ended:
            why = "it was never given to Slurm" if job is None else job.describe_end()
            return replace(status, phase="lost", heard_s=0.0, problem=why)
        if status.phase == "none" and job is not None and (job.status is None or job.status.phase == "pending"):
            return replace(status, phase="starting", heard_s=0.0, problem=job.problem)
        return status

    def beat(self) -> None:
        """Nothing: a job does not end with its launcher."""

    def stop(self, cause: str, grace_s: float) -> None:
        """Ask the supervisor for the end; where it does not come, have Slurm end the job."""
        super().stop(cause, grace_s)
        if self._job is not None:
            self._job.stop_later(grace_s)

    def sweep(self) -> None:
        """Have Slurm end the whole job, which ends every process of it."""
        if self._job is not None:
            self._job.cancel()

    def close(self) -> None:
        """Ask no more."""
        if self._job is not None:
            self._job.close()

    def _explained(self, status: NodeStatus, outcome: Mapping[str, Any]) -> NodeStatus:
        """An end by a signal that we did not send was Slurm's doing; why it did so shows once the job is over."""
        if outcome.get("cause") != "stop" or outcome.get("stop_cause") not in _SIGNALS or self._job is None:
            return status
        job = self._job.status
        if job is None or job.phase != "ended":
            return replace(status, is_synced=False)
        # After a failure srun stops the peers of the node that failed.
        cause = "scancel" if job.state == "CANCELLED" and not self._job.is_cancelled_here else "failure"
        return replace(status, outcome={**outcome, "stop_cause": cause})

    def _read(self) -> NodeStatus:
        look_again(node_folder(self._run, self.node))
        return self._ask()
