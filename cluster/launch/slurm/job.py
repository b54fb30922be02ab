"""The job of a run: submitted once, then watched by a thread, because Slurm's commands may take seconds to answer.

`SlurmLink` is `NodeLink` for one of its nodes: the files lie in the run folder, which all share, and its life is also
Slurm's. A node can go without a word (power, time limit, scancel): then what Slurm says of the job is the answer.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.agent.messages import Spec
from cluster.control.attempt import tail_text
from cluster.control.link import TIME_LIMIT, NodeStatus, StartRefusedError
from cluster.failure import Failure
from cluster.launch.local import LocalLink
from cluster.launch.scheduler import SchedulerError, WatchedJob
from cluster.launch.slurm.client import AGAIN, UNKNOWN_JOB, JobStatus, SlurmClient, client_environment, describe_end
from cluster.launch.slurm.plan import granted_plan, look_again, node_folder
from cluster.launch.slurm.sbatch import LOG_PREFIX, NOT_SHARED, RESTART_VARIABLE, SCRIPT_FILE, TOKEN_FILE
from cluster.plan import LaunchPlan, NodePlan, write_plan_files
from cluster.remote_text import one_line
from engine.config.cluster import SlurmConfig
from engine.runs.files import replace_file
from engine.runs.folder import RunFolder

_STEP = "step-"  # how the token of a step begins
_TASK_ERROR = re.compile(r"srun: error: \S+: task")
_OUTSIDE = ("TIMEOUT", "PREEMPTED", "DEADLINE", "BOOT_FAIL", "NODE_FAIL", AGAIN)  # ends that Slurm brings about
_FINAL_WAIT_S = 3.0  # between the end of a job and the last files of its nodes
_SILENT_S = 120.0
_START_S = 60.0
_CANCEL_MARGIN_S = 10.0  # beyond the grace that supervisors were given to end by themselves
_SHARED = "runs of Slurm need a run folder that all nodes share; set --runs-dir or BURST_RUNS_DIR to such storage"
_SAVED = (
    "came near its time limit, so its ranks saved and stopped: `burst resume` goes on from there, and with "
    "cluster.max_restarts burst does so by itself"
)


class SlurmJob(WatchedJob):
    """One attempt of a run as Slurm knows it: a job of its own or, where SLURM_JOB_ID is set, a step of that
    allocation, which stays when the run ends.

    token: of the attempt; it says which of the two it is. job_id: None until Slurm has told it. status: what Slurm said
    last; None before its first answer. is_cancelled_here: it was this process that had Slurm end the job. is_led: this
    process leads the run, and does not only look.
    """

    error = "SlurmError"

    def __init__(
        self,
        run: RunFolder,
        token: str = "",
        job_id: str | None = None,
        settings: SlurmConfig | None = None,
        environment: Mapping[str, str] = os.environ,
        poll_s: float = 2.0,
    ) -> None:
        super().__init__(run, poll_s)
        self.token, self.job_id, self._environment = token, job_id, environment
        self._client = SlurmClient(client_environment(environment, settings))
        self.status: JobStatus | None = None
        self.is_cancelled_here = self.is_led = False
        self._step_until = 0.0  # a step that was just asked for may begin until then
        self._running_at: float | None = None
        self._ended_at: float | None = None
        self._lost: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"Slurm job {self.job_id or '?'}"

    @property
    def log(self) -> Path:
        """What the batch script and srun said."""
        return self.run.path / f"{LOG_PREFIX}{self.job_id}.log"

    @property
    def end_command(self) -> str:
        return f"scancel {self.job_id or ''}"

    @property
    def is_over(self) -> bool:
        """Whether it ended, and for so long that the last files of its nodes are there."""
        return self._ended_at is not None and time.monotonic() > self._ended_at + _FINAL_WAIT_S

    # --- submitting -----------------------------------------------------------------------------------------------

    def begin(self, *, start: bool) -> None:
        """Submit the batch file that lies in the run folder."""
        if not start:
            return
        allocation = self._environment.get("SLURM_JOB_ID")
        self.token = f"{_STEP if allocation else ''}{secrets.token_hex(8)}"
        try:
            # By this file nodes know that they see the run folder, and which attempt is meant.
            replace_file(self.run.path / TOKEN_FILE, f"{self.token}\n")
        except OSError as error:
            text = f"{error.filename or self.run.path}: {error.strerror}; the job's token cannot be written"
            raise SchedulerError("refused", text) from error
        self.job_id = allocation or self._client.submit(self.run.path / SCRIPT_FILE, self.token)
        self.run.record(job=self.job_id)
        if allocation:
            self._start_step()

    def _start_step(self) -> None:
        """Run the batch file in a session of its own, which outlives this process."""
        inherited = {name: value for name, value in self._environment.items() if name.startswith("SLURM_")}
        inherited.pop(RESTART_VARIABLE, None)  # that of the allocation says nothing of the run
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                ("bash", self.run.path / SCRIPT_FILE, self.token),
                cwd="/",
                # Beside whatever step this shell is: only so srun may use the same CPUs and GPUs.
                env={**client_environment(self._environment), **inherited, "SLURM_OVERLAP": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        threading.Thread(target=process.wait, daemon=True).start()  # so that it does not stay a zombie
        self._step_until = time.monotonic() + _START_S

    def link(self, node: NodePlan) -> SlurmLink:
        return SlurmLink(self, node.name)

    # --- while it waits: see `WatchedJob` -------------------------------------------------------------------------

    def granted(self, plan: LaunchPlan) -> LaunchPlan | None:
        """Once all nodes have written themselves down."""
        found = granted_plan(plan, self.run, self.token)
        if found is not None:
            write_plan_files(found, self.run)
            self.run.record(nodes=[node.name for node in found.nodes], job=self.job_id)
        return found

    def refusal(self) -> Failure | None:
        """The job has ended before."""
        if not self.is_over:
            return None
        return self.failure() or Failure("start", self.error, self.describe_end(), log=str(self.log))

    def has_ended(self) -> bool:
        return self._ended_at is not None

    def waits_for(self) -> str:
        """What Slurm says that the job waits for; then what its nodes do."""
        if self.problem is not None:
            return f"{self.title}: {self.problem}"
        if not self._is_step and (self.status is None or self.status.phase == "pending"):
            return f"{self.title} waits for {'its turn' if self.status is None else self.status.waits_for}"
        self._running_at = self._running_at or time.monotonic()
        is_late = time.monotonic() > self._running_at + _SILENT_S
        return f"{self.title} runs; its nodes prepare" + (f", for long: see {self.log}" if is_late else "")

    # --- its end --------------------------------------------------------------------------------------------------

    def failure(self) -> Failure | None:
        """Why Slurm itself ended the run; None when the run ended by itself, on request, or is not over."""
        state = "" if self.status is None else self.status.state
        if state not in _OUTSIDE:
            return None
        kind, host = ("node_lost", next(iter(self._lost), None)) if state == "NODE_FAIL" else ("launcher", None)
        return Failure(kind, f"Slurm: {state}", self.describe_end(), host=host, log=str(self.log))  # type: ignore[arg-type]

    def describe_end(self) -> str:
        """Why the job ended, in words, with the last of what srun said where that helps."""
        status = self.status or JobStatus(UNKNOWN_JOB)
        if status.state == UNKNOWN_JOB and status.reason:
            return status.reason
        text = describe_end(status, self._lost)
        if status.signal == 53:  # Slurm's code for "cannot open the job's output"
            text = f"could not write into the run folder: {_SHARED}"
        elif status.exit_code == NOT_SHARED:
            text = f"has a node that does not see the run folder: {_SHARED}"
        elif status.state == "FAILED" and (said := self._last_words()):
            text += f": {said}"
        return f"{self.title} {text}"

    def _last_words(self) -> str:
        """What burst said last in the job's log, else what srun complained of first, else its last line."""
        lines = [line for line in tail_text(self.log, 8192).splitlines() if line.strip()]
        own = [line[line.index("burst: ") :] for line in lines if "burst: " in line]
        tasks = [line for line in lines if _TASK_ERROR.search(line)]
        return one_line((own[-1:] or tasks[:1] or lines[-1:] or [""])[0], 300)

    def close(self) -> None:
        """Ask no more. The job goes on, unless Slurm would run it again: who leads the run says what comes next."""
        is_again = self.status is not None and self.status.state == AGAIN
        if is_again and self.is_led and self.job_id is not None and not self._is_closed:
            with contextlib.suppress(SchedulerError):
                self._client.cancel(self.job_id)
        super().close()

    # --- asking ---------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        if self.has_ended():  # it is known how; Slurm forgets after some minutes
            return False
        try:
            # A launcher that was killed while it submitted could not write the number down; the name finds it.
            self.job_id = self.job_id or (self._client.find(self.name) if self.token else None)
            if self._is_end_due(_CANCEL_MARGIN_S):
                self.is_cancelled_here = True
                for job_or_step in self._jobs_or_steps():
                    self._client.cancel(job_or_step)
            status = self._ask()
            if status.state == "NODE_FAIL":
                self._lost = self._client.lost_nodes(status.node_list)
            self.problem = None
        except SchedulerError as error:
            self.problem = str(error)
            return True
        self.status = status
        if status.phase == "ended":
            self._ended_at = time.monotonic()
        return not self.has_ended()

    def _jobs_or_steps(self) -> tuple[str, ...]:
        """What to end."""
        if self.job_id is None:
            return ()
        return self._client.steps(self.job_id, self.name) if self._is_step else (self.job_id,)

    def _ask(self) -> JobStatus:
        if self.job_id is None:
            return JobStatus(UNKNOWN_JOB, "the run was never given to Slurm")
        status = self._client.query(self.job_id)
        if not self._is_step:
            return replace(status, state=AGAIN) if status.restarts else status  # every attempt is a job of its own
        # How srun does within an allocation: it has a step there, or has none yet, or none any more.
        if status.phase != "ended" and self._jobs_or_steps():
            self._step_until = 0.0
        elif status.phase != "ended" and time.monotonic() >= self._step_until:
            return replace(status, state="FAILED", reason="its step is over", exit_code=None)
        return status

    @property
    def _is_step(self) -> bool:
        return self.token.startswith(_STEP)


