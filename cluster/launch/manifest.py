"""The job of a run on Kubernetes as a plain value: a JobSet, or a TrainJob of Kubeflow Trainer. Pure.

Every pod is a node and runs the same command: `cluster.launch.pod` around torchrun, which reads its place from PET_*
variables. Trainer sets these itself; for a JobSet they are part of the manifest.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from cluster.launch.pod import FILES, PER_POD
from cluster.plan import LaunchPlan
from cluster.plan_nodes import RUN_LABEL
from engine.config.cluster import KubernetesConfig

JOB_FILE = "job.yaml"
CONTAINER = "node"  # as Trainer's runtimes call it, and the job of the pods, too
MASTER_PORT = 29500
_API = {"JobSet": "jobset.x-k8s.io/v1alpha2", "TrainJob": "trainer.kubeflow.org/v1alpha1"}
_RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_KEEP_S = 7 * 86400  # an ended JobSet, and so what its pods said
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
    labels = {RUN_LABEL: plan.run_id}
    queue = {} if settings.queue is None else {"kueue.x-k8s.io/queue-name": settings.queue}
    metadata: dict[str, Any] = {"name": job_name(plan.run_id), "labels": {**labels, **queue}}
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    spec = _jobset(plan, labels) if settings.kind == "JobSet" else _trainjob(plan, labels)
    return {"apiVersion": _API[settings.kind], "kind": settings.kind, "metadata": metadata, "spec": spec}


def job_text(plan: LaunchPlan) -> str:
    """`build_job` as YAML."""
    return yaml_text(build_job(plan))


def skypilot_text(plan: LaunchPlan) -> str:
    """The task of SkyPilot that runs the pods' command on nodes of some cloud, as YAML."""
    cluster = plan.config.cluster
    settings = cluster.kubernetes
    # Of a machine that nobody has named, SkyPilot is told no accelerator: it then asks for one.
    gpus = {"accelerators": f"{_accelerator(plan)}:{settings.gpus_per_pod}"} if settings.gpus_per_pod else {}
    cpus = {} if settings.cpus_per_pod is None else {"cpus": f"{settings.cpus_per_pod}+"}
    variables = {variable["name"]: variable["value"] for variable in _environment(plan)}
    run = "\n".join(
        [
            "export PET_NNODES=$SKYPILOT_NUM_NODES PET_NODE_RANK=$SKYPILOT_NODE_RANK",
            f"export PET_NPROC_PER_NODE={plan.backend.local_ranks} PET_MASTER_PORT={_port(plan)}",
            'export PET_MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1)',
            shlex.join(pod_command(plan)),
        ]
    )
    task = {
        "name": job_name(plan.run_id),
        "num_nodes": len(plan.nodes),
        "resources": {"image_id": f"docker:{cluster.container.image}", **gpus, **cpus},
        "volumes": {mount_of(plan): settings.claim},
        "envs": variables,
        "run": run + "\n",
    }
    return yaml_text(task)


FORMS = {"kubernetes": job_text, "skypilot": skypilot_text}


def pod_command(plan: LaunchPlan) -> list[str]:
    """What every pod runs."""
    first = plan.nodes[0]
    return [first.argv[0], "-m", "cluster.launch.pod", first.folder, *first.argv]


def mount_of(plan: LaunchPlan) -> str:
    """Where the claim is mounted."""
    return plan.nodes[0].cwd


def yaml_text(document: Mapping[str, Any]) -> str:
    """YAML for people: keys in their order, texts of several lines as such."""
    return yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=100_000)


