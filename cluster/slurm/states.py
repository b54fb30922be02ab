"""What Slurm says of a job, what its end means in words, and RUN/slurm.json, by which a run has its job."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cluster.errors import ClusterError
from cluster.remote_text import one_line
from engine.runs.records import read_json_object, replace_json

JobPhase = Literal["pending", "running", "ended"]

_PENDING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
_ENDED = frozenset(
    {
        *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"),
        *("DEADLINE", "REVOKED"),
    }
)
GONE = "GONE"  # our word: Slurm has forgotten the job, which it does some minutes after the end
AGAIN = "AGAIN"  # our word: this start of the job is over, and Slurm begins the job once more under the same number
# Not worth a word: how every job begins, and what its exit code says already.
_NO_REASON = frozenset({"None", "(null)", "NonZeroExitCode", ""})
_FIELDS = ("JobState", "Reason", "NodeList", "ExitCode", "TimeLimit", "Restarts")


@dataclass(frozen=True)
class JobStatus:
    """One job as of one answer of Slurm.

    state: Slurm's word for it. reason: why it waits, or why it ended. node_list: its nodes in Slurm's grammar.
    exit_code: of the batch script, signal: that ended it; None while unknown. restarts: how often it was requeued.
    """

    state: str
    reason: str = ""
    node_list: str = ""
    exit_code: int | None = None
    signal: int | None = None
    time_limit: str = ""
    restarts: int = 0

    @property
    def phase(self) -> JobPhase:
        """Whether it still waits, runs, or is over; a state that is not known counts as running."""
        if self.state in _PENDING:
            return "pending"
        return "ended" if self.state in _ENDED or self.state in (GONE, AGAIN) else "running"

    @property
    def waits_for(self) -> str:
        """Why a pending job does not start, in words."""
        return _WAITS.get(self.reason, self.reason.replace("_", " ")) or "its turn"


_WAITS = {
    "Resources": "nodes that are free",
    "Priority": "jobs of higher priority",
    "ReqNodeNotAvail": "nodes that are down or reserved",
    "PartitionConfig": "nothing: no node of the partition can ever take it",
    "PartitionNodeLimit": "nothing: the partition does not give so many nodes",
    "PartitionTimeLimit": "nothing: its time limit is longer than the partition's",
    "BadConstraints": "nothing: no node has what it asks for",
    "Dependency": "another job",
    "BeginTime": "the time at which it may begin",
    "JobHeldUser": "its release: somebody holds it (scontrol release)",
    "JobHeldAdmin": "its release: an administrator holds it",
}


def parse_job(text: str) -> JobStatus | None:
    """The answer of `scontrol --oneliner show job`; None when there is no job in it."""
    fields = {}
    for name in _FIELDS:
        # Values of ours cannot hold a blank, and what others may choose (Command, Comment) comes after these.
        found = re.search(rf"(?:^|\s){name}=(\S*)", text)
        fields[name] = one_line(found[1]) if found else ""
    if not fields["JobState"]:
        return None
    code, _, number = fields["ExitCode"].partition(":")
    return JobStatus(
        state=fields["JobState"],
        reason="" if fields["Reason"] in _NO_REASON else fields["Reason"],
        node_list="" if fields["NodeList"] in _NO_REASON else fields["NodeList"],
        exit_code=int(code) if code.isdecimal() else None,
        signal=int(number) if number.isdecimal() and int(number) else None,
        time_limit=fields["TimeLimit"],
        restarts=int(fields["Restarts"]) if fields["Restarts"].isdecimal() else 0,
    )


_ENDS = {
    "TIMEOUT": "reached its time limit ({limit}): set cluster.slurm.time_limit to what the run needs",
    "CANCELLED": "was cancelled outside of burst (scancel, or an administrator)",
    "PREEMPTED": "was preempted by another job",
    "NODE_FAIL": "lost a node{nodes}: it no longer answered Slurm's controller (NODE_FAIL)",
    "OUT_OF_MEMORY": "used more memory than it was given: a node's kernel ended it (OUT_OF_MEMORY)",
    "BOOT_FAIL": "lost a node that did not start (BOOT_FAIL)",
    "DEADLINE": "was ended at its deadline (DEADLINE)",
    "COMPLETED": "completed",
    AGAIN: "is requeued: it goes on from the newest checkpoint when Slurm has nodes for it",
    GONE: "has ended; Slurm no longer knows how",
}


def describe_end(status: JobStatus, lost_nodes: tuple[str, ...] = ()) -> str:
    """What became of a job that has ended, and what to do. `lost_nodes`: those that Slurm no longer reaches."""
    if (end := _ENDS.get(status.state)) is not None:
        nodes = f": {', '.join(lost_nodes)}" if lost_nodes else f", one of {status.node_list or 'its nodes'}"
        return end.format(limit=status.time_limit or "the default of its partition", nodes=nodes)
    how = f"signal {status.signal}" if status.signal else f"exit code {'?' if (c := status.exit_code) is None else c}"
    return f"ended: {status.state}, {how}{f', {status.reason}' if status.reason else ''}"


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
    document.pop("cluster", None)  # of a run that an earlier version gave to Slurm
    record = JobRecord(**document, ended=None if ended is None else JobStatus(**ended))
    if not isinstance(record.token, str) or not str(record.job_id or 0).isdecimal():
        raise ValueError("token or job_id")
    return record
