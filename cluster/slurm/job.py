"""The job of a run: submitted once, then watched by a thread, because Slurm's commands may take seconds to answer."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cluster.control.judge import tail_text
from cluster.control.link import TIME_LIMIT
from cluster.errors import ClusterError
from cluster.failure import Failure
from cluster.launch.scheduler import SchedulerError, WatchedJob
from cluster.remote_text import one_line
from cluster.slurm.client import SlurmClient, client_environment
from cluster.slurm.sbatch import LOG_PREFIX, NO_RESTARTS_LEFT, NOT_SHARED, SCRIPT_FILE, TIME_IS_UP, TOKEN_FILE
from cluster.slurm.states import AGAIN, JobRecord, JobStatus, Mode, describe_end, read_record, write_record
from engine.config.cluster import SlurmConfig
from engine.runs.files import replace_file
from engine.runs.folder import RunFolder
from engine.runs.process import process_start

_TASK_ERROR = re.compile(r"srun: error: \S+: task")
REQUEUED = "Slurm: requeued"  # a type of failure after which the same job goes on
EXIT_FILE = "slurm.exit"  # of a step: srun's exit code
POLL_S = 2.0
_CANCEL_MARGIN_S = 10.0  # beyond the grace that supervisors were given to end by themselves
_EXIT_FILE_S = 3.0  # between the end of a step's process and the file that says how it ended


class SlurmJob(WatchedJob):
    """One attempt of a run as Slurm knows it. Several links share it, each closes it once.

    status: what Slurm said last; None before its first answer. is_cancelled_here: it was this process that had Slurm
    end the job.
    """

    def __init__(self, run: RunFolder, record: JobRecord, client: SlurmClient | None = None, poll_s: float = POLL_S):
        super().__init__(job_name(run), poll_s)
        self.run, self.record, self._client = run, record, client or SlurmClient()
        self.status: JobStatus | None = record.ended
        self.is_cancelled_here = False
        self._ended_at = time.monotonic() if record.ended is not None else None
        self._lost: tuple[str, ...] = ()
        self._process_gone_at: float | None = None

    @property
    def job_id(self) -> str:
        """Number of the job, for people."""
        return self.record.job_id or "?"

    @property
    def log(self) -> Path:
        """What the batch script and srun said."""
        return self.run.path / f"{LOG_PREFIX}{self.job_id}.log"

    @property
    def is_begun_again(self) -> bool:
        """Whether Slurm has requeued the job, so that this start of it is over."""
        return self.status is not None and self.status.state == AGAIN

    @property
    def ended_s(self) -> float | None:
        """For how long it has been known that the job is over; None while it is not."""
        return None if self._ended_at is None else time.monotonic() - self._ended_at

    def describe_end(self) -> str:
        """Why the job ended, in words, with the last of what srun said where that helps."""
        status = self.status or JobStatus("GONE")
        if status.signal == 53:  # Slurm's code for "cannot open the job's output"
            return f"Slurm job {self.job_id} could not write into the run folder: {_SHARED}"
        if status.exit_code == NOT_SHARED:
            return f"Slurm job {self.job_id}: a node does not see the run folder: {_SHARED}"
        if status.exit_code == TIME_IS_UP:
            return (
                f"Slurm job {self.job_id} came near its time limit ({status.time_limit}), so its ranks saved and "
                "stopped: `burst resume` goes on from there, and with cluster.max_restarts the job does so by itself"
            )
        if status.exit_code == NO_RESTARTS_LEFT:
            return f"Slurm job {self.job_id} has used up cluster.max_restarts in a row without a further checkpoint"
        text = describe_end(self.job_id, status, self._lost)
        return text if status.state != "FAILED" or not (said := self.last_words()) else f"{text}: {said}"

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
        if status.state in ("TIMEOUT", "PREEMPTED", "DEADLINE", "BOOT_FAIL"):
            return Failure("launcher", f"Slurm: {status.state}", self.describe_end(), log=str(self.log))
        if status.state == AGAIN or status.exit_code == TIME_IS_UP:
            return Failure("launcher", REQUEUED if status.state == AGAIN else TIME_LIMIT, self.describe_end())
        if status.exit_code == NO_RESTARTS_LEFT:
            return Failure("start", "Slurm: restarts", self.describe_end(), log=str(self.log))
        if status.state == "NODE_FAIL":
            host = self._lost[0] if self._lost else None
            return Failure("node_lost", "Slurm: NODE_FAIL", self.describe_end(), host=host, log=str(self.log))
        return None

    # --- requests ------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Have Slurm end the job."""
        self.end_after(0.0)

    def stop_later(self, grace_s: float) -> None:
        """The supervisors were asked to end within `grace_s`: should any of them not, Slurm ends them all."""
        self.end_after(grace_s + _CANCEL_MARGIN_S)

    def again(self) -> SlurmJob:
        """The same job as Slurm has begun it since."""
        restarts = self.status.restarts if self.status is not None else 0
        return SlurmJob(self.run, self.record.again(restarts), self._client, self._poll_s)

    def look(self) -> bool:
        try:
            if self._is_end_due(_CANCEL_MARGIN_S):
                self.is_cancelled_here = True
                self._cancel_now()
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
        if status.phase == "ended" and status.state != AGAIN:
            self.record = replace(self.record, ended=status)
            with contextlib.suppress(OSError):  # a full disk; the next who asks is told by Slurm
                write_record(self.run.path, self.record)
        return self._ended_at is None

    def _ask(self) -> JobStatus:
        record = self._with_id()
        if record.job_id is None:
            return JobStatus("GONE", reason="it was never submitted")
        status = self._client.query(record.job_id, record.cluster)
        if record.mode == "batch" and status.restarts > record.restarts:
            return replace(status, state=AGAIN)
        return status if record.mode == "batch" or status.phase == "ended" else self._step_status(status)

    def _with_id(self) -> JobRecord:
        """A launcher that was killed while it submitted could not write the number down; the name finds it."""
        if self.record.job_id is None and (found := self._client.find(job_name(self.run))) is not None:
            self.record = replace(self.record, job_id=found)
        return self.record

    def _step_status(self, allocation: JobStatus) -> JobStatus:
        """How srun within an allocation does: by the file that its end leaves, else by its process."""
        code = _read_exit(self.run.path)
        if code is not None:
            return replace(allocation, state="COMPLETED" if code == 0 else "FAILED", exit_code=code, reason="")
        record = self.record
        is_here = record.host == socket.gethostname() and record.pid is not None
        if not is_here or process_start(record.pid or 0) == record.pid_start:
            return allocation
        self._process_gone_at = self._process_gone_at or time.monotonic()
        if time.monotonic() < self._process_gone_at + _EXIT_FILE_S:
            return allocation
        return replace(allocation, state="FAILED", reason="srun was killed", exit_code=None)

    def _cancel_now(self) -> None:
        record = self._with_id()
        if record.job_id is None:
            return
        if record.mode == "batch":
            self._client.cancel(record.job_id, record.cluster)
        else:
            for step in self._client.steps(record.job_id, job_name(self.run)):
                self._client.cancel(step, record.cluster)


