"""kubectl, and what it says of a run's job and pods, as values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.failure import Failure
from cluster.launch.manifest import CONTAINER, job_name, resource_of
from cluster.launch.scheduler import SchedulerError, run_client
from cluster.plan_nodes import RUN_LABEL
from cluster.remote_text import one_line
from engine.config.cluster import KubernetesConfig

TIMEOUT_S = 30.0
_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
# What a container waits for that comes by itself.
_STARTS = ("ContainerCreating", "PodInitializing")
_SILENT = re.compile(r"was refused|Unable to connect|timed? ?out|no such host|connection reset|TLS handshake", re.I)
_NO_CONTEXT = re.compile(r"context was not found|current-context is not set|localhost:8080")
_NO_KIND = re.compile(r"doesn't have a resource type|no matches for kind|could not find the requested resource")


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl for one cluster."""

    settings: KubernetesConfig

    def run(self, *words: str, stdin: str = "", timeout_s: float = TIMEOUT_S) -> str:
        """What it printed. Raises SchedulerError, also of kind context or crd, which says what to do."""
        places = (("--context", self.settings.context), ("--namespace", self.settings.namespace))
        argv = ("kubectl", *(f"{name}={value}" for name, value in places if value is not None), *words)
        done = run_client(argv, "Kubernetes' client", timeout_s=timeout_s, stdin=stdin)
        if done.returncode == 0:
            return done.stdout
        raise self._error(words[0], one_line(done.stderr or done.stdout, 2000) or f"exit code {done.returncode}")

    def check(self) -> None:
        """Raise SchedulerError unless jobs of the kind can be created, and the claim is there."""
        self.run("get", resource_of(self.settings), "--output=name", f"--selector={RUN_LABEL}=none")
        self.run("get", "persistentvolumeclaim", self.settings.claim or "", "--output=name")

    def query(self, run_id: str) -> Answer:
        """The job of the run and its pods."""
        what = f"{resource_of(self.settings)},pods"
        return read_answer(self.run("get", what, f"--selector={RUN_LABEL}={run_id}", "--output=json"))

    def delete(self, run_id: str, *, at_once: bool = False, wait: bool = False) -> None:
        """Delete the job; its pods get SIGTERM and their grace, or none."""
        # Foreground: the job is gone once its pods are, which bear the label of the next attempt's, too.
        words = ("--ignore-not-found", "--cascade=foreground", f"--wait={str(wait).lower()}")
        self.run("delete", resource_of(self.settings), job_name(run_id), *words, timeout_s=180 if wait else TIMEOUT_S)
        if at_once:
            self.run("delete", "pods", f"--selector={RUN_LABEL}={run_id}", "--grace-period=0", "--force", *words)

    def _error(self, verb: str, said: str) -> SchedulerError:
        kind, named = self.settings.kind, self.settings.context
        if _NO_CONTEXT.search(said):
            which = "no context" if named is None else f"no context {named}"
            text = f"kubectl has {which}: set cluster.kubernetes.context to one of `kubectl config get-contexts`"
            return SchedulerError("context", f"{text} ({_last(said)})")
        if _NO_KIND.search(said):
            other = "TrainJob" if kind == "JobSet" else "JobSet"
            text = f"the cluster has no {kind} ({resource_of(self.settings)}): install {_PROJECT[kind]}, or set "
            return SchedulerError("crd", f"{text}cluster.kubernetes.kind={other} ({_last(said)})")
        if _SILENT.search(said):
            return SchedulerError("silent", f"the cluster does not answer kubectl {verb}: {_last(said)}")
        return SchedulerError("refused", f"kubectl {verb}: {said[-500:]}")


_PROJECT = {"JobSet": "JobSet (sigs.k8s.io/jobset)", "TrainJob": "Kubeflow Trainer"}


