"""What kubectl says, recorded: its complaints, the states of pods, and lines of their logs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_rig import JOB, fake_cluster, kubernetes_config, kubernetes_plan, pod, with_container
from testkit import ROOT

from cluster.launch.kubernetes import RUNNER
from cluster.launch.pods import Kubectl, Pod, PodFiles, read_answer
from cluster.launch.runner import Asked
from cluster.launch.scheduler import SchedulerError
from engine.config.cluster import KubernetesConfig
from engine.runs.folder import create_run

NAME = "burst-run-node-0-1-abcde"
KILLED = {"exitCode": 137, "reason": "OOMKilled"}


@pytest.mark.parametrize(
    ("said", "kind", "told"),
    [
        (
            "Error in configuration: context was not found for specified context: lab",
            "context",
            "set cluster.kubernetes.context",
        ),
        (
            "The connection to the server localhost:8080 was refused - did you specify the right host or port?",
            "context",
            "kubectl has no context",
        ),
        (
            'error: the server doesn\'t have a resource type "jobsets"',
            "crd",
            "install JobSet .*, or set cluster.kubernetes.kind=TrainJob",
        ),
        (
            "Unable to connect to the server: dial tcp: i/o timeout",
            "silent",
            "the cluster does not answer",
        ),
        ('Error from server (NotFound): persistentvolumeclaims "runs" not found', "refused", '"runs" not found'),
    ],
)
def test_what_kubectl_complains_of_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, kind: str, told: str
) -> None:
    cluster, variables = fake_cluster(tmp_path / "cluster", os.environ["PATH"])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cluster.refuse(get=said)
    with pytest.raises(SchedulerError, match=told) as caught:
        Kubectl(KubernetesConfig(claim="runs")).check()
    assert caught.value.kind == kind


def test_without_kubectl_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="kubectl not found"):
        RUNNER.survey(kubernetes_config(), Asked())
    assert RUNNER.survey(kubernetes_config(), Asked(dry_run=True)).plan(kubernetes_config(), tmp_path / "run")


@pytest.mark.parametrize(
    ("status", "kind", "told"),
    [
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "node_lost", "Evicted: low on memory"),
        (
            {
                "containerStatuses": [
                    {"name": "node", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
                ]
            },
            "oom",
            "cluster.kubernetes.memory_per_pod",
        ),
        # A runtime whose pods may restart in place.
        (
            {
                "phase": "Running",
                "containerStatuses": [
                    {
                        "name": "node",
                        "state": {"running": {}},
                        "lastState": {"terminated": KILLED},
                    }
                ],
            },
            "oom",
            "OOMKilled",
        ),
    ],
)
def test_why_kubernetes_ended_a_pod_is_the_failure(status: dict[str, Any], kind: str, told: str) -> None:
    found = read_answer(json.dumps({"items": [JOB, pod(1, **status)]})).pods[1]
    assert found.phase == "ended"
    assert found.failure is not None
    assert (found.failure.kind, told in found.failure.message) == (kind, True)


@pytest.mark.parametrize(
    ("waiting", "pod"),
    [
        ({}, Pod(1, NAME, "waiting", "gpu-7")),
        ({"reason": "PodInitializing"}, Pod(1, NAME, "waiting", "gpu-7", trouble="PodInitializing")),
        ({"reason": "ContainerCreating"}, Pod(1, NAME, "waiting", "gpu-7", trouble="ContainerCreating")),
        (
            {"reason": "CreateContainerError", "message": "no such device"},
            Pod(1, NAME, "waiting", "gpu-7", trouble="CreateContainerError: no such device", is_stuck=True),
        ),
    ],
)
def test_a_container_that_is_being_made_is_waited_for_and_any_other_trouble_told(
    waiting: dict[str, str], pod: Pod
) -> None:
    shown = with_container(1, "Pending", waiting=waiting)
    assert read_answer(json.dumps({"items": [JOB, shown]})).pods == {1: pod}


def keyed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = ("items", "kind", "metadata", "labels", "status", "containerStatuses", "state", "terminated", "conditions")
    return st.dictionaries(st.sampled_from(names), inner, max_size=4)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner) | keyed(inner)))
def test_an_answer_of_any_shape_is_read_or_refused(document: object) -> None:
    with contextlib.suppress(SchedulerError):
        read_answer(json.dumps(document))


def test_what_pods_print_writes_no_other_file(tmp_path: Path) -> None:
    plan = kubernetes_plan(tmp_path, kubernetes_config())
    run = create_run(Path(plan.run_path), {})
    before = {path for path in run.path.rglob("*") if path.is_file()}
    files = PodFiles(run, plan.nodes[1])
    lines = ["@burst ../../x {}", "@burst metrics.jsonl {}", "@burst config.yaml {}", "rank0000| not mine", "@burst x"]
    lines += [f"@burst rank0001.error.json {text}" for text in ("[1]", "[" * 100_000, "\ud800")]
    files.take("pod", [(f"2026-11-25T00:00:0{at}Z", line) for at, line in enumerate(lines)])
    written = {path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()} - {
        path.relative_to(run.path).as_posix() for path in before
    }
    assert written == {"logs/pod-1/torchrun.log", "nodes/pod-1/fetched.json"}


_SPEAKS = """
import sys, time
from pathlib import Path

