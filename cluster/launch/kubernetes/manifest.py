"""The job of a run on Kubernetes as a plain value: a JobSet, or a TrainJob of Kubeflow Trainer. Pure.

Every pod is a node and runs the same command: `cluster.launch.kubernetes.pod` around torchrun, which reads its place
from PET_* variables. Trainer sets these itself; for a JobSet they are part of the manifest.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from cluster.launch.kubernetes.pod import FILES, PER_POD
from cluster.plan import LaunchPlan
from cluster.plan_nodes import RUN_LABEL
from engine.config.cluster import KubernetesConfig

JOB_FILE = "job.yaml"
CONTAINER = "node"  # as Trainer's runtimes call it, and the job of the pods, too
_MASTER_PORT = 29500
_API = {"JobSet": "jobset.x-k8s.io/v1alpha2", "TrainJob": "trainer.kubeflow.org/v1alpha1"}
_RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_RETENTION_S = 7 * 86400  # an ended JobSet, and so what its pods said
_STOP_MARGIN_S = 15  # for the last lines of logs, after the ranks have ended


def job_name(run_id: str) -> str:
    """Name of the run's job."""
    return f"burst-{run_id}"


def resource_of(settings: KubernetesConfig) -> str:
    """What kubectl calls the kind of job."""
    return f"{settings.kind.lower()}s.{_API[settings.kind].partition('/')[0]}"


def build_job(plan: LaunchPlan) -> dict[str, Any]:
    """The job of `plan`, one pod per node of it."""
    settings = plan.config.cluster.kubernetes
    queue = {} if settings.queue is None else {"kueue.x-k8s.io/queue-name": settings.queue}
    place = {} if settings.namespace is None else {"namespace": settings.namespace}
    metadata = {"name": job_name(plan.run_id), "labels": {**_labels(plan), **queue}, **place}
    spec = _jobset(plan) if settings.kind == "JobSet" else _trainjob(plan)
    return {"apiVersion": _API[settings.kind], "kind": settings.kind, "metadata": metadata, "spec": spec}


def job_text(plan: LaunchPlan) -> str:
    """`build_job` as YAML."""
    return _yaml_text(build_job(plan))


def skypilot_text(plan: LaunchPlan) -> str:
    """The task of SkyPilot that runs the pods' command on nodes of some cloud, as YAML."""
    cluster, settings = plan.config.cluster, plan.config.cluster.kubernetes
    # Of a machine that nobody has named, SkyPilot is told no accelerator: it then asks for one.
    name = "GPU" if cluster.machine.name in ("auto", "cpu") else cluster.machine.name.upper()
    gpus = {"accelerators": f"{name}:{settings.gpus_per_pod}"} if settings.gpus_per_pod else {}
    cpus = {} if settings.cpus_per_pod is None else {"cpus": f"{settings.cpus_per_pod}+"}
    run = (
        "export PET_NNODES=$SKYPILOT_NUM_NODES PET_NODE_RANK=$SKYPILOT_NODE_RANK",
        f"export PET_NPROC_PER_NODE={plan.backend.local_ranks} PET_MASTER_PORT={_port(plan)}",
        'export PET_MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1)',
        shlex.join(_command(plan)),
    )
    task = {
        "name": job_name(plan.run_id),
        "num_nodes": len(plan.nodes),
        "resources": {"image_id": f"docker:{cluster.container.image}", **gpus, **cpus},
        "volumes": {_mount(plan): settings.claim},
        "envs": _environment(plan),
        "run": "".join(f"{line}\n" for line in run),
    }
    return _yaml_text(task)


FORMS = {"kubernetes": job_text, "skypilot": skypilot_text}


