"""Runs on Kubernetes, led by kubectl alone: a stand-in starts the commands of the pods as processes of this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes_rig import JOB, FakeCluster, fake_cluster, kubernetes_config, kubernetes_plan, pod, with_container
from testkit import ROOT
from testkit.fake_run import Led, Observer
from testkit.tiny_training import TINY_MODEL
from testkit.waiting import wait_for

from cluster.control.attempt import StopRequests, begin_attempt
from cluster.control.controller import request_cancel
from cluster.control.link import LaunchOutcome, NodeStatus, Phase
from cluster.control.runner import SurveyOptions
from cluster.launch.kubernetes.pods import KubernetesJob, read_answer
from cluster.launch.kubernetes.runner import RUNNER
from engine.config.settings import AttentionConfig, CheckpointConfig, DataConfig, LossConfig, TrainConfig
from engine.predict.memory import Hardware
from engine.runs.files import read_json_object
from engine.runs.folder import RunFolder, create_run

SAVED = CheckpointConfig(at_end=True)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    made, variables = fake_cluster(tmp_path / "cluster", os.environ["PATH"])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    yield made
    subprocess.run(["kubectl", "delete", "--grace-period=0"], check=True, timeout=100)


@pytest.mark.thorough
def test_the_real_trainer_runs_in_two_pods_and_its_figures_come_here(tmp_path: Path, cluster: FakeCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(1500)))
    config = kubernetes_config(str(tmp_path / "shared"))
    environment = (f"PYTHONPATH={ROOT}", f"BURST_CACHE_DIR={tmp_path / 'cache'}")
    config = replace(
        config,
        model=replace(TINY_MODEL, vocab_size=512),
        data=DataConfig(format="text", paths=(str(tmp_path / "text.txt"),), tokenizer="bytes", validation_fraction=0.2),
        attention=AttentionConfig(preset="ring"),
        loss=LossConfig(chunk_tokens=64),
        train=TrainConfig(steps=3, seq_len=64, eval_samples=1, checkpoint=SAVED),
        cluster=replace(config.cluster, master_port=port, environment=environment),
    )
    led = Led(kubernetes_plan(tmp_path / "runs", config, "engine.train")).begin()
    outcome = led.wait()
    assert outcome.status == "completed", (outcome.failure, cluster.said())
    assert [row["step"] for row in led.run.read_metrics()] == [1, 2, 3]
    on_claim = RunFolder(tmp_path / "shared" / "runs" / "tiny" / led.run.run_id)
    assert led.run.read_metrics() == on_claim.read_metrics()
    assert led.run.read_summary() == on_claim.read_summary()
    assert (on_claim.path / "checkpoints" / "step-00000003").is_dir()


def test_a_rank_that_fails_is_blamed_with_its_error_and_what_it_said(tmp_path: Path, cluster: FakeCluster) -> None:
    led = Led(kubernetes_plan(tmp_path / "runs", kubernetes_config(str(tmp_path / "shared"), "raise"))).begin()
    outcome = led.wait()
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.host) == (1, "pod-1")
    assert led.run.read_state()["lease_s"] is None
    assert "starting the ranks" in [event["phase"] for event in led.run.read_events() if event["kind"] == "phase"]
    log = led.run.log_path("pod-1", 1).read_text()
    assert log.count("rank 1 in mode raise") == 1
    assert [row["step"] for row in led.run.read_metrics()] == list(range(1, len(led.run.read_metrics()) + 1))


def test_a_run_is_taken_over_without_a_line_twice_cancelled_in_order_and_begun_again(
    tmp_path: Path, cluster: FakeCluster
) -> None:
    plan = kubernetes_plan(tmp_path / "runs", kubernetes_config(str(tmp_path / "shared"), "saves"))
    run = create_run(Path(plan.run_path), dict(plan.files), world_size=plan.world_size)
    begin_attempt(plan, run, None)
    killed = KubernetesJob(plan, run)  # of a launcher that does not live to see the end
    killed.begin(start=True)

    def has_five_steps() -> bool:
        killed.look()  # here, not in its thread: a launcher that was killed does not fetch any more
        return len(run.read_metrics()) == 5 and run.log_path("pod-1", 1).exists()  # the pods begin as they can

    wait_for(has_five_steps, lambda: str(cluster.said()), 60.0)
    killed.close()
    assert request_cancel(run).state == "cancelled"
    assert [event["step"] for event in run.read_events() if event["kind"] == "checkpoint"] == [5]
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4, 5]
    assert run.log_path("pod-1", 1).read_text().count("in mode saves") == 1
    assert Led(plan, run).begin().wait().status == "completed"  # what `burst resume` does then
    on_claim = RunFolder(tmp_path / "shared" / "runs" / "tiny" / run.run_id)
    assert [attempt.read_metrics() for attempt in run.attempts()] == [one.read_metrics() for one in on_claim.attempts()]
    assert run.read_summary() == on_claim.read_summary()
    assert run.log_path("pod-1", 1).read_text().count("in mode saves") == 2


def test_an_image_that_cannot_be_pulled_ends_the_run_and_an_unschedulable_pod_is_told(
    tmp_path: Path, cluster: FakeCluster
) -> None:
    plan = kubernetes_plan(tmp_path / "runs", kubernetes_config(context="lab", namespace="ml"))
    run = create_run(Path(plan.run_path), dict(plan.files))
    unmet = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3: Insufficient gpu"}
    cluster.answer(JOB, pod(0, phase="Pending", conditions=[unmet]))
    job = KubernetesJob(plan, run, stuck_s=0.0)
    job.look()
    assert "Unschedulable: 0/3: Insufficient gpu" in job.waits_for()
    assert job.refusal() is None
    assert [job.status(node).phase for node in plan.nodes] == ["starting", "starting"]
    reason = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "registry.example/burst:1"'}
    cluster.answer(JOB, with_container(1, "Pending", waiting=reason))
    job.look()
    refusal = job.refusal()
    assert refusal is not None
    assert (refusal.kind, refusal.type, refusal.host) == ("start", "ImagePullBackOff", "pod-1")
    assert "Back-off pulling image" in refusal.message
    label, gone = f"--selector=burst.run={run.run_id}", ("--ignore-not-found", "--cascade=foreground", "--wait=false")
    asked = ["get", "jobsets.jobset.x-k8s.io,pods", label, "--output=json"]
    deleted = ["delete", "jobsets.jobset.x-k8s.io", f"burst-{run.run_id}", *gone]
    at_once = ["delete", "pods", label, "--grace-period=0", "--force", *gone]
    assert [words[:2] for words in cluster.calls] == [["--context=lab", "--namespace=ml"]] * 4
    assert [words[2:] for words in cluster.calls] == [asked, asked, deleted, at_once]


def test_what_a_job_waits_for_and_why_it_gets_no_pods_is_told(tmp_path: Path, cluster: FakeCluster) -> None:
    plan = kubernetes_plan(tmp_path / "runs", kubernetes_config())
    job = KubernetesJob(plan, create_run(Path(plan.run_path), dict(plan.files)))
    suspended, failed = ({"type": kind, "status": "True", "message": "why"} for kind in ("Suspended", "Failed"))
    for conditions, told, why in (
        ([], f"{job.name} waits for its pods", None),
        ([suspended], f"{job.name} is suspended: it waits in its queue", None),
        ([failed], f"{job.name} waits for its pods", f"{job.name} failed: why"),
    ):
        cluster.answer({**JOB, "status": {"conditions": conditions}})
        job.look()
        refusal = job.refusal()
        assert (job.waits_for(), refusal and refusal.message, job.has_ended()) == (told, why, False)
        assert refusal is None or (refusal.kind, refusal.type) == ("start", "KubernetesError")
    cluster.answer(JOB, with_container(1, "Pending", waiting={"reason": "ErrImagePull"}))
    job.look()
    assert job.refusal() is None  # it may be there in a minute
    cluster.answer()
    job.look()
    gone = job.refusal()
    assert (gone and gone.message, job.has_ended()) == (f"{job.name} is gone: somebody deleted it", True)
    cluster.refuse(get="Unable to connect to the server")
    job.look()
    assert job.waits_for() == job.problem == "the cluster does not answer kubectl get: Unable to connect to the server"
    assert job.end_command == f"kubectl delete jobsets.jobset.x-k8s.io {job.name}"


def test_a_cluster_that_would_take_the_job_is_asked_for_all_that_it_needs(tmp_path: Path, cluster: FakeCluster) -> None:
    config = kubernetes_config(memory_per_pod="64Gi")
    survey = RUNNER.survey(config, SurveyOptions())
    survey.prepare(kubernetes_plan(tmp_path / "runs", config))
    assert cluster.calls == [
        ["get", "jobsets.jobset.x-k8s.io", "--output=name", "--selector=burst.run=none"],
        ["get", "persistentvolumeclaim", "runs", "--output=name"],
        ["create", "--dry-run=server", "--output=name", "--filename=-"],
    ]
    assert survey.hardware == Hardware((), 64 << 30, "cluster.kubernetes.memory_per_pod")


FAILED = {"type": "Failed", "status": "True", "message": "maximum restarts exceeded"}
DELETED = {**JOB, "metadata": {**JOB["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}


@pytest.mark.parametrize(
    ("left", "phase", "cause"),
    [
        ([JOB, with_container(0, "Failed", terminated={"exitCode": 137, "reason": "OOMKilled"})], "ended", "failure"),
        ([{**JOB, "status": {"conditions": [FAILED]}}], "ended", "failure"),
        ([JOB, with_container(0, "Succeeded", terminated={"exitCode": 0})], "lost", None),
        ([], "ended", "kubectl delete"),
        ([DELETED, with_container(0, "Failed", terminated={"exitCode": 1})], "ended", "kubectl delete"),
    ],
)
def test_a_pod_that_is_gone_was_ended_by_its_job_or_by_somebody_or_is_lost(
    tmp_path: Path, cluster: FakeCluster, left: list[dict[str, Any]], phase: Phase, cause: str | None
) -> None:
    plan = kubernetes_plan(tmp_path / "runs", kubernetes_config())
    job = KubernetesJob(plan, create_run(Path(plan.run_path), dict(plan.files)))
    cluster.answer(JOB, *(with_container(index, "Running", running={}) for index in (0, 1)))
    job.look()
    assert [job.status(node) for node in plan.nodes] == [NodeStatus(name, "running") for name in ("pod-0", "pod-1")]
    assert job.granted(plan) is plan
    cluster.answer(*left)
    cluster.refuse(logs="Unable to connect to the server")
    job.look()
    shown = read_answer(json.dumps({"items": left})).pods.get(0)
    assert job.status(plan.nodes[0]).is_synced is (shown is None)  # else it has more to say
    cluster.refuse()
    job.look()
    outcome = None if cause is None else {"cause": "stop", "stop_cause": cause, "exit_code": None}
    problem = None if cause else "its pod burst-run-node-0-1-abcde is gone"
    gone = NodeStatus("pod-1", phase, outcome, is_synced=cause is not None, problem=problem)
    first = replace(gone, node="pod-0")
    if shown is not None:
        by = cause if DELETED in left else None
        end = {"cause": "stop" if by else "exit", "stop_cause": by, "exit_code": shown.exit_code}
        first = NodeStatus("pod-0", "ended", end, is_synced=True, failure=shown.failure)
    assert [job.status(node) for node in plan.nodes] == [first, gone]
    assert job.granted(plan) is plan  # the controller sees to the rest
    job.look()
    assert cluster.calls[-1][0] == "get"  # there are no more lines to be had
    folder = Path(plan.run_path) / "nodes/pod-1"
    told = [read_json_object(folder / f"{name}.json") for name in ("supervisor", "outcome")]
    assert told == [{"phase": phase, "pod": "burst-run-node-0-1-abcde", "host": "gpu-7"}, outcome]
    job.stop("failure", 9.0)
    assert shown is None or job.status(plan.nodes[0]) == first  # why it ended is no less known
    job.close()


def test_a_pod_that_begins_between_two_looks_is_not_missed_while_logs_are_fetched(
    tmp_path: Path, cluster: FakeCluster
) -> None:
    plan = kubernetes_plan(tmp_path / "runs", kubernetes_config())
    job = KubernetesJob(plan, create_run(Path(plan.run_path), dict(plan.files)))
    begun = [with_container(index, "Running", running={}) for index in (0, 1)]
    cluster.answer(JOB, begun[0])
    job.look()
    cluster.answer(JOB, *begun)
    (cluster.folder / "held").touch()
    look = threading.Thread(target=job.look)
    look.start()
    wait_for(lambda: sum(words[0] == "logs" for words in cluster.calls) == 2)
    assert (job.granted(plan), job.status(plan.nodes[1])) == (None, NodeStatus("pod-1", "starting"))
    (cluster.folder / "held").unlink()
    look.join()
    assert (job.granted(plan), job.status(plan.nodes[1])) == (plan, NodeStatus("pod-1", "running"))


def test_a_stop_asked_for_before_anything_is_known_of_the_pods_reaches_them_all_the_same(
    tmp_path: Path, cluster: FakeCluster
) -> None:
    plan = kubernetes_plan(tmp_path / "runs", kubernetes_config())
    cluster.answer(JOB, with_container(0, "Running", running={"startedAt": "2026-01-01T00:00:00Z"}))
    job = KubernetesJob(plan, create_run(Path(plan.run_path), dict(plan.files)), poll_s=0.02)
    job.stop("cancel", 9.0)
    assert job.granted(plan) is None
    wait_for(lambda: any(words[0] == "exec" for words in cluster.calls), lambda: str(cluster.calls))
    assert job.status(plan.nodes[0]).phase == "stopping"
    assert job.status(plan.nodes[1]).phase == "starting"
    wait_for(lambda: len([words for words in cluster.calls if words[0] == "logs"]) > 1)
    job.close()
    name, label = "burst-run-node-0-0-abcde", f"--selector=burst.run={plan.run_id}"
    end = [words for words in cluster.calls if words[0] == "exec"]
    assert end == [["exec", name, "--container=node", "--", "sh", "-c", "kill -TERM 1"]]
    first, second, *_ = [words for words in cluster.calls if words[0] == "logs"]
    assert first == ["logs", label, "--container=node", "--prefix", "--timestamps", "--tail=-1", "--ignore-errors"]
    assert second[:-1] == first
    assert 30 < int(second[-1].removeprefix("--since=").removesuffix("s")) < 600
    assert [words[0] for words in cluster.calls[:4]] == [
        "get",
        "logs",
        "exec",
        "delete",
    ]  # who cannot be told is deleted


def test_a_job_that_is_refused_is_deleted_and_not_asked_about_any_more(tmp_path: Path, cluster: FakeCluster) -> None:
    plan = kubernetes_plan(tmp_path / "runs", kubernetes_config())
    run = create_run(Path(plan.run_path), dict(plan.files))
    cluster.refuse(create="Error from server (Forbidden): jobsets is forbidden")
    outcome = RUNNER.await_nodes(plan, run, Observer(), StopRequests(), start=True)
    assert isinstance(outcome, LaunchOutcome)
    assert outcome.failure is not None
    assert "forbidden" in outcome.failure.message
    verbs = [words[0] for words in cluster.calls]
    assert "delete" in verbs[verbs.index("create") :]  # it may have been created all the same
    wait_for(lambda: f"burst-{plan.run_id}" not in [thread.name for thread in threading.enumerate()])
