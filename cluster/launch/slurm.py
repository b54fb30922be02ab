"""`Runner` for Slurm, which chooses the nodes when their turn comes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.control.attempt import StopRequests
from cluster.control.link import LaunchObserver, LaunchOutcome, NodeLink
from cluster.facts import MachineFacts
from cluster.failure import Failure
from cluster.launch.local import local_facts
from cluster.launch.runner import Asked, Runner, Survey
from cluster.launch.scheduler import Granted, SchedulerError, await_granted
from cluster.plan import LaunchPlan
from cluster.slurm.client import SlurmClient
from cluster.slurm.job import SlurmLink, find_job, submit_job
from cluster.slurm.plan import build_slurm_plan, granted_plan, read_token
from engine.config.settings import RunConfig
from engine.runs.folder import RunFolder


@dataclass(frozen=True)
class SlurmSurvey(Survey):
    """A cluster whose nodes share folders and Python with this machine."""

    config: RunConfig
    facts: MachineFacts
    module: str

    def plan(self, config: RunConfig, run_path: Path) -> LaunchPlan:
        """Its nodes have names that only stand for them."""
        return build_slurm_plan(config, self.facts, run_path, module=self.module)


class SlurmRunner(Runner):
    """See `Runner`."""

    is_queued = True

    def survey(self, config: RunConfig, asked: Asked) -> SlurmSurvey:
        """A rehearsal does without Slurm."""
        if not asked.dry_run:
            SlurmClient().ping()
        return SlurmSurvey(config, local_facts(config), asked.module)

    def with_nodes(self, plan: LaunchPlan) -> LaunchPlan:
        """The launcher may not have lived to write down which nodes these are."""
        run = RunFolder(Path(plan.run_path))
        token = read_token(run.path)
        return plan if token is None else granted_plan(plan, run, token) or plan

    def links(self, plan: LaunchPlan, run: RunFolder) -> list[NodeLink]:
        """Over the job that run.json names."""
        job = find_job(run)
        return [SlurmLink(run, node.name, job) for node in plan.nodes]

    def await_nodes(
        self, plan: LaunchPlan, run: RunFolder, observer: LaunchObserver, stop: StopRequests, *, start: bool
    ) -> Granted | LaunchOutcome:
        """See `cluster.launch.scheduler`. start: submit a new job; else go on with the one of the run."""
        try:
            job = submit_job(run, plan.config.cluster.slurm) if start else find_job(run)
        except SchedulerError as error:
            failure = Failure("start", "SlurmError", str(error), exit_code=error.exit_code)
            return LaunchOutcome("failed", error.exit_code, failure)
        return await_granted(job.watch(), plan, run, observer, stop)


RUNNER = SlurmRunner()