def _jobset(plan: LaunchPlan) -> dict[str, Any]:
    count, name = len(plan.nodes), job_name(plan.run_id)
    place = {
        "PET_NNODES": str(count),
        "PET_NPROC_PER_NODE": str(plan.backend.local_ranks),
        "PET_MASTER_ADDR": f"{name}-{CONTAINER}-0-0.{name}",
        "PET_MASTER_PORT": str(_port(plan)),
    }
    rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _RANK}}}
    container = {
        "image": plan.config.cluster.container.image,
        "command": list(map(_literal, _command(plan))),
        "env": [rank, *_variables({**place, **_environment(plan)})],
        "resources": _resources(plan),
    }
    job = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 0,  # who begins again is `burst`: from a checkpoint, and not after every mistake
        "template": _pod(plan, container, restartPolicy="Never"),
    }
    return {
        "ttlSecondsAfterFinished": _RETENTION_S,
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": {"spec": job}}],
    }


def _trainjob(plan: LaunchPlan) -> dict[str, Any]:
    job = {"name": CONTAINER, "template": {"spec": {"template": _pod(plan, {})}}}
    patch = {"template": {"spec": {"replicatedJobs": [job]}}}
    return {
        "runtimeRef": {"name": plan.config.cluster.kubernetes.runtime},
        "trainer": {
            "image": plan.config.cluster.container.image,
            "command": list(map(_literal, _command(plan))),
            "env": _variables(_environment(plan)),
            "numNodes": len(plan.nodes),
            "numProcPerNode": plan.backend.local_ranks,
            "resourcesPerNode": _resources(plan),
        },
        "runtimePatches": [{"manager": "burst.run/launch", "trainingRuntimeSpec": patch}],
    }


def _pod(plan: LaunchPlan, container: Mapping[str, Any], **more: str) -> dict[str, Any]:
    """The template of a pod, of which a TrainJob only patches what differs from its runtime's."""
    settings, checkpoint = plan.config.cluster.kubernetes, plan.config.train.checkpoint
    selected = dict(label.split("=", 1) for label in settings.node_selector)
    mounts = [{"name": "shared", "mountPath": _mount(plan)}, {"name": "shm", "mountPath": "/dev/shm"}]
    spec = {
        **more,
        "terminationGracePeriodSeconds": int(checkpoint.stop_grace_s) + _STOP_MARGIN_S,
        **({"nodeSelector": selected} if selected else {}),
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": settings.claim}},
            # NCCL and loaders exchange data of ranks of one pod there; a container has 64 MiB by default.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
        "containers": [{"name": CONTAINER, **container, "volumeMounts": mounts}],
    }
    return {"metadata": {"labels": _labels(plan)}, "spec": spec}


def _resources(plan: LaunchPlan) -> dict[str, Any]:
    settings = plan.config.cluster.kubernetes
    wanted = {
        settings.gpu_resource: settings.gpus_per_pod or None,
        "cpu": settings.cpus_per_pod,
        "memory": settings.memory_per_pod,
    }
    limits = {name: str(value) for name, value in wanted.items() if value is not None}
    return {"limits": limits, "requests": limits} if limits else {}


def _environment(plan: LaunchPlan) -> dict[str, str]:
    """The variables that all pods have alike, and the files of the run folder, which the first pod lays there."""
    same = {one.name: one.value for one in plan.nodes[0].environment if one.name not in PER_POD}
    return {**same, **{FILES[name]: text for name, text in plan.files if name in FILES}}


def _command(plan: LaunchPlan) -> list[str]:
    first = plan.nodes[0]
    return [first.argv[0], "-m", "cluster.launch.kubernetes.pod", first.folder, *first.argv]


def _mount(plan: LaunchPlan) -> str:
    """Where the claim is mounted."""
    return plan.nodes[0].cwd


def _port(plan: LaunchPlan) -> int:
    return plan.config.cluster.master_port or _MASTER_PORT


def _labels(plan: LaunchPlan) -> dict[str, str]:
    return {RUN_LABEL: plan.run_id}


def _variables(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "value": _literal(value)} for name, value in values.items()]


def _literal(text: str) -> str:
    """A text in which Kubernetes would otherwise expand $(NAME)."""
    return text.replace("$", "$$")


class _Dumper(yaml.SafeDumper):
    """YAML for people: texts of several lines as such, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def _yaml_text(document: Mapping[str, Any]) -> str:
    return yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=100_000)
