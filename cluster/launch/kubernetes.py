"""`Runner` for Kubernetes: one job of one pod per node, followed by kubectl alone.

What the pods print is all that is known of them: `pod` prints what the ranks say and record, `pods` writes it down
here. The job belongs to the cluster: it does not end with the launcher.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.control.attempt import StopRequests
from cluster.control.link import LaunchObserver, LaunchOutcome, NodeLink
from cluster.facts import MachineFacts
from cluster.failure import Failure
from cluster.launch.manifest import JOB_FILE, job_text
from cluster.launch.pod import pod_node
from cluster.launch.pods import Kubectl, KubernetesJob, PodLink
from cluster.launch.runner import Asked, Runner, Survey
from cluster.launch.scheduler import Granted, SchedulerError, await_granted
from cluster.plan import LaunchPlan, assemble_plan, with_files, with_ranks
from cluster.plan_nodes import NodesBuilder, Site, socket_variable
from engine.config.settings import RunConfig
from engine.planning.memory.capacity import Hardware
from engine.runs.folder import RunFolder

_MOUNT = "/shared"
_UNITS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


@dataclass(frozen=True)
class KubernetesSurvey(Survey):
    """A cluster that takes jobs of the kind; of its nodes nothing is known."""

    config: RunConfig
    module: str

    @property
    def hardware(self) -> Hardware:
        """What the pods ask for."""
        asked = self.config.cluster.kubernetes.memory_per_pod
        return Hardware((), None if asked is None else quantity_bytes(asked), "cluster.kubernetes.memory_per_pod")

    def plan(self, config: RunConfig, run_path: Path) -> LaunchPlan:
        return build_kubernetes_plan(config, run_path, self.module)

    def complete(self, plan: LaunchPlan) -> LaunchPlan:
        return with_files(plan, (JOB_FILE, job_text(plan)))

    def prepare(self, plan: LaunchPlan) -> None:
        """The cluster says whether it would take the job. Raises SchedulerError."""
        kubectl = Kubectl(plan.config.cluster.kubernetes)
        kubectl.run("create", "--dry-run=server", "--output=name", "--filename=-", stdin=dict(plan.files)[JOB_FILE])


def build_kubernetes_plan(config: RunConfig, run_path: Path, module: str) -> LaunchPlan:
    """The plan to run `config` in pods, whose run folder lies on their claim. Pure. Raises ConfigError."""
    settings, cluster = config.cluster.kubernetes, config.cluster
    count, mount = cluster.num_nodes or 1, (cluster.shared_folder or _MOUNT).rstrip("/")
    facts = MachineFacts("a pod", settings.cpus_per_pod or 1, settings.gpus_per_pod)
    container = replace(cluster.container, runtime="bare")  # the pod is the container
    config, backend = with_ranks(config, facts, launcher="kubernetes", num_nodes=count, container=container)
    folder = f"{mount}/runs/{config.exp}/{run_path.name}"
    builder = NodesBuilder(config, backend, run_path.name, count, module)
    interface = cluster.interface
    more = () if interface is None else (socket_variable(backend.name, interface, "cluster.interface"),)
    first = Site(pod_node(0), "", folder, cluster.python or "python", None, mount, more=more)
    sites = [replace(first, name=pod_node(rank)) for rank in range(count)]
    nodes = [builder.node(rank, site, None) for rank, site in enumerate(sites)]
    return assemble_plan("kubernetes", config, run_path, nodes, backend, is_exclusive=False)


def quantity_bytes(text: str) -> int:
    """Bytes of a quantity of Kubernetes, such as 200Gi or 64G."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGTPE]?)(i?)", text)
    assert found is not None, "refused by engine.config.machines"
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _UNITS[found[2]])


class KubernetesRunner(Runner):
    """See `Runner`. Pods have the names that the plan gives them."""

    is_queued = True

    def survey(self, config: RunConfig, asked: Asked) -> KubernetesSurvey:
        """A rehearsal does without a cluster."""
        if not asked.dry_run:
            with asked.busy("asking the cluster"):
                Kubectl(config.cluster.kubernetes).check()
        return KubernetesSurvey(config, asked.module)

    def links(self, plan: LaunchPlan, run: RunFolder) -> list[NodeLink]:
        job = KubernetesJob(plan, run)
        return [PodLink(job, node) for node in plan.nodes]

    def await_nodes(
        self, plan: LaunchPlan, run: RunFolder, observer: LaunchObserver, stop: StopRequests, *, start: bool
    ) -> Granted | LaunchOutcome:
        job = KubernetesJob(plan, run)
        try:
            if start:
                job.submit()
            else:
                job.look()  # what runs is to be stopped in order, should somebody wait for that
        except SchedulerError as error:
            job.cancel()  # should it have been created all the same
            job.look()
            job.close()
            failure = Failure("start", "KubernetesError", str(error), exit_code=error.exit_code)
            return LaunchOutcome("failed", error.exit_code, failure)
        run.record(job=job.name)
        return await_granted(job.watch(), plan, run, observer, stop)


RUNNER = KubernetesRunner()