def _jobset(plan: LaunchPlan, labels: Mapping[str, str]) -> dict[str, Any]:
    count, name = len(plan.nodes), job_name(plan.run_id)
    place = [
        _variable("PET_NNODES", str(count)),
        _variable("PET_NPROC_PER_NODE", str(plan.backend.local_ranks)),
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _RANK}}},
        _variable("PET_MASTER_ADDR", f"{name}-{CONTAINER}-0-0.{name}"),
        _variable("PET_MASTER_PORT", str(_port(plan))),
    ]
    container = {
        "name": CONTAINER,
        "image": plan.config.cluster.container.image,
        "command": _literal(pod_command(plan)),
        "env": [*place, *_escaped(_environment(plan))],
        "resources": _resources(plan),
        "volumeMounts": _mounts(plan),
    }
    pod = {"restartPolicy": "Never", **_pod(plan), "containers": [container]}
    job = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 0,  # who begins again is `burst`: from a checkpoint, and not after every mistake
        "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
    }
    return {
        "ttlSecondsAfterFinished": _KEEP_S,
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": {"spec": job}}],
    }


def _trainjob(plan: LaunchPlan, labels: Mapping[str, str]) -> dict[str, Any]:
    pod = {**_pod(plan), "containers": [{"name": CONTAINER, "volumeMounts": _mounts(plan)}]}
    job = {"name": CONTAINER, "template": {"spec": {"template": {"metadata": {"labels": dict(labels)}, "spec": pod}}}}
    return {
        "runtimeRef": {"name": plan.config.cluster.kubernetes.runtime},
        "trainer": {
            "image": plan.config.cluster.container.image,
            "command": _literal(pod_command(plan)),
            "env": _escaped(_environment(plan)),
            "numNodes": len(plan.nodes),
            "numProcPerNode": plan.backend.local_ranks,
            "resourcesPerNode": _resources(plan),
        },
        "runtimePatches": [
            {
                "manager": "burst.run/launch",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
            }
        ],
    }


def _pod(plan: LaunchPlan) -> dict[str, Any]:
    """What a JobSet and a patch of a TrainJob say alike of a pod."""
    settings, checkpoint = plan.config.cluster.kubernetes, plan.config.train.checkpoint
    labels = dict(label.split("=", 1) for label in settings.node_selector)
    return {
        "terminationGracePeriodSeconds": int(checkpoint.stop_grace_s) + _STOP_MARGIN_S,
        **({"nodeSelector": labels} if labels else {}),
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": settings.claim}},
            # NCCL and loaders exchange data of ranks of one pod there; a container has 64 MiB by default.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _mounts(plan: LaunchPlan) -> list[dict[str, str]]:
    return [{"name": "shared", "mountPath": mount_of(plan)}, {"name": "shm", "mountPath": "/dev/shm"}]


def _resources(plan: LaunchPlan) -> dict[str, Any]:
    settings = plan.config.cluster.kubernetes
    wanted: dict[str, Any] = {
        settings.gpu_resource: settings.gpus_per_pod or None,
        "cpu": settings.cpus_per_pod,
        "memory": settings.memory_per_pod,
    }
    limits = {name: str(value) for name, value in wanted.items() if value is not None}
    return {"limits": limits, "requests": dict(limits)} if limits else {}


def _environment(plan: LaunchPlan) -> list[dict[str, str]]:
    """The variables that all pods have alike, and the files of the run folder, which the first pod lays there."""
    same = [variable for variable in plan.nodes[0].environment if variable.name not in PER_POD]
    files = [_variable(FILES[name], text) for name, text in plan.files if name in FILES]
    return [*(_variable(variable.name, variable.value) for variable in same), *files]


def _accelerator(plan: LaunchPlan) -> str:
    name = plan.config.cluster.machine.name
    return "GPU" if name in ("auto", "cpu") else name.upper()


def _port(plan: LaunchPlan) -> int:
    return plan.config.cluster.master_port or MASTER_PORT


def _variable(name: str, value: str) -> dict[str, str]:
    return {"name": name, "value": value}


def _escaped(variables: list[dict[str, str]]) -> list[dict[str, str]]:
    return [_variable(each["name"], each["value"].replace("$", "$$")) for each in variables]


def _literal(words: list[str]) -> list[str]:
    """Words in which Kubernetes would otherwise expand $(NAME)."""
    return [word.replace("$", "$$") for word in words]


class _Dumper(yaml.SafeDumper):
    """Without anchors, which kubectl reads and people do not."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