@dataclass(frozen=True)
class Pod:
    """One pod. trouble: why it does not start, in words; is_stuck: it will not start by itself."""

    index: int
    name: str
    phase: Literal["waiting", "running", "ended"]
    host: str = ""
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    trouble: str = ""
    is_stuck: bool = False

    @property
    def failure(self) -> Failure | None:
        """Why Kubernetes itself ended the pod, if it did."""
        if self.phase != "ended" or self.reason in ("", "Error", "Completed"):
            return None
        text = f"pod {self.name} on {self.host or '?'}: {self.reason}{': ' if self.message else ''}{self.message}"
        if self.reason == "OOMKilled":
            more = "its container used more memory than cluster.kubernetes.memory_per_pod"
            return Failure("oom", "OOMKilled", f"{text}: {more}")
        return Failure("node_lost", f"Kubernetes: {self.reason}", text)


@dataclass(frozen=True)
class Answer:
    """A job and its pods by index. conditions: of the job, type -> message; None: there is no such job."""

    conditions: Mapping[str, str] | None = None
    pods: Mapping[int, Pod] = field(default_factory=dict)


def read_answer(text: str) -> Answer:
    """The answer of `kubectl get KIND,pods -o json`. Raises SchedulerError for what makes no sense."""
    try:
        items = json.loads(text)["items"]
        conditions, pods = None, dict[int, Pod]()
        for item in items:
            if item["kind"] != "Pod":
                found = item.get("status", {}).get("conditions", ())
                true = (each for each in found if each.get("status") == "True")
                conditions = {str(each["type"]): one_line(str(each.get("message", "")), 500) for each in true}
            elif (index := item["metadata"].get("labels", {}).get(_INDEX_LABEL, "")).isdecimal():
                pod = _pod(int(index), item)
                # After an eviction the job makes a second pod of the index: the one that is not over counts.
                if pod.index not in pods or pod.phase != "ended":
                    pods[pod.index] = pod
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchedulerError(
            "refused", f"kubectl get: its answer makes no sense: {one_line(str(error), 200)}"
        ) from error
    return Answer(conditions, pods)


def _pod(index: int, item: Mapping[str, Any]) -> Pod:
    status, name = item.get("status", {}), one_line(item["metadata"]["name"], 253)
    host = one_line(str(item.get("spec", {}).get("nodeName", "")), 253)
    containers = [each for each in status.get("containerStatuses", ()) if each.get("name") == CONTAINER]
    state = containers[0].get("state", {}) if containers else {}
    # A runtime may have its containers begun again in place: for a run that is the end all the same.
    restarted = containers[0].get("lastState", {}).get("terminated") if containers else None
    ended = state.get("terminated") or restarted
    if ended is not None or status.get("phase") in ("Succeeded", "Failed"):
        ended = ended or {}
        # An eviction is said of the pod, what a container met of the container.
        reason, source = (status["reason"], status) if status.get("reason") else (ended.get("reason", ""), ended)
        code = ended.get("exitCode", 0 if status.get("phase") == "Succeeded" else None)
        words = (one_line(str(reason), 100), one_line(str(source.get("message", "")), 500))
        return Pod(index, name, "ended", host, code if isinstance(code, int) else None, *words)
    if "running" in state:
        return Pod(index, name, "running", host)
    waiting = state.get("waiting", {})
    if (waiting.get("reason") or _STARTS[0]) not in _STARTS:
        trouble = f"{waiting['reason']}: {waiting.get('message', 'no more is said')}"
        return Pod(index, name, "waiting", host, trouble=one_line(trouble, 500), is_stuck=True)
    unmet = [each for each in status.get("conditions", ()) if each.get("status") == "False"]
    scheduled = next((each for each in unmet if each.get("type") == "PodScheduled"), None)
    if scheduled is not None:
        trouble = f"{scheduled.get('reason', 'Unschedulable')}: {scheduled.get('message', 'no more is said')}"
        return Pod(index, name, "waiting", host, trouble=one_line(trouble, 500))
    return Pod(index, name, "waiting", host, trouble=one_line(str(waiting.get("reason", "")), 100))


def _last(said: str) -> str:
    """The end of what kubectl said: before it stand its own tries, in its log's format."""
    return said[-200:]
