"""The job of a run on Kubernetes: what the published schemas accept, and what its pods are told."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_rig import kubernetes_config, kubernetes_plan

from cluster.launch.kubernetes.manifest import FORMS, build_job
from cluster.launch.kubernetes.runner import quantity_bytes
from engine.config.cluster import MachineConfig

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


@KINDS
@pytest.mark.parametrize("settings", [{}, EVERYTHING])
def test_the_published_schema_accepts_the_job_that_the_file_says(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    plan = kubernetes_plan(tmp_path, kubernetes_config(kind=kind, **settings))
    jsonschema.Draft202012Validator(SCHEMAS[kind]).validate(build_job(plan))
    assert yaml.safe_load(dict(plan.files)["job.yaml"]) == build_job(plan)


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
    for machine, gpus, accelerators in (("h100", 0, None), ("cpu", 1, "GPU:1"), ("h100", 4, "H100:4")):
        made = kubernetes_config(gpus_per_pod=gpus)
        cluster = replace(made.cluster, machine=MachineConfig(machine))
        task = yaml.safe_load(FORMS["skypilot"](kubernetes_plan(tmp_path, replace(made, cluster=cluster))))
        asked = {} if accelerators is None else {"accelerators": accelerators}
        assert task["resources"] == {"image_id": "docker:registry.example/burst:1", **asked}


def test_pods_get_the_plan_and_no_text_that_kubernetes_would_expand(tmp_path: Path) -> None:
    plan = kubernetes_plan(tmp_path, kubernetes_config(mode="$(HOME)"))
    (replicated,) = build_job(plan)["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert values["FAKE_MODE"] == "$$(HOME)"
    assert values["BURST_CONFIG"].replace("$$", "$") == dict(plan.files)["config.yaml"]
    assert not {"BURST_NODE", "BURST_RANK_LOGS"} & values.keys()  # of each pod its own
    assert len(f"{container['name']}-0-0-abcde-burst-{plan.run_id}") <= 63


@pytest.mark.parametrize(
    ("text", "expected"), [("1000", 1000), ("512k", 512_000), ("1.5M", 1_500_000), ("64Gi", 64 << 30)]
)
def test_quantities_are_bytes(text: str, expected: int) -> None:
    assert quantity_bytes(text) == expected
