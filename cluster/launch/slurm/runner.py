"""`Runner` for Slurm, which chooses the nodes when their turn comes; they share folders and Python with this one."""

from __future__ import annotations

from pathlib import Path

from cluster.control.runner import Survey, SurveyOptions
from cluster.launch.local import local_facts
from cluster.launch.scheduler import QueuedRunner
from cluster.launch.slurm.client import SlurmClient
from cluster.launch.slurm.job import SlurmJob
from cluster.launch.slurm.plan import build_slurm_plan, granted_plan, read_token
from cluster.plan import LaunchPlan
from cluster.remote_text import word
from engine.config.settings import RunConfig
from engine.runs.folder import RunFolder


class SlurmRunner(QueuedRunner):
    """See `Runner`. Nodes of a plan have names that only stand for them, until they have written themselves down."""

    def survey(self, config: RunConfig, asked: SurveyOptions) -> Survey:
        """A rehearsal does without Slurm."""
        if not asked.dry_run:
            SlurmClient().ping()
        facts = local_facts(config)
        return Survey(config, lambda config, path: build_slurm_plan(config, facts, path, module=asked.module))

    def with_nodes(self, plan: LaunchPlan) -> LaunchPlan:
        """The launcher may not have lived to write down which nodes these are."""
        run = RunFolder(Path(plan.run_path))
        token = read_token(run.path)
        return plan if token is None else granted_plan(plan, run, token) or plan

    def job(self, plan: LaunchPlan, run: RunFolder) -> SlurmJob:
        """That of the run's present attempt, also where its launcher did not live to submit it."""
        return SlurmJob(run, read_token(run.path) or "", word(run.read_state(), "job"), plan.config.cluster.slurm)


RUNNER = SlurmRunner()
