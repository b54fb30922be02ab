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

from cluster.control.runner import SurveyOptions
from cluster.failure import Failure
from cluster.launch.kubernetes.pods import Pod, PodFiles, read_answer
from cluster.launch.kubernetes.runner import RUNNER
from cluster.launch.scheduler import SchedulerError
from engine.runs.folder import RunFolder, create_run

NAME = "burst-run-node-0-1-abcde"
KILLED = {"exitCode": 137, "reason": "OOMKilled"}
OOM_TEXT = f"pod {NAME} on gpu-7: OOMKilled: its container used more memory than cluster.kubernetes.memory_per_pod"
OOM = Failure("oom", "OOMKilled", OOM_TEXT)
EVICTED = Failure("node_lost", "Kubernetes: Evicted", f"pod {NAME} on gpu-7: Evicted: low on memory")
NO_CONTEXT = "Error in configuration: context was not found for specified context: lab"
TRIES = "E1125 memcache.go:265 "  # as kubectl says for every try
NO_SERVER = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
NO_KIND = 'error: the server doesn\'t have a resource type "jobsets"'
NO_CLAIM = 'Error from server (NotFound): persistentvolumeclaims "runs" not found'


@pytest.mark.parametrize(
    ("said", "kind", "told"),
    [
        (NO_CONTEXT, "context", "set cluster.kubernetes.context"),
        (NO_SERVER, "context", "kubectl has no context"),
        (NO_KIND, "crd", "install JobSet .*, or set cluster.kubernetes.kind=TrainJob"),
        (f"{TRIES * 40}Unable to connect to the server: i/o timeout", "silent", r"answer kubectl get: .{200}$"),
        (NO_CLAIM, "refused", '"runs" not found'),
        (TRIES * 40, "refused", r"kubectl get: .{500}$"),
        (None, "missing", "kubectl not found"),
    ],
)
def test_what_kubectl_complains_of_is_told_with_what_to_do_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, kind: str, told: str
) -> None:
    cluster, variables = fake_cluster(tmp_path / "cluster", os.environ["PATH"])
    for name, value in ({"PATH": str(tmp_path)} if said is None else variables).items():
        monkeypatch.setenv(name, value)
    cluster.refuse(get=said or "")
    with pytest.raises(SchedulerError, match=told) as caught:
        RUNNER.survey(kubernetes_config(), SurveyOptions())
    assert (caught.value.kind, caught.value.exit_code) == (kind, 1 if kind == "refused" else 3)
    assert said is None or TRIES in said or said in str(caught.value)
    if kind == "crd":
        with pytest.raises(SchedulerError, match=r"install Kubeflow Trainer, or set cluster.kubernetes.kind=JobSet"):
            RUNNER.survey(kubernetes_config(kind="TrainJob"), SurveyOptions())
    if said == NO_CONTEXT:
        with pytest.raises(SchedulerError, match="kubectl has no context lab: set"):
            RUNNER.survey(kubernetes_config(context="lab"), SurveyOptions())
    # A rehearsal does without a cluster.
    assert RUNNER.survey(kubernetes_config(), SurveyOptions(dry_run=True)).plan(kubernetes_config(), tmp_path / "run")


