"""RUN/slurm.json: which job of Slurm a run is, for every process that ever has to do with the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cluster.errors import ClusterError
from cluster.slurm.states import JobStatus
from engine.runs.records import read_json_object, replace_json

RECORD_FILE = "slurm.json"
Mode = Literal["batch", "step"]


@dataclass(frozen=True)
class JobRecord:
    """One attempt. job_id: None until Slurm has told it. mode: batch: a job of its own; step: within the allocation
    `job_id`. token: of the attempt. host, pid, pid_start: of the process that leads a step. ended: how the job ended,
    once that is known: Slurm itself forgets it after some minutes. restarts: how often Slurm had requeued the job by
    then; in_a_row, saved: so many of them without a checkpoint beyond this step."""

    token: str
    mode: Mode
    job_id: str | None = None
    cluster: str | None = None
    submitted_at: str | None = None
    host: str | None = None
    pid: int | None = None
    pid_start: str | None = None
    ended: JobStatus | None = None
    restarts: int = 0
    in_a_row: int = 0
    saved: int = 0

    def again(self, restarts: int) -> JobRecord:
        """Of the attempt that Slurm begins by requeuing the job for the `restarts`-th time, as its batch file knows."""
        return replace(self, token=f"{self.token.partition('-')[0]}-{restarts}", restarts=restarts, ended=None)


def write_record(run_path: Path, record: JobRecord) -> None:
    """Replace the record."""
    replace_json(run_path / RECORD_FILE, asdict(record))


def read_record(run_path: Path) -> JobRecord | None:
    """The record; None when the run was never given to Slurm. Raises ClusterError when it is damaged."""
    path = run_path / RECORD_FILE
    try:
        document = read_json_object(path)
        return None if document is None else _record(document)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ClusterError(f"{path} is damaged, so the job cannot be found: {error}") from error


def _record(document: dict[str, Any]) -> JobRecord:
    ended = document.pop("ended")
    record = JobRecord(**document, ended=None if ended is None else JobStatus(**ended))
    if not isinstance(record.token, str) or record.mode not in ("batch", "step"):
        raise ValueError("token or mode")
    if record.job_id is not None and not (isinstance(record.job_id, str) and record.job_id.isdecimal()):
        raise ValueError("job_id")
    if record.cluster is not None and not str(record.cluster).replace("_", "").replace("-", "").isalnum():
        raise ValueError("cluster")
    return record