# Of a supervisor that Slurm killed before it could say so.
_CANCELLED: Mapping[str, Any] = {"cause": "stop", "stop_cause": "scancel"}
_SIGNALS = frozenset(number.name for number in signal.Signals)


class SlurmLink(LocalLink):
    """One node of the run of `job`."""

    def __init__(self, job: SlurmJob, node: str) -> None:
        super().__init__(job.run.path, node)
        self._job = job
        self._news: Any = None
        self._heard_at = time.monotonic()
        self._has_started = False
        self._due: float | None = None  # of a start
        self._refusal: StartRefusedError | None = None

    def start(self, spec: Spec) -> None:
        """Wait for the supervisor, which the job starts."""
        self._due = time.monotonic() + _START_S

    def follow(self) -> None:
        """Begin to ask Slurm."""
        self._job.watch()

    def poll(self) -> NodeStatus:
        """What the files say now, and what Slurm says where they are silent; what became of a start and of a sweep."""
        look_again(node_folder(self._job.run, self.node))
        seen = self._ask()
        if self._due is not None and not self._has_started and self._refusal is None:
            self._handle_start(seen, self._due)
        swept = () if self._job.has_ended() else None
        return replace(self._explained(seen), has_started=self._has_started, refusal=self._refusal, swept=swept)

    def _handle_start(self, seen: NodeStatus, due: float) -> None:
        """Note whether the supervisor has begun, or cannot own the run."""
        outcome = seen.outcome or {}
        if outcome.get("cause") == "start_failed":
            self._refusal = StartRefusedError(self.node, "command", str(outcome.get("error")))
        elif seen.phase != "none":
            self._has_started = True
        elif self._job.is_over:
            self._refusal = StartRefusedError(self.node, "command", self._job.describe_end())
        elif time.monotonic() > due:
            text = f"no supervisor began there within {_START_S:g} s"
            self._refusal = StartRefusedError(self.node, "unreachable", text)

    def _explained(self, seen: NodeStatus) -> NodeStatus:
        job, outcome = self._job, seen.outcome
        news = (seen.supervisor.get("updated_at"), (seen.health or {}).get("at"), outcome is not None)
        if news != self._news:
            self._news, self._heard_at = news, time.monotonic()
        status = replace(seen, heard_s=0.0, failure=job.failure())
        if outcome is not None:
            return self._with_cause(status, outcome)
        if job.is_over and job.status is not None and job.status.state == "CANCELLED":
            return replace(status, phase="ended", is_synced=True, outcome=_CANCELLED)
        if job.is_over:
            return replace(status, phase="lost", problem=job.describe_end())
        if status.phase == "none" and (job.status is None or job.status.phase == "pending"):
            return replace(status, phase="starting", problem=job.problem)
        return replace(status, heard_s=time.monotonic() - self._heard_at)

    def _with_cause(self, status: NodeStatus, outcome: Mapping[str, Any]) -> NodeStatus:
        """An end by a signal that we did not send was Slurm's doing; why it did so shows once the job is over."""
        job = self._job
        if outcome.get("stop_cause") == TIME_LIMIT:
            return replace(status, failure=Failure("launcher", TIME_LIMIT, f"{job.title} {_SAVED}"))
        if outcome.get("cause") != "stop" or outcome.get("stop_cause") not in _SIGNALS:
            return status
        if job.status is None or not job.has_ended():
            return replace(status, is_synced=False)
        # After a failure srun stops the peers of the node that failed.
        cause = "scancel" if job.status.state == "CANCELLED" and not job.is_cancelled_here else "failure"
        return replace(status, outcome={**outcome, "stop_cause": cause})

    def beat(self) -> None:
        """Note that somebody leads the run; the job does not end with its launcher."""
        self._job.is_led = True

    def stop(self, cause: str, grace_s: float) -> None:
        """Ask the supervisor for the end; where it does not come, have Slurm end the job."""
        super().stop(cause, grace_s)
        self._job.end_after(grace_s + _CANCEL_MARGIN_S)

    def sweep(self) -> None:
        """Have Slurm end the whole job, which ends every process of it."""
        self._job.cancel()

    def close(self) -> None:
        """Ask no more."""
        self._job.close()