@pytest.mark.parametrize(
    ("status", "code", "failure"),
    [
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, None, EVICTED),
        ({"state": {"terminated": KILLED}}, 137, OOM),
        # A runtime whose pods may restart in place.
        ({"state": {"running": {}}, "lastState": {"terminated": KILLED}}, 137, OOM),
        ({"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}, 0, None),
    ],
)
def test_why_kubernetes_ended_a_pod_is_the_failure(
    status: dict[str, Any], code: int | None, failure: Failure | None
) -> None:
    status = status if "phase" in status else {"phase": "Running", "containerStatuses": [{"name": "node", **status}]}
    found = read_answer(json.dumps({"items": [JOB, pod(1, **status)]})).pods[1]
    assert (found.phase, found.host, found.exit_code, found.failure) == ("ended", "gpu-7", code, failure)


def test_a_job_and_its_pods_are_read_and_of_two_pods_of_an_index_the_one_that_is_not_over() -> None:
    conditions = [{"type": str(is_so), "status": str(is_so), "message": "m\nn"} for is_so in (True, False)]
    job = {**JOB, "status": {"conditions": conditions}}
    over = [with_container(1, "Failed", terminated={"exitCode": 9, "reason": "Error", "message": "x"})]
    pods = [pod(0, phase="Succeeded"), *over, with_container(1, "Running", running={}), pod(2, phase="Failed")]
    ended = Pod(0, "burst-run-node-0-0-abcde", "ended", "gpu-7", 0)
    expected = {0: ended, 1: Pod(1, NAME, "running", "gpu-7"), 2: Pod(2, NAME.replace("-1-", "-2-"), "ended", "gpu-7")}
    for items in ([job, *pods], [job, *reversed(pods)]):
        found = read_answer(json.dumps({"items": items}))
        assert (found.conditions, found.pods) == ({"True": "m n"}, expected)
    assert ended.failure is None
    (failed,) = read_answer(json.dumps({"items": over})).pods.values()
    assert failed == Pod(1, NAME, "ended", "gpu-7", 9, "Error", "x")
    assert failed.failure is None
    with pytest.raises(SchedulerError, match="its answer makes no sense"):
        read_answer("{}")


@pytest.mark.parametrize(
    ("waiting", "trouble", "is_stuck"),
    [
        ({}, "", False),
        ({"reason": "PodInitializing"}, "PodInitializing", False),
        ({"reason": "ContainerCreating"}, "ContainerCreating", False),
        ({"reason": "RunContainerError", "message": "no device"}, "RunContainerError: no device", True),
    ],
)
def test_a_container_that_is_being_made_is_waited_for_and_any_other_trouble_told(
    waiting: dict[str, str], trouble: str, is_stuck: bool
) -> None:
    shown = with_container(1, "Pending", waiting=waiting)
    expected = Pod(1, NAME, "waiting", "gpu-7", trouble=trouble, is_stuck=is_stuck)
    assert read_answer(json.dumps({"items": [JOB, shown]})).pods == {1: expected}


def keyed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = ("items", "kind", "metadata", "labels", "status", "containerStatuses", "state", "terminated", "conditions")
    return st.dictionaries(st.sampled_from(names), inner, max_size=4)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner) | keyed(inner)))
def test_an_answer_of_any_shape_is_read_or_refused(document: object) -> None:
    with contextlib.suppress(SchedulerError):
        read_answer(json.dumps(document))


def files_of(run: RunFolder) -> set[str]:
    return {path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()}


def test_what_pods_print_writes_no_other_file(tmp_path: Path) -> None:
    plan = kubernetes_plan(tmp_path, kubernetes_config())
    run = create_run(Path(plan.run_path), {})
    before, files = files_of(run), PodFiles(run, plan.nodes[1])
    lines = ["@burst ../../x {}", "@burst metrics.jsonl {}", "@burst config.yaml {}", "rank0000| not mine", "@burst x"]
    lines += [f"@burst rank0001.error.json {text}" for text in ("[1]", "[" * 100_000, "\ud800")]
    files.take("pod", [(f"2026-11-25T00:00:0{at}Z", line) for at, line in enumerate(lines)])
    assert files_of(run) - before == {"logs/pod-1/torchrun.log", "nodes/pod-1/fetched.json"}
    assert {path.stat().st_mode & 0o777 for path in run.path.glob("*/pod-1")} == {0o700}


def test_lines_are_written_once_where_they_belong(tmp_path: Path) -> None:
    plan = kubernetes_plan(tmp_path, kubernetes_config())
    run = create_run(Path(plan.run_path), {})
    documents = {"run.json": {"state": "x"}, "summary.json": {"y": 1}, "rank0000.error.json": {"z": 2}}
    said = [f"@burst {name} {json.dumps(document)}" for name, document in documents.items()]
    said += ["rank0000| é", "rank0001| not mine", '@burst metrics.jsonl {"step": 1}', "rank0000| last"]
    lines = [(f"2026-11-25T00:00:0{at // 2}Z", line) for at, line in enumerate(said)]
    for number in range(len(lines)):  # each time another launcher, which sees two lines again
        PodFiles(run, plan.nodes[0]).take("pod", lines[max(0, number - 2) : number + 1])
    PodFiles(run, plan.nodes[0]).take("pod", lines)
    places = ("nodes/pod-0/run.json", "summary.json", "logs/pod-0/rank0000.error.json")
    assert [json.loads((run.path / place).read_text()) for place in places] == list(documents.values())
    assert run.log_path("pod-0", 0).read_text() == "é\nlast\n"
    assert run.read_metrics() == [{"step": 1}]
    assert (run.path / "logs/pod-0/torchrun.log").read_text() == "rank0001| not mine\n"
    PodFiles(run, plan.nodes[0]).take("next pod", lines[-1:])
    assert run.log_path("pod-0", 0).read_text() == "é\nlast\nlast\n"


