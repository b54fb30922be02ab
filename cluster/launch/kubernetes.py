"""`Runner` for Kubernetes: one job of one pod per node, followed by kubectl alone.

What the pods print is all that is known of them: `pod` prints what the ranks say and record, `pod_files` writes it down
here. The job belongs to the cluster: it does not end with the launcher.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.control.link import NodeLink
from cluster.control.outcome import LaunchObserver, LaunchOutcome, StopRequests
from cluster.control.ssh_link import LinkTiming
from cluster.env.facts import EnvironmentVariable
from cluster.facts import MachineFacts
from cluster.failure import Failure
from cluster.launch.kubectl import Kubectl, KubectlError
from cluster.launch.manifest import JOB_FILE, job_text
from cluster.launch.pod import pod_node
from cluster.launch.pods import KubernetesJob, PodLink
from cluster.launch.queue import Granted, await_granted
from cluster.launch.runner import Asked, PlainSurvey
from cluster.plan import Backend, LaunchPlan, NodePlan, choose_backend, with_files
from cluster.plan_variables import Threads, backend_variables, recorder_variables, run_variables, with_settings
from engine.config.settings import RunConfig, dump_config
from engine.planning.memory.capacity import Hardware
from engine.runs.folder import RunFolder

_MOUNT = "/shared"
_UNITS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


@dataclass(frozen=True)
class KubernetesSurvey(PlainSurvey):
    """A cluster that takes jobs of the kind; of its nodes nothing is known."""

    config: RunConfig
    module: str

    @property
    def hardware(self) -> Hardware:  # type: ignore[override]
        """What the pods ask for."""
        asked = self.config.cluster.kubernetes.memory_per_pod
        return Hardware((), None if asked is None else quantity_bytes(asked), "cluster.kubernetes.memory_per_pod")

    def plan(self, config: RunConfig, run_path: Path) -> LaunchPlan:
        return build_kubernetes_plan(config, run_path, self.module)

    def complete(self, plan: LaunchPlan) -> LaunchPlan:
        return with_files(plan, (JOB_FILE, job_text(plan)))

    def prepare(self, plan: LaunchPlan) -> None:
        """The cluster says whether it would take the job. Raises KubectlError."""
        kubectl = Kubectl(plan.config.cluster.kubernetes)
        kubectl.run("create", "--dry-run=server", "--output=name", "--filename=-", stdin=dict(plan.files)[JOB_FILE])


def build_kubernetes_plan(config: RunConfig, run_path: Path, module: str) -> LaunchPlan:
    """The plan to run `config` in pods, whose run folder lies on their claim. Pure. Raises ConfigError."""
    settings, cluster = config.cluster.kubernetes, config.cluster
    backend = choose_backend(config, MachineFacts("a pod", settings.cpus_per_pod or 1, settings.gpus_per_pod))
    count, mount = cluster.num_nodes or 1, (cluster.shared_folder or _MOUNT).rstrip("/")
    resolved = replace(
        cluster,
        launcher="kubernetes",
        num_nodes=count,
        backend=backend.name,  # type: ignore[arg-type]
        ranks_per_node=backend.local_ranks,
        threads_per_rank=backend.threads_per_rank,
    )
    config = replace(config, cluster=resolved)
    folder = f"{mount}/runs/{config.exp}/{run_path.name}"
    nodes = tuple(_node(rank, config, backend, folder, mount, module) for rank in range(count))
    files = (("config.yaml", dump_config(config)),)
    world_size = backend.local_ranks * count
    return with_files(LaunchPlan(str(run_path), config, world_size, backend, nodes, files, "kubernetes"))


def _node(rank: int, config: RunConfig, backend: Backend, folder: str, mount: str, module: str) -> NodePlan:
    name, cluster = pod_node(rank), config.cluster
    log_dir, run_id = f"{folder}/logs/{name}", Path(folder).name
    threads = Threads(backend.threads_per_rank, "cluster.kubernetes.cpus_per_pod")
    variables = run_variables(run_id, name, log_dir, threads)
    variables += backend_variables(backend.name, share_device=cluster.ranks_share_device)
    variables += recorder_variables(log_dir)
    if cluster.interface is not None:
        socket = "GLOO_SOCKET_IFNAME" if backend.name == "gloo" else "NCCL_SOCKET_IFNAME"
        variables.append(EnvironmentVariable(socket, cluster.interface, "cluster.interface"))
    python = cluster.python or "python"
    torchrun = (python, "-m", "torch.distributed.run", "--max-restarts=0", f"--rdzv-id={run_id}")
    return NodePlan(
        name=name,
        node_rank=rank,
        first_rank=rank * backend.local_ranks,
        local_ranks=backend.local_ranks,
        argv=(*torchrun, "-m", module, f"{folder}/config.yaml"),
        environment=with_settings(variables, cluster.environment),
        cwd=mount,
        folder=folder,
        log_dir=log_dir,
    )


def quantity_bytes(text: str) -> int:
    """Bytes of a quantity of Kubernetes, such as 200Gi or 64G."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGTPE]?)(i?)", text)
    assert found is not None, "refused by engine.config.machines"
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _UNITS[found[2]])


class KubernetesRunner:
    """See `Runner`."""

    is_here = takes_nodes = False
    is_queued = True

    def survey(self, config: RunConfig, asked: Asked) -> KubernetesSurvey:
        """A rehearsal does without a cluster."""
        if not asked.dry_run:
            with asked.busy("asking the cluster"):
                Kubectl(config.cluster.kubernetes).check()
        return KubernetesSurvey(config, asked.module)

    def with_nodes(self, plan: LaunchPlan) -> LaunchPlan:
        return plan

    def links(self, plan: LaunchPlan, run: RunFolder, timing: LinkTiming | None) -> list[NodeLink]:
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
        except KubectlError as error:
            job.cancel()  # should it have been created all the same
            job.look()
            job.close()
            failure = Failure("start", "KubernetesError", str(error), exit_code=error.exit_code)
            return LaunchOutcome("failed", error.exit_code, failure)
        run.record(job=job.name)
        return await_granted(job.watch(), run, observer, stop)

    def goes_on(self, outcome: LaunchOutcome) -> bool:
        return False


RUNNER = KubernetesRunner()