run, log = Path(sys.argv[1]), Path(sys.argv[1]) / "logs" / "pod-0" / "rank0000.log"
for log_text, row in ("one\\ntw", {"step": 1}), ("o\\nlast", {"step": 2}):
    with log.open("a") as file:
        file.write(log_text)
    with (run / "metrics.jsonl").open("a") as file:
        print(str(row).replace("'", '"'), file=file)
    time.sleep(1.2)  # for a look between
(log.parent / "rank0000.error.json").write_text('{"type": "E"}')
sys.exit(3)
"""


def test_a_pod_prints_every_line_of_its_ranks_once_and_what_they_left(tmp_path: Path) -> None:
    run = create_run(Path(kubernetes_plan(tmp_path, kubernetes_config()).run_path), {})
    words = (sys.executable, "-m", "cluster.launch.pod", str(run.path), sys.executable, "-c", _SPEAKS, str(run.path))
    environment = {**os.environ, "PET_NODE_RANK": "0", "BURST_CONFIG": "exp: tiny\n"}
    done = subprocess.run(words, env=environment, cwd=ROOT, timeout=100, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "run.json" not in line]
    assert [line for line in lines if line.startswith("rank")] == ["rank0000| one", "rank0000| two", "rank0000| last"]
    metrics = [f'@burst metrics.jsonl {{"step": {step}}}' for step in (1, 2)]
    assert [line for line in lines if line.startswith("@")] == [*metrics, '@burst rank0000.error.json {"type": "E"}']
    states = [json.loads(line.split(" ", 2)[2])["state"] for line in done.stdout.splitlines() if "run.json" in line]
    assert (states, done.returncode) == (["starting", "failed"], 3)
    assert (run.path / "config.yaml").read_text() == "exp: tiny\n"


_STOPPED = """
import os, signal, sys
from cluster.launch.pod import main

class Told(dict):
    def __getitem__(self, name):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(name)

sys.exit(main(sys.argv[1:], Told(os.environ)))
"""


def test_a_pod_that_is_ended_before_its_ranks_begin_starts_none_and_says_so(tmp_path: Path) -> None:
    plan = kubernetes_plan(tmp_path, kubernetes_config())
    run, marker = create_run(Path(plan.run_path), {}), tmp_path / "began"
    words = (sys.executable, "-c", _STOPPED, str(run.path), "touch", str(marker))
    done = subprocess.run(words, env={**os.environ, "PET_NODE_RANK": "0"}, cwd=ROOT, timeout=100, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert run.read_state()["state"] == "failed"
    assert not marker.exists()