_SPEAKS = """
import os, sys, time
from pathlib import Path

run, log = Path(sys.argv[1]), Path(sys.argv[1]) / "logs" / "pod-0" / "rank0000.log"
for log_text, row in ("one\\ntw", {"step": 1}), ("o\\nlast", {"step": 2}):
    with log.open("a") as file:
        file.write(log_text)
    with (run / "metrics.jsonl").open("a") as file:
        print(str(row).replace("'", '"'), file=file)
    time.sleep(1.2)  # for a look between
(log.parent / "rank0000.error.json").write_text('{"type": "E"}')
own = {"BURST_NODE": "pod-0", "BURST_RANK_LOGS": str(log.parent)}
assert own.items() <= os.environ.items() and "BURST_CONFIG" not in os.environ, os.environ
assert os.environ["TORCH_FR_DUMP_TEMP_FILE"].startswith(str(log.parent))
sys.exit(3)
"""
_STOPPED = """
import os, signal, sys
from cluster.launch.kubernetes.pod import main

class Told(dict):
    def __getitem__(self, name):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(name)

class Words(list):
    def __getitem__(self, at):
        if isinstance(at, slice):  # the command, which is about to begin
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(at)

when, *words = sys.argv[1:]
sys.exit(main(words, Told(os.environ)) if when == "before" else main(Words(words), os.environ))
"""


def first_pod(tmp_path: Path, *words: str) -> tuple[RunFolder, subprocess.CompletedProcess[str]]:
    """A run whose last attempt could not say its end, and what came of Python with these words in its first pod."""
    run = create_run(Path(kubernetes_plan(tmp_path, kubernetes_config()).run_path), {})
    run.transition("starting")
    command = [sys.executable, *(word.replace("RUN", str(run.path)) for word in words)]
    environment = {**os.environ, "PET_NODE_RANK": "0", "BURST_CONFIG": "exp: tiny\n", "BURST_MEMORY_PLAN": "{}\n"}
    return run, subprocess.run(command, env=environment, cwd=ROOT, timeout=100, capture_output=True, text=True)


def test_a_pod_prints_every_line_of_its_ranks_once_and_what_they_left(tmp_path: Path) -> None:
    run, done = first_pod(tmp_path, "-m", "cluster.launch.kubernetes.pod", "RUN", sys.executable, "-c", _SPEAKS, "RUN")
    lines = [line for line in done.stdout.splitlines() if "run.json" not in line]
    assert [line for line in lines if line.startswith("rank")] == ["rank0000| one", "rank0000| two", "rank0000| last"]
    metrics = [f'@burst metrics.jsonl {{"step": {step}}}' for step in (1, 2)]
    assert [line for line in lines if line.startswith("@")] == [*metrics, '@burst rank0000.error.json {"type": "E"}']
    states = [json.loads(line.split(" ", 2)[2])["state"] for line in done.stdout.splitlines() if "run.json" in line]
    assert (states, done.returncode) == (["starting", "failed"], 3)
    history = [entry["state"] for entry in run.read_state()["history"]]
    assert history == ["planned", "starting", "failed", "starting", "failed"]
    assert (run.path / "config.yaml").read_text() == "exp: tiny\n"
    assert (run.path / "memory_plan.json").read_text() == "{}\n"
    assert (run.path / "logs/pod-0").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_pod_ended_before_or_while_its_ranks_begin_ends_them_and_says_so(tmp_path: Path, when: str) -> None:
    run, done = first_pod(tmp_path, "-c", _STOPPED, when, "RUN", "sh", "-c", "echo began; exec sleep 9")
    assert (done.returncode, run.read_state()["state"]) == (128 + signal.SIGTERM, "failed")
    assert when == "meanwhile" or "began" not in done.stdout
