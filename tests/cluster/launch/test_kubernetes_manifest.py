"""The job of a run on Kubernetes: what the published schemas accept, and what its pods are told."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_rig import kubernetes_config, kubernetes_plan

from cluster.launch.kubernetes import quantity_bytes
from cluster.launch.manifest import FORMS, build_job, skypilot_text
from engine.config.errors import ConfigError
from engine.config.rules import check_config
from engine.config.settings import config_from_dict

GOLDEN = Path(__file__).parent / "fixtures"
SCHEMAS = json.loads((Path(__file__).parent / "kubernetes_schemas.json").read_text())
EVERYTHING = {
    "namespace": "ml",
    "gpus_per_pod": 1,
    "cpus_per_pod": 8,
    "memory_per_pod": "64Gi",
    "node_selector": ("cloud.example/pool=h100",),
    "queue": "research",
}
KINDS = pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
# Keys of these are free: labels, names of resources, environment.
_FREE = {"labels", "nodeSelector", "limits", "requests"}


@KINDS
@pytest.mark.parametrize("settings", [{}, EVERYTHING])
def test_the_published_schema_accepts_the_job_that_the_file_says(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    plan = kubernetes_plan(tmp_path, kubernetes_config(kind=kind, **settings))
    jsonschema.Draft202012Validator(SCHEMAS[kind]).validate(build_job(plan))
    assert yaml.safe_load(dict(plan.files)["job.yaml"]) == build_job(plan)


@KINDS
def test_the_schema_knows_every_key_of_the_job(tmp_path: Path, kind: str) -> None:
    job = build_job(kubernetes_plan(tmp_path, kubernetes_config(kind=kind, **EVERYTHING)))
    for path in keys_of(job["spec"], ("spec",)):
        damaged = deepcopy(job)
        place: Any = damaged
        for step in path[:-1]:
            place = place[step]
        place[f"{path[-1]}x"] = place.pop(path[-1])
        assert not jsonschema.Draft202012Validator(SCHEMAS[kind]).is_valid(damaged), path


def keys_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every key that a schema names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            if key not in _FREE:
                yield from keys_of(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from keys_of(inner, (*path, index))


def container_of(job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """What says command, image and environment of a pod, and the values of the latter."""
    container = job["spec"].get("trainer")
    if container is None:
        (replicated,) = job["spec"]["replicatedJobs"]
        (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    return container, {each["name"]: each.get("value") for each in container["env"]}


@pytest.mark.parametrize("form", ["JobSet", "TrainJob", "skypilot"])
def test_the_file_of_a_job_is_as_it_was_agreed(tmp_path: Path, form: str) -> None:
    config = kubernetes_config(kind="JobSet" if form == "skypilot" else form, **EVERYTHING)
    plan = kubernetes_plan(tmp_path, replace(config, cluster=replace(config.cluster, python="python", environment=())))
    text = FORMS["skypilot" if form == "skypilot" else "kubernetes"](plan)
    before, _, config_text = text.partition("BURST_CONFIG")
    indent = re.search(r": \|\n( +)", config_text)
    assert indent is not None
    written = textwrap.indent(dict(plan.files)["config.yaml"], indent[1])
    assert written in config_text
    said = (before + "BURST_CONFIG" + config_text.replace(written, "...\n")).replace(plan.run_id, "RUN")
    assert said == (GOLDEN / f"{form}.yaml").read_text()


def test_what_is_not_said_of_pods_is_that_of_one_on_the_usual_mount(tmp_path: Path) -> None:
    config = kubernetes_config()
    more: dict[str, Any] = {"num_nodes": None, "shared_folder": None, "python": None, "interface": "eth1"}
    plan = kubernetes_plan(tmp_path, replace(config, cluster=replace(config.cluster, **more)))
    (node,) = plan.nodes
    assert (node.cwd, node.argv[0], plan.launcher, plan.is_exclusive) == ("/shared", "python", "kubernetes", False)
    told = {one.name: one.value for one in node.environment}
    assert (told["GLOO_SOCKET_IFNAME"], told["OMP_NUM_THREADS"]) == ("eth1", "1")


@KINDS
def test_pods_get_the_plan_and_nothing_that_kubernetes_would_expand(tmp_path: Path, kind: str) -> None:
    plan = kubernetes_plan(tmp_path, kubernetes_config(kind=kind, mode="$(HOME)"))
    container, values = container_of(build_job(plan))
    assert values["FAKE_MODE"] == "$$(HOME)"
    assert values["BURST_CONFIG"].replace("$$", "$") == dict(plan.files)["config.yaml"]
    assert values["BURST_RUN_ID"] == plan.run_id
    assert not {"BURST_NODE", "BURST_RANK_LOGS"} & values.keys()  # of each pod its own
    assert container["command"][-len(plan.nodes[0].argv) :] == list(plan.nodes[0].argv)
    # Trainer refuses variables that it sets itself.
    assert ("PET_NODE_RANK" in values) == (kind == "JobSet")


def test_a_jobset_names_the_first_pod_as_its_dns_does_and_gives_each_rank_a_gpu(tmp_path: Path) -> None:
    plan = kubernetes_plan(tmp_path, kubernetes_config(gpus_per_pod=1))
    container, values = container_of(build_job(plan))
    name = f"burst-{plan.run_id}"
    assert values["PET_MASTER_ADDR"] == f"{name}-node-0-0.{name}"
    assert (values["PET_NNODES"], values["PET_NPROC_PER_NODE"], values["PET_MASTER_PORT"]) == ("2", "1", "29500")
    assert len(f"{name}-node-0-0-abcde") <= 63
    assert (plan.backend.name, plan.world_size) == ("nccl", 2)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def test_a_task_of_skypilot_runs_the_same_command(tmp_path: Path) -> None:
    plan = kubernetes_plan(tmp_path, kubernetes_config(gpus_per_pod=1))
    task = yaml.safe_load(skypilot_text(plan))
    assert (task["num_nodes"], task["volumes"]) == (2, {"/shared": "runs"})
    assert task["resources"] == {"image_id": "docker:registry.example/burst:1", "accelerators": "GPU:1"}
    assert "PET_NODE_RANK=$SKYPILOT_NODE_RANK" in task["run"]
    assert task["run"].endswith(" ".join(plan.nodes[0].argv) + "\n")
    assert task["envs"]["BURST_CONFIG"] == dict(plan.files)["config.yaml"]


@pytest.mark.parametrize(
    ("text", "expected"), [("1000", 1000), ("512k", 512_000), ("1.5M", 1_500_000), ("64Gi", 64 << 30)]
)
def test_quantities_are_bytes(text: str, expected: int) -> None:
    assert quantity_bytes(text) == expected


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ({"launcher": "kubernetes"}, "needs cluster.kubernetes.claim"),
        ({"launcher": "kubernetes", "kubernetes": {"claim": "runs"}}, "needs cluster.container.image"),
        ({"kubernetes": {"namespace": "-o"}}, "cluster.kubernetes.namespace: got '-o'"),
        ({"kubernetes": {"context": "--kubeconfig=x"}}, "cluster.kubernetes.context"),
        ({"kubernetes": {"memory_per_pod": "many"}}, "a quantity such as 200Gi"),
        ({"kubernetes": {"node_selector": ["a b"]}}, "expected KEY=VALUE"),
    ],
)
def test_settings_that_kubernetes_cannot_be_given_are_refused(cluster: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_config(config_from_dict({"cluster": cluster}))
