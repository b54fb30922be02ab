"""`Runner` for Slurm, which chooses the nodes when their turn comes, and may begin a job again by itself."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.control.attempt import StopRequests
from cluster.control.link import LaunchObserver, LaunchOutcome, NodeLink
from cluster.errors import ClusterError
from cluster.facts import MachineFacts
from cluster.failure import Failure
from cluster.launch.local import local_facts
from cluster.launch.runner import Asked, PlainSurvey
from cluster.launch.scheduler import Granted, SchedulerError, await_granted
from cluster.plan import LaunchPlan, write_plan_files
from cluster.slurm.client import SlurmClient
from cluster.slurm.job import REQUEUED, SlurmJob, find_job, submit_job
from cluster.slurm.link import SlurmLink
from cluster.slurm.plan import asks_partition, build_slurm_plan, granted_plan
from cluster.slurm.states import read_record
from engine.config.settings import RunConfig
from engine.runs.folder import RunFolder

_SETTLE_S = 3.0  # between the end of a job and the last files of its nodes
_SILENT_S = 120.0


@dataclass(frozen=True)
class SlurmSurvey(PlainSurvey):
    """A cluster whose nodes share folders and Python with this machine. partition_gpus: of a node, where it counts."""

    config: RunConfig
    facts: MachineFacts
    module: str
    partition_gpus: int = 0

    def plan(self, config: RunConfig, run_path: Path) -> LaunchPlan:
        """Its nodes have names that only stand for them."""
        return build_slurm_plan(config, self.facts, run_path, module=self.module, partition_gpus=self.partition_gpus)


class SlurmRunner:
    """See `Runner`."""

    is_here = takes_nodes = False
    is_queued = True

    def survey(self, config: RunConfig, asked: Asked) -> SlurmSurvey:
        """A rehearsal does without Slurm."""
        client, gpus = SlurmClient(), 0
        try:
            if asks_partition(config, os.environ):
                gpus = client.partition_gpus(config.cluster.slurm.option("partition"))
            elif not asked.dry_run:
                client.ping()
        except SchedulerError:
            if not asked.dry_run:
                raise
        return SlurmSurvey(config, local_facts(config), asked.module, gpus)

    def with_nodes(self, plan: LaunchPlan) -> LaunchPlan:
        """The launcher may not have lived to write down which nodes these are."""
        run = RunFolder(Path(plan.run_path))
        try:
            record = read_record(run.path)
        except ClusterError:
            return plan
        return plan if record is None else granted_plan(plan, run, record.token) or plan

    def links(self, plan: LaunchPlan, run: RunFolder) -> list[NodeLink]:
        """Over the job that run.json's neighbour slurm.json names."""
        job = find_job(run)
        return [SlurmLink(run, node.name, job) for node in plan.nodes]

    def await_nodes(
        self, plan: LaunchPlan, run: RunFolder, observer: LaunchObserver, stop: StopRequests, *, start: bool
    ) -> Granted | LaunchOutcome:
        """See `cluster.launch.scheduler`. start: submit a new job; else go on with the one of the run."""
        try:
            job = submit_job(run, plan.config.cluster.slurm) if start else find_job(run)
        except SchedulerError as error:
            return LaunchOutcome("failed", error.exit_code, _failure(str(error), error.exit_code))
        if job is None:
            return LaunchOutcome("failed", 1, _failure("the run was never given to Slurm"))
        run.record(job=job.job_id)
        return await_granted(_Waiting(plan, run, job.watch(), observer), run, observer, stop)

    def goes_on(self, outcome: LaunchOutcome) -> bool:
        """The batch file has begun, or will begin, the next attempt in the run folder."""
        return outcome.failure is not None and outcome.failure.type == REQUEUED


class _Waiting:
    """One job, from its submission to its nodes."""

    def __init__(self, plan: LaunchPlan, run: RunFolder, job: SlurmJob, observer: LaunchObserver) -> None:
        self.plan, self.run, self.job, self.observer = plan, run, job, observer
        self._running_at: float | None = None
        self.cancel, self.close = job.cancel, job.close

    def granted(self) -> Granted | None:
        """Once all nodes have written themselves down."""
        if self.job.is_begun_again:
            self.job = self.job.again().watch()
            self.cancel, self.close = self.job.cancel, self.job.close
        granted = granted_plan(self.plan, self.run, self.job.record.token)
        if granted is None:
            return None
        write_plan_files(granted, self.run)
        names = [node.name for node in granted.nodes]
        self.run.record(nodes=names)
        self.observer.note(f"Slurm job {self.job.job_id} runs on {', '.join(names)}")
        return granted, [SlurmLink(self.run, name, self.job) for name in names]

    def refusal(self) -> Failure | None:
        """The job has ended before."""
        if (self.job.ended_s or 0.0) <= _SETTLE_S:
            return None
        return self.job.failure() or _failure(self.job.describe_end(), log=self.job)

    def has_ended(self) -> bool:
        return self.job.ended_s is not None

    def leftover(self) -> str:
        job_id = self.job.job_id
        return f"Slurm job {job_id} has not ended ({self.job.problem or 'no answer'}); `scancel {job_id}`"

    def waits_for(self) -> str:
        """What Slurm says that the job waits for; then what its nodes do."""
        status, job_id = self.job.status, self.job.job_id
        if self.job.problem is not None:
            return f"Slurm job {job_id}: {self.job.problem}"
        if self.job.record.mode == "batch" and (status is None or status.phase == "pending"):
            return f"Slurm job {job_id} waits for {'its turn' if status is None else status.waits_for}"
        self._running_at = self._running_at or time.monotonic()
        is_late = time.monotonic() > self._running_at + _SILENT_S
        return f"Slurm job {job_id} runs; its nodes prepare" + (f", for long: see {self.job.log}" if is_late else "")


def _failure(text: str, exit_code: int = 1, log: SlurmJob | None = None) -> Failure:
    return Failure("start", "SlurmError", text, exit_code=exit_code, log=None if log is None else str(log.log))


RUNNER = SlurmRunner()
