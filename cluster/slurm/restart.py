"""python -m cluster.slurm.restart RUN TOKEN WORD, in the batch file of a job that may save or restart.

stop: the time limit is near, so the supervisors are asked for the end. requeue: they have ended: the next attempt is
begun in the run folder, and Slurm told to run the job again. begin: Slurm did so by itself, after it lost a node.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cluster.agent.folder import request_stop
from cluster.control.attempt import Restarts, begin_attempt, read_cancel
from cluster.control.link import TIME_LIMIT
from cluster.errors import ClusterError
from cluster.failure import Failure
from cluster.plan import LaunchPlan, NodePlan, read_launch_plan
from cluster.slurm.client import JobRecord, SlurmClient, read_record, write_record
from cluster.slurm.job import REQUEUED, lay_token
from cluster.slurm.plan import granted_plan
from cluster.slurm.sbatch import NO_RESTARTS_LEFT, TIME_IS_UP, WARNING_S
from engine.config.errors import BurstError
from engine.runs.folder import FINAL_STATES, RunFolder

_BEGIN_S = WARNING_S / 2


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    """The exit code of the batch file, or 0 where it goes on."""
    os.umask(0o077)
    run, token, word = RunFolder(Path(arguments[0])), arguments[1], arguments[2]
    try:
        plan, record = read_launch_plan(run.path), read_record(run.path)
        if record is None or record.token.partition("-")[0] != token.partition("-")[0]:
            raise ClusterError(f"{run.path} has been given to another job since")
        if word == "stop":
            for node in _begun_nodes(plan, run, token):
                request_stop(str(run.path), node.name, TIME_LIMIT, plan.config.train.checkpoint.stop_grace_s)
            return 0
        restarts = int(environment.get("SLURM_RESTART_COUNT") or 0)
        if word == "begin":
            return begin(plan, run, record, restarts)
        return _requeue(plan, run, record, restarts + 1)
    except (BurstError, OSError) as error:
        print(f"burst: {word}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _begun_nodes(plan: LaunchPlan, run: RunFolder, token: str) -> tuple[NodePlan, ...]:
    """The nodes of this attempt, for which it waits: before they have begun they hear nothing. Raises ClusterError."""
    deadline = time.monotonic() + _BEGIN_S
    while (granted := granted_plan(plan, run, token)) is None:
        if time.monotonic() > deadline:
            raise ClusterError(f"not all nodes have begun within {_BEGIN_S:g} s")
        time.sleep(0.1)
    return granted.nodes


def begin(plan: LaunchPlan, run: RunFolder, record: JobRecord, restarts: int) -> int:
    """Begin the attempt of the job's `restarts`-th restart in the run folder, unless that was done; 0, or why not.

    Raises RunFolderError, OSError.
    """
    if record.restarts >= restarts:
        return 0
    count = Restarts(record.in_a_row, record.saved).after(run)
    if count.in_a_row > plan.config.cluster.max_restarts:
        print(f"burst: no further checkpoint after {record.in_a_row} restarts in a row", file=sys.stderr)
        return NO_RESTARTS_LEFT
    if run.read_state()["state"] not in FINAL_STATES:
        text = f"Slurm requeued job {record.job_id}"
        run.transition("failed", failure=Failure("launcher", REQUEUED, text).to_dict())
    begin_attempt(plan, run, None)
    run.record(job=record.job_id)
    again = replace(record.again(restarts), in_a_row=count.in_a_row, saved=count.saved)
    write_record(run.path, again)
    lay_token(run.path, again.token)
    return 0


def _requeue(plan: LaunchPlan, run: RunFolder, record: JobRecord, restarts: int) -> int:
    """Have Slurm run the job again, which ends this process; else the exit code of a run that ends here."""
    if run.read_state()["state"] == "completed":
        return 0
    if read_cancel(run) is not None or not plan.config.cluster.max_restarts or record.job_id is None:
        return TIME_IS_UP
    refused = begin(plan, run, record, restarts)
    if not refused:
        SlurmClient().requeue(record.job_id)
    return refused


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
