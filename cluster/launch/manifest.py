"""The job of a run on Kubernetes as a plain value: a JobSet of one pod per node. Pure.

Every pod runs the same command: `cluster.launch.pod` around torchrun, which reads its place from PET_* variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from cluster.launch.pod import FILES, PER_POD
from cluster.plan import LaunchPlan
from cluster.plan_nodes import RUN_LABEL

JOB_FILE = "job.yaml"
CONTAINER = "node"  # and the job of the pods, too
RESOURCE = "jobsets.jobset.x-k8s.io"
MASTER_PORT = 29500
_RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_KEEP_S = 7 * 86400  # an ended job, and so what its pods said
_STOP_MARGIN_S = 15  # for the last lines of logs, after the ranks have ended


def job_name(run_id: str) -> str:
    """Name of the run's job."""
    return f"burst-{run_id}"


def build_job(plan: LaunchPlan) -> dict[str, Any]:
    """The job of `plan`, one pod per node of it."""
    settings, count = plan.config.cluster.kubernetes, len(plan.nodes)
    labels = {RUN_LABEL: plan.run_id}
    queue = {} if settings.queue is None else {"kueue.x-k8s.io/queue-name": settings.queue}
    metadata: dict[str, Any] = {"name": job_name(plan.run_id), "labels": {**labels, **queue}}
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    job = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 0,  # who begins again is `burst`: from a checkpoint, and not after every mistake
        "template": {"metadata": {"labels": dict(labels)}, "spec": _pod(plan)},
    }
    spec = {
        "ttlSecondsAfterFinished": _KEEP_S,
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": {"spec": job}}],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def job_text(plan: LaunchPlan) -> str:
    """`build_job` as YAML for people: keys in their order, texts of several lines as such."""
    return yaml.dump(build_job(plan), Dumper=_Dumper, sort_keys=False, width=100_000)


def _pod(plan: LaunchPlan) -> dict[str, Any]:
    settings, checkpoint, first = plan.config.cluster.kubernetes, plan.config.train.checkpoint, plan.nodes[0]
    labels = dict(label.split("=", 1) for label in settings.node_selector)
    container = {
        "name": CONTAINER,
        "image": plan.config.cluster.container.image,
        "command": [_literal(word) for word in (first.argv[0], "-m", "cluster.launch.pod", first.folder, *first.argv)],
        "env": _environment(plan),
        "resources": _resources(plan),
        "volumeMounts": [{"name": "shared", "mountPath": first.cwd}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(checkpoint.stop_grace_s) + _STOP_MARGIN_S,
        **({"nodeSelector": labels} if labels else {}),
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": settings.claim}},
            # NCCL and loaders exchange data of ranks of one pod there; a container has 64 MiB by default.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
        "containers": [container],
    }


def _resources(plan: LaunchPlan) -> dict[str, Any]:
    settings = plan.config.cluster.kubernetes
    wanted: dict[str, Any] = {
        settings.gpu_resource: settings.gpus_per_pod or None,
        "cpu": settings.cpus_per_pod,
        "memory": settings.memory_per_pod,
    }
    limits = {name: str(value) for name, value in wanted.items() if value is not None}
    return {"limits": limits, "requests": dict(limits)} if limits else {}


def _environment(plan: LaunchPlan) -> list[Mapping[str, Any]]:
    """Where a pod meets the others, the variables that all have alike, and the files that the first lays."""
    name = job_name(plan.run_id)
    values = {
        "PET_NNODES": str(len(plan.nodes)),
        "PET_NPROC_PER_NODE": str(plan.backend.local_ranks),
        "PET_MASTER_ADDR": f"{name}-{CONTAINER}-0-0.{name}",
        "PET_MASTER_PORT": str(plan.config.cluster.master_port or MASTER_PORT),
        **{one.name: one.value for one in plan.nodes[0].environment if one.name not in PER_POD},
        **{FILES[name]: text for name, text in plan.files if name in FILES},
    }
    rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _RANK}}}
    return [rank, *({"name": name, "value": _literal(value)} for name, value in values.items())]


def _literal(text: str) -> str:
    """A text in which Kubernetes would otherwise expand $(NAME)."""
    return text.replace("$", "$$")


class _Dumper(yaml.SafeDumper):
    """Without anchors, which kubectl reads and people do not."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
