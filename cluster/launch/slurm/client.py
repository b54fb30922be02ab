"""Slurm's own commands, and what they say of a job in words.

Each command has a time limit: without its controller they would wait for many seconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cluster.launch.scheduler import SchedulerError, run_client
from cluster.remote_text import one_line
from engine.config.cluster import SlurmConfig

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
UNKNOWN_JOB = "GONE"  # our word: Slurm has forgotten the job, which it does some minutes after the end
AGAIN = "requeued"  # our word: it lost a node or was preempted, and is in Slurm's queue once more
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
        return "ended" if self.state in _ENDED or self.state in (UNKNOWN_JOB, AGAIN) else "running"

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
    AGAIN: "lost a node or was preempted, and Slurm has requeued it",
    UNKNOWN_JOB: "has ended; Slurm no longer knows how",
}


def describe_end(status: JobStatus, lost_nodes: tuple[str, ...] = ()) -> str:
    """What became of a job that has ended, and what to do. `lost_nodes`: those that Slurm no longer reaches."""
    if (end := _ENDS.get(status.state)) is not None:
        nodes = f": {', '.join(lost_nodes)}" if lost_nodes else f", one of {status.node_list or 'its nodes'}"
        return end.format(limit=status.time_limit or "the default of its partition", nodes=nodes)
    how = f"signal {status.signal}" if status.signal else f"exit code {'?' if (c := status.exit_code) is None else c}"
    return f"ended: {status.state}, {how}{f', {status.reason}' if status.reason else ''}"


TIMEOUT_S = 20.0
CONF_VARIABLE = "SLURM_CONF"
_SUBMIT_TIMEOUT_S = 60.0
_JOB_ID = re.compile(r"\d{1,18}")
_STEP_ID = re.compile(r"\d{1,18}\.\d{1,9}")
_BAD_NODE = re.compile(r"down|fail|drain|no_respond|unk|not_responding|\*")
# What a job needs of its submitter's environment. The rest may hold secrets, and Slurm would keep and spread it.
_PASSED_ON = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TZ", "TMPDIR", "LANG", "LANGUAGE"),
        *("LD_LIBRARY_PATH", CONF_VARIABLE, "VIRTUAL_ENV", "CONDA_PREFIX"),
    }
)


@dataclass(frozen=True)
class SlurmClient:
    """Runs sbatch, scontrol, scancel and sinfo. environment: what they see; a job inherits it from sbatch."""

    environment: Mapping[str, str] = field(default_factory=lambda: client_environment(os.environ))

    def ping(self) -> None:
        """Raise SchedulerError unless Slurm can be used from here."""
        self._run(("sinfo", "--noheader", "--format=%P"))

    def submit(self, script: Path, *arguments: str) -> str:
        """Number of the job. Raises SchedulerError with sbatch's words."""
        said = self._run(("sbatch", "--parsable", str(script), *arguments), timeout_s=_SUBMIT_TIMEOUT_S).strip()
        found = _JOB_ID.fullmatch(said.splitlines()[-1].strip()) if said else None
        if found is None:
            raise SchedulerError("refused", f"sbatch answered {one_line(said, 80)!r}; expected the number of a job")
        return found[0]

    def query(self, job_id: str) -> JobStatus:
        """The job as Slurm knows it now; state GONE when it does not. Raises SchedulerError."""
        try:
            said = self._run(("scontrol", "--oneliner", "show", "job", job_id))
        except SchedulerError as error:
            if error.kind == "refused" and "Invalid job id" in str(error):
                return JobStatus(UNKNOWN_JOB)
            raise
        status = parse_job(said)
        if status is None:
            raise SchedulerError("refused", f"scontrol show job {job_id}: no state in {one_line(said, 80)!r}")
        return status

    def cancel(self, job_or_step: str) -> None:
        """Have Slurm end the job or step: SIGTERM, some seconds later SIGKILL. Ended ones are no error."""
        self._run(("scancel", job_or_step))

    def find(self, name: str) -> str | None:
        """Number of the job of this user that bears `name`, if it has not ended."""
        said = self._run(("squeue", "--noheader", "--me", f"--name={name}", "--format=%A"))
        found = [line.strip() for line in said.splitlines() if line.strip().isdecimal()]
        return found[-1] if found else None

    def steps(self, job_id: str, name: str) -> tuple[str, ...]:
        """The steps of a job that bear `name`, as JOB.STEP."""
        said = self._run(("squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i %j"))
        lines = (line.split() for line in said.splitlines())
        return tuple(words[0] for words in lines if words[1:] == [name] and _STEP_ID.fullmatch(words[0]))

    def lost_nodes(self, node_list: str) -> tuple[str, ...]:
        """Those of a job's nodes that Slurm does not reach or use; none when it cannot tell."""
        if not node_list:
            return ()
        try:
            said = self._run(("sinfo", "--noheader", "--Node", f"--nodes={node_list}", "--format=%N %T"))
        except SchedulerError:
            return ()
        lines = (line.split() for line in said.splitlines())
        found = (one_line(words[0], 80) for words in lines if len(words) == 2 and _BAD_NODE.search(words[1]))
        return tuple(dict.fromkeys(found))

    def _run(self, argv: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> str:
        """What the command printed."""
        package = "Slurm's client (Debian's package is slurm-client)"
        done = run_client(argv, package, timeout_s=timeout_s, environment=self.environment)
        if done.returncode == 0:
            return done.stdout
        said = one_line(done.stderr or done.stdout, 400) or f"exit code {done.returncode}"
        if "configuration source" in said:
            raise SchedulerError(
                "missing",
                f"{argv[0]} finds no configuration of Slurm on this machine: set SLURM_CONF to its slurm.conf "
                "(`burst testbed status` shows that of a testbed)",
            )
        silent = re.search(r"[Uu]nable to contact|[Cc]onnect failure|[Cc]onnection refused|timed out", said)
        if silent:
            raise SchedulerError("silent", f"Slurm's controller does not answer {argv[0]}: {said}. Try `scontrol ping`")
        raise SchedulerError("refused", f"{argv[0]}: {said}")


def client_environment(environment: Mapping[str, str], settings: SlurmConfig | None = None) -> dict[str, str]:
    """What Slurm's commands, and by sbatch every process of a job, get of `environment`.

    SBATCH_* would quietly win over the batch file, so those of options that `settings` have go.
    """
    settings = settings or SlurmConfig()
    defaults = {variable for variable, option in _SBATCH_DEFAULTS.items() if settings.option(option) is None}
    defaults -= set() if settings.time_limit is None else {"SBATCH_TIMELIMIT"}
    return {
        name: value
        for name, value in environment.items()
        if name in _PASSED_ON or name.startswith("LC_") or name in defaults
    }


# Defaults that a site or a user may have put into the environment, and that the batch file sets only when asked to.
_SBATCH_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_TIMELIMIT": "time",
}
