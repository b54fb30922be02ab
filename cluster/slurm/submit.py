"""Giving a run to Slurm: what is written down before, and how a number comes of it."""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cluster.errors import ClusterError
from cluster.slurm.client import SlurmClient, client_environment
from cluster.slurm.job import EXIT_FILE, SlurmJob
from cluster.slurm.sbatch import LOG_PREFIX, SCRIPT_FILE, TOKEN_FILE
from cluster.slurm.states import JobRecord, Mode, write_record
from engine.config.cluster import SlurmConfig
from engine.runs.files import replace_file
from engine.runs.folder import RunFolder
from engine.runs.process import process_start


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