_SHARED = "runs of Slurm need a run folder that all nodes share; set --runs-dir or BURST_RUNS_DIR to such storage"


def find_job(run: RunFolder) -> SlurmJob | None:
    """The job of the run's present attempt; None when it was never submitted. Raises ClusterError."""
    record = read_record(run.path)
    return None if record is None else SlurmJob(run, record)


def _read_exit(run_path: Path) -> int | None:
    try:
        return int((run_path / EXIT_FILE).read_text())
    except (OSError, ValueError):
        return None


def job_name(run: RunFolder) -> str:
    """The name of a run's job, by which it can be found."""
    return f"burst-{run.run_id}"


def submit_job(run: RunFolder, settings: SlurmConfig, environment: Mapping[str, str] | None = None) -> SlurmJob:
    """The job of a new attempt of `run`, whose folder holds the batch file.

    A job of its own or, where SLURM_JOB_ID is set, a step of that allocation. Raises ClusterError.
    """
    environment = os.environ if environment is None else environment
    allocation = environment.get("SLURM_JOB_ID")
    mode: Mode = "step" if allocation else "batch"
    record = JobRecord(secrets.token_hex(8), mode, allocation, host=socket.gethostname())
    try:
        lay_token(run.path, record.token)
        write_record(run.path, record)
    except OSError as error:
        raise ClusterError(
            f"{error.filename or run.path}: {error.strerror}; the job's token cannot be written"
        ) from error
    client = SlurmClient(client_environment(environment, settings))
    if mode == "batch":
        job_id, cluster = client.submit(run.path / SCRIPT_FILE, record.token)
        record = replace(record, job_id=job_id, cluster=cluster)
    else:
        pid = _start_step(run.path, record, environment)
        record = replace(record, pid=pid, pid_start=process_start(pid))
    write_record(run.path, record)
    return SlurmJob(run, record, client)


def _start_step(run_path: Path, record: JobRecord, environment: Mapping[str, str]) -> int:
    """The process, in a session of its own, that runs the batch file and leaves srun's exit code in a file."""
    exit_file, script = shlex.quote(str(run_path / EXIT_FILE)), shlex.quote(str(run_path / SCRIPT_FILE))
    (run_path / EXIT_FILE).unlink(missing_ok=True)
    line = f"bash {script} {record.token}; echo $? >{exit_file}.part; mv {exit_file}.part {exit_file}"
    inherited = {name: value for name, value in environment.items() if name.startswith("SLURM_")}
    with (run_path / f"{LOG_PREFIX}{record.job_id}.log").open("ab") as log:
        process = subprocess.Popen(
            ("sh", "-c", line),
            cwd="/",
            # Beside whatever step this shell is: only so srun may use the same CPUs and GPUs.
            env={**client_environment(environment), **inherited, "SLURM_OVERLAP": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    threading.Thread(target=process.wait, daemon=True).start()  # so that it does not stay a zombie
    return process.pid


def lay_token(run_path: Path, token: str) -> None:
    """By this file nodes know that they see the run folder, and which attempt is meant. Raises OSError."""
    replace_file(run_path / TOKEN_FILE, f"{token}\n")
