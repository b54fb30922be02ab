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
from cluster.errors import ClusterError
from cluster.failure import Failure
from cluster.launch.local import LocalLink
from cluster.launch.scheduler import Granted, SchedulerError, WatchedJob
from cluster.plan import LaunchPlan, write_plan_files
from cluster.remote_text import one_line
from cluster.slurm.client import AGAIN, GONE, JobStatus, SlurmClient, client_environment, describe_end
from cluster.slurm.plan import granted_plan, look_again, node_folder, read_token
from cluster.slurm.sbatch import LOG_PREFIX, NOT_SHARED, RESTART_VARIABLE, SCRIPT_FILE, TOKEN_FILE
from cluster.values import word
from engine.config.cluster import SlurmConfig
from engine.runs.files import replace_file
from engine.runs.folder import RunFolder

_STEP = "step-"  # how the token of a step begins
_TASK_ERROR = re.compile(r"srun: error: \S+: task")
POLL_S = 2.0
SETTLE_S = 3.0  # between the end of a job and the last files of its nodes
_SILENT_S = 120.0
_CANCEL_MARGIN_S = 10.0  # beyond the grace that supervisors were given to end by themselves


class SlurmJob(WatchedJob):
    """One attempt of a run as Slurm knows it. Several links share it, each closes it once.

    token: of the attempt; it says whether that is a job of its own, or a step within the allocation `job_id`. job_id:
    None until Slurm has told it. status: what Slurm said last; None before its first answer. is_cancelled_here: it was
    this process that had Slurm end the job. is_led: this process leads the run, and does not only look. step_until: a
    step that was just asked for may begin until then.
    """

    def __init__(
        self,
        run: RunFolder,
        token: str,
        job_id: str | None,
        client: SlurmClient | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        super().__init__(f"burst-{run.run_id}", poll_s)
        self.run, self.token, self.job_id, self._client = run, token, job_id, client or SlurmClient()
        self.status: JobStatus | None = None
        self.is_cancelled_here = self.is_led = False
        self.step_until = 0.0
        self._running_at: float | None = None
        self._ended_at: float | None = None
        self._lost: tuple[str, ...] = ()

    @property
    def is_step(self) -> bool:
        """Whether it runs within an allocation, which stays when the run ends."""
        return self.token.startswith(_STEP)

    @property
    def title(self) -> str:
        return f"Slurm job {self.job_id or '?'}"

    @property
    def log(self) -> Path:
        """What the batch script and srun said."""
        return self.run.path / f"{LOG_PREFIX}{self.job_id}.log"

    @property
    def ended_s(self) -> float | None:
        """For how long it has been known that the job is over; None while it is not."""
        return None if self._ended_at is None else time.monotonic() - self._ended_at

    def describe_end(self) -> str:
        """Why the job ended, in words, with the last of what srun said where that helps."""
        status = self.status or JobStatus(GONE)
        if status.state == GONE and status.reason:
            return status.reason
        text = describe_end(status, self._lost)
        if status.signal == 53:  # Slurm's code for "cannot open the job's output"
            text = f"could not write into the run folder: {_SHARED}"
        elif status.exit_code == NOT_SHARED:
            text = f"has a node that does not see the run folder: {_SHARED}"
        elif status.state == "FAILED" and (said := self.last_words()):
            text += f": {said}"
        return f"{self.title} {text}"

    def last_words(self) -> str:
        """What burst said last in the job's log, else what srun complained of first, else its last line."""
        lines = [line for line in tail_text(self.log, 8192).splitlines() if line.strip()]
        own = [line[line.index("burst: ") :] for line in lines if "burst: " in line]
        tasks = [line for line in lines if _TASK_ERROR.search(line)]
        return one_line((own[-1:] or tasks[:1] or lines[-1:] or [""])[0], 300)

    def failure(self) -> Failure | None:
        """Why Slurm itself ended the run; None when the run ended by itself, on request, or is not over."""
        status = self.status
        if status is None:
            return None
        if status.state in ("TIMEOUT", "PREEMPTED", "DEADLINE", "BOOT_FAIL", AGAIN):
            return Failure("launcher", f"Slurm: {status.state}", self.describe_end(), log=str(self.log))
        if status.state == "NODE_FAIL":
            host = self._lost[0] if self._lost else None
            return Failure("node_lost", "Slurm: NODE_FAIL", self.describe_end(), host=host, log=str(self.log))
        return None

    # --- while it waits: see `WatchedJob` -------------------------------------------------------------------------

    def granted(self, plan: LaunchPlan) -> Granted | None:
        """Once all nodes have written themselves down."""
        found = granted_plan(plan, self.run, self.token)
        if found is None:
            return None
        write_plan_files(found, self.run)
        self.run.record(nodes=[node.name for node in found.nodes], job=self.job_id)
        return found, [SlurmLink(self.run, node.name, self) for node in found.nodes]

    def refusal(self) -> Failure | None:
        """The job has ended before."""
        if (self.ended_s or 0.0) <= SETTLE_S:
            return None
        return self.failure() or Failure("start", "SlurmError", self.describe_end(), log=str(self.log))

    def has_ended(self) -> bool:
        return self._ended_at is not None

    def leftover(self) -> str:
        return f"{self.title} has not ended ({self.problem or 'no answer'}); `scancel {self.job_id or ''}`"

    def waits_for(self) -> str:
        """What Slurm says that the job waits for; then what its nodes do."""
        if self.problem is not None:
            return f"{self.title}: {self.problem}"
        if not self.is_step and (self.status is None or self.status.phase == "pending"):
            return f"{self.title} waits for {'its turn' if self.status is None else self.status.waits_for}"
        self._running_at = self._running_at or time.monotonic()
        is_late = time.monotonic() > self._running_at + _SILENT_S
        return f"{self.title} runs; its nodes prepare" + (f", for long: see {self.log}" if is_late else "")

    def close(self) -> None:
        """Ask no more. The job goes on, unless Slurm would run it again: who leads the run says what comes next."""
        is_again = self.status is not None and self.status.state == AGAIN
        if is_again and self.is_led and self.job_id is not None and not self._is_closed:
            with contextlib.suppress(SchedulerError):
                self._client.cancel(self.job_id)
        super().close()

    # --- asking ---------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        if self._ended_at is not None:  # it is known how; Slurm forgets after some minutes
            return False
        try:
            if self._is_end_due(_CANCEL_MARGIN_S):
                self.is_cancelled_here = True
                for job_or_step in self._jobs_or_steps():
                    self._client.cancel(job_or_step)
            status = self._ask()
            if status.phase == "ended" and status.state == "NODE_FAIL":
                self._lost = self._client.lost_nodes(status.node_list)
            self.problem = None
        except SchedulerError as error:
            self.problem = str(error)
            return True
        self.status = status
        if status.phase == "ended":
            self._ended_at = time.monotonic()
        return self._ended_at is None

    def _ask(self) -> JobStatus:
        """A launcher that was killed while it submitted could not write the number down; the name finds it."""
        self.job_id = self.job_id or (self._client.find(self.name) if self.token else None)
        if self.job_id is None:
            return JobStatus(GONE, _NEVER)
        status = self._client.query(self.job_id)
        if self.is_step:
            return status if status.phase == "ended" else self._step_status(status, self.job_id)
        return replace(status, state=AGAIN) if status.restarts else status  # every attempt is a job of its own

    def _step_status(self, allocation: JobStatus, job_id: str) -> JobStatus:
        """How srun within an allocation does: it has a step there, or has none yet, or none any more."""
        if self._client.steps(job_id, self.name):
            self.step_until = 0.0
        elif time.monotonic() >= self.step_until:
            return replace(allocation, state="FAILED", reason="its step is over", exit_code=None)
        return allocation

    def _jobs_or_steps(self) -> tuple[str, ...]:
        """What to end."""
        job_id = self.job_id or self._client.find(self.name)
        if job_id is None:
            return ()
        return self._client.steps(job_id, self.name) if self.is_step else (job_id,)


_SHARED = "runs of Slurm need a run folder that all nodes share; set --runs-dir or BURST_RUNS_DIR to such storage"
_SAVED = (
    "came near its time limit, so its ranks saved and stopped: `burst resume` goes on from there, and with "
    "cluster.max_restarts burst does so by itself"
)
_NEVER = "the run was never given to Slurm"


def find_job(run: RunFolder) -> SlurmJob:
    """The job of the run's present attempt, also where its launcher did not live to submit it."""
    return SlurmJob(run, read_token(run.path) or "", word(run.read_state(), "job"))


def submit_job(run: RunFolder, settings: SlurmConfig, environment: Mapping[str, str] | None = None) -> SlurmJob:
    """The job of a new attempt of `run`, whose folder holds the batch file.

    A job of its own or, where SLURM_JOB_ID is set, a step of that allocation. Raises ClusterError.
    """
    environment = os.environ if environment is None else environment
    allocation, token = environment.get("SLURM_JOB_ID"), secrets.token_hex(8)
    token = f"{_STEP}{token}" if allocation else token
    try:
        # By this file nodes know that they see the run folder, and which attempt is meant.
        replace_file(run.path / TOKEN_FILE, f"{token}\n")
    except OSError as error:
        text = f"{error.filename or run.path}: {error.strerror}; the job's token cannot be written"
        raise ClusterError(text) from error
    client = SlurmClient(client_environment(environment, settings))
    job_id = allocation or client.submit(run.path / SCRIPT_FILE, token)
    run.record(job=job_id)
    job = SlurmJob(run, token, job_id, client)
    if allocation:
        _start_step(run.path, token, allocation, environment)
        job.step_until = time.monotonic() + _START_S
    return job


def _start_step(run_path: Path, token: str, allocation: str, environment: Mapping[str, str]) -> None:
    """Run the batch file in a session of its own, which outlives this process."""
    inherited = {name: value for name, value in environment.items() if name.startswith("SLURM_")}
    inherited.pop(RESTART_VARIABLE, None)  # that of the allocation says nothing of the run
    with (run_path / f"{LOG_PREFIX}{allocation}.log").open("ab") as log:
        process = subprocess.Popen(
            ("bash", run_path / SCRIPT_FILE, token),
            cwd="/",
            # Beside whatever step this shell is: only so srun may use the same CPUs and GPUs.
            env={**client_environment(environment), **inherited, "SLURM_OVERLAP": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    threading.Thread(target=process.wait, daemon=True).start()  # so that it does not stay a zombie


_START_S = 60.0
# Of a supervisor that Slurm killed before it could say so.
_CANCELLED: Mapping[str, Any] = {"cause": "stop", "stop_cause": "scancel"}
_SIGNALS = frozenset(number.name for number in signal.Signals)


class SlurmLink(LocalLink):
    """One node of `run`."""

    def __init__(self, run: RunFolder, node: str, job: SlurmJob) -> None:
        super().__init__(run.path, node)
        self._run, self._job = run, job
        self._news: Any = None
        self._heard_at = time.monotonic()
        self._is_begun = False
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
        if self._due is not None and not self._is_begun and self._refusal is None:
            self._begin(self._read())
        status = self._look()
        swept = () if self._job.has_ended() else None
        return replace(status, is_begun=self._is_begun, refusal=self._refusal, swept=swept)

    def _begin(self, seen: NodeStatus) -> None:
        """Note whether the supervisor has begun, or cannot own the run."""
        outcome = seen.outcome or {}
        if outcome.get("cause") == "start_failed":
            self._refusal = StartRefusedError(self.node, "command", str(outcome.get("error")))
        elif seen.phase != "none":
            self._is_begun = True
        elif (self._job.ended_s or 0.0) > SETTLE_S:
            self._refusal = StartRefusedError(self.node, "command", self._job.describe_end())
        elif time.monotonic() > (self._due or 0.0):
            text = f"no supervisor began there within {_START_S:g} s"
            self._refusal = StartRefusedError(self.node, "unreachable", text)

    def _look(self) -> NodeStatus:
        seen, job = self._read(), self._job
        outcome = seen.outcome
        news = (seen.supervisor.get("updated_at"), (seen.health or {}).get("at"), outcome is not None)
        if news != self._news:
            self._news, self._heard_at = news, time.monotonic()
        has_job_ended = (job.ended_s or 0.0) > SETTLE_S
        heard_s = 0.0 if outcome is not None else time.monotonic() - self._heard_at
        status = replace(seen, heard_s=heard_s, failure=job.failure())
        if outcome is not None:
            return self._explained(status, outcome)
        if has_job_ended and job.status is not None and job.status.state == "CANCELLED":
            return replace(status, phase="ended", heard_s=0.0, is_synced=True, outcome=_CANCELLED)
        if has_job_ended:
            return replace(status, phase="lost", heard_s=0.0, problem=job.describe_end())
        if status.phase == "none" and (job.status is None or job.status.phase == "pending"):
            return replace(status, phase="starting", heard_s=0.0, problem=job.problem)
        return status

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

    def _explained(self, status: NodeStatus, outcome: Mapping[str, Any]) -> NodeStatus:
        """An end by a signal that we did not send was Slurm's doing; why it did so shows once the job is over."""
        if outcome.get("stop_cause") == TIME_LIMIT:
            return replace(status, failure=Failure("launcher", TIME_LIMIT, f"{self._job.title} {_SAVED}"))
        if outcome.get("cause") != "stop" or outcome.get("stop_cause") not in _SIGNALS:
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
