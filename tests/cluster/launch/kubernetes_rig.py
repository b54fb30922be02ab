"""What tests of Kubernetes share: a stand-in for kubectl on PATH, whose cluster is a folder, and runs on it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testkit import FAKE_PYTHON_PATH, KIT, write_program

from cluster.control.runner import SurveyOptions
from cluster.launch.kubernetes.runner import RUNNER
from cluster.plan import LaunchPlan
from engine.config.cluster import ClusterConfig, ContainerConfig, KubernetesConfig
from engine.config.settings import CheckpointConfig, RunConfig, TrainConfig
from engine.runs.folder import new_run_path


@dataclass(frozen=True)
class FakeCluster:
    """The cluster behind the stand-in, as `testkit/fakes/kubectl` describes it."""

    folder: Path

    @property
    def calls(self) -> list[list[str]]:
        """The words of every call of kubectl."""
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def said(self) -> list[str]:
        """What the pods printed, for a test that waits in vain."""
        return [path.read_text()[-2000:] for path in self.folder.glob("*/*/log")]

    def refuse(self, **said: str) -> None:
        """Let these verbs of kubectl fail, with these words."""
        (self.folder / "refuse.json").write_text(json.dumps(said))

    def answer(self, *items: Mapping[str, Any]) -> None:
        """Let kubectl find these objects, and no others."""
        (self.folder / "answer.json").write_text(json.dumps({"items": items}))


def fake_cluster(folder: Path, path: str) -> tuple[FakeCluster, dict[str, str]]:
    """A cluster in `folder`, and the variables with which kubectl finds it."""
    program = (KIT / "fakes" / "kubectl").read_text().split("\n", 1)[1]
    write_program(folder / "bin" / "kubectl", program, sys.executable)
    return FakeCluster(folder), {"FAKE_CLUSTER": str(folder), "PATH": f"{folder / 'bin'}{os.pathsep}{path}"}


def kubernetes_config(shared: str = "/shared", mode: str = "ok", **settings: Any) -> RunConfig:
    """Fake ranks, one in each of two pods."""
    cluster = ClusterConfig(
        launcher="kubernetes",
        num_nodes=2,
        ranks_per_node=1,
        shared_folder=shared,
        python=sys.executable,
        container=ContainerConfig(image="registry.example/burst:1"),
        environment=(f"FAKE_MODE={mode}", f"PYTHONPATH={FAKE_PYTHON_PATH}"),
        kubernetes=KubernetesConfig(claim="runs", **settings),
    )
    train = TrainConfig(steps=5, seq_len=64, checkpoint=CheckpointConfig(at_end=False))
    return RunConfig(exp="tiny", train=train, cluster=cluster)


def kubernetes_plan(runs: Path, config: RunConfig, module: str = "fake_rank") -> LaunchPlan:
    """The plan of a launch, with its job."""
    survey = RUNNER.survey(config, SurveyOptions(dry_run=True, module=module))
    return survey.complete(survey.plan(config, new_run_path(runs, config.exp)))


def pod(index: int, **status: Any) -> dict[str, Any]:
    """A pod as kubectl shows it."""
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {"name": f"burst-run-node-0-{index}-abcde", "labels": labels}
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": "gpu-7"}, "status": status}


def with_container(index: int, phase: str, **state: Any) -> dict[str, Any]:
    """A pod whose container is in this state."""
    return pod(index, phase=phase, containerStatuses=[{"name": "node", "state": state}])


JOB = {"kind": "JobSet", "metadata": {"name": "burst-run"}, "status": {}}
