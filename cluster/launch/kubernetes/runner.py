"""`Runner` for Kubernetes: one job of one pod per node, followed by kubectl alone.

What the pods print is all that is known of them: `pod` prints what the ranks say and record, `pods` writes it down
here. The job belongs to the cluster: it does not end with the launcher.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from cluster.control.runner import Survey, SurveyOptions
from cluster.launch.kubernetes.manifest import JOB_FILE, job_text
from cluster.launch.kubernetes.pod import pod_node
from cluster.launch.kubernetes.pods import Kubectl, KubernetesJob
from cluster.launch.scheduler import QueuedRunner
from cluster.plan import LaunchPlan, MachineFacts, assemble_plan, with_files, with_ranks
from cluster.plan_nodes import NodesBuilder, NodeTarget, socket_variable
from engine.config.settings import RunConfig
from engine.predict.memory import Hardware
from engine.runs.folder import RunFolder

_MOUNT = "/shared"


class KubernetesRunner(QueuedRunner):
    """See `Runner`. Pods have the names that the plan gives them; of the cluster's nodes nothing is known."""

    def survey(self, config: RunConfig, asked: SurveyOptions) -> Survey:
        """A rehearsal does without a cluster; before a launch the cluster says whether it would take the job."""
        kubectl, memory = Kubectl(config.cluster.kubernetes), config.cluster.kubernetes.memory_per_pod
        if not asked.dry_run:
            with asked.busy("asking the cluster"):
                kubectl.check()
        return Survey(
            config,
            lambda config, run_path: build_kubernetes_plan(config, run_path, asked.module),
            Hardware((), None if memory is None else quantity_bytes(memory), "cluster.kubernetes.memory_per_pod"),
            complete=lambda plan: with_files(plan, (JOB_FILE, job_text(plan))),
            prepare=lambda plan: _dry_run(kubectl, plan),
        )

    def job(self, plan: LaunchPlan, run: RunFolder) -> KubernetesJob:
        return KubernetesJob(plan, run)


def _dry_run(kubectl: Kubectl, plan: LaunchPlan) -> None:
    kubectl.run("create", "--dry-run=server", "--output=name", "--filename=-", stdin=dict(plan.files)[JOB_FILE])


def build_kubernetes_plan(config: RunConfig, run_path: Path, module: str) -> LaunchPlan:
    """The plan to run `config` in pods, whose run folder lies on their claim. Pure. Raises ConfigError."""
    settings, cluster = config.cluster.kubernetes, config.cluster
    count, mount = cluster.num_nodes or 1, (cluster.shared_folder or _MOUNT).rstrip("/")
    facts = MachineFacts("a pod", settings.cpus_per_pod or 1, settings.gpus_per_pod)
    container = replace(cluster.container, runtime="bare")  # the pod is the container
    config, backend = with_ranks(config, facts, launcher="kubernetes", num_nodes=count, container=container)
    folder, interface = f"{mount}/runs/{config.exp}/{run_path.name}", cluster.interface
    more = () if interface is None else (socket_variable(backend.name, interface, "cluster.interface"),)
    site = NodeTarget("", "", folder, cluster.python or "python", None, mount, more=more)
    builder = NodesBuilder(config, backend, run_path.name, count, module)
    nodes = [builder.node(rank, replace(site, name=pod_node(rank)), None) for rank in range(count)]
    return assemble_plan("kubernetes", config, run_path, nodes, backend, is_exclusive=False)


def quantity_bytes(text: str) -> int:
    """Bytes of a quantity of Kubernetes, such as 200Gi or 64G."""
    found = re.fullmatch(r"([\d.]+)([kMGTPE]?)(i?)", text)
    assert found is not None, "refused by engine.resolve.rules"
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kMGTPE".index(found[2] or " "))


RUNNER = KubernetesRunner()
