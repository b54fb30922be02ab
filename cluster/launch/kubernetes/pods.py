"""The job and the pods of a run as kubectl shows them: asked about by one thread, ended in order.

What the pods print, see `cluster.launch.kubernetes.pod`, is written into the run folder as if their ranks had done so
there.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cluster.control.attempt import torchrun_log
from cluster.control.link import NodeLink, NodeStatus, Phase
from cluster.failure import Failure
from cluster.launch.kubernetes.manifest import CONTAINER, JOB_FILE, job_name, resource_of
from cluster.launch.kubernetes.pod import DOCUMENTS, MARK, RECORDS, pod_node
from cluster.launch.scheduler import SchedulerError, WatchedJob, run_client
from cluster.plan import LaunchPlan, NodePlan
from cluster.plan_nodes import RUN_LABEL
from cluster.remote_text import one_line
from engine.config.cluster import KubernetesConfig
from engine.runs.files import parse_line, read_json_object, replace_json
from engine.runs.folder import RunFolder

_TIMEOUT_S = 30.0
_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
# What a container waits for that comes by itself.
_STARTS = ("ContainerCreating", "PodInitializing")
_SILENT = re.compile(r"was refused|Unable to connect|timed? ?out|no such host|connection reset|TLS handshake", re.I)
_NO_CONTEXT = re.compile(r"context was not found|current-context is not set|localhost:8080")
_NO_KIND = re.compile(r"doesn't have a resource type|no matches for kind|could not find the requested resource")
_PROJECT = {"JobSet": "JobSet (sigs.k8s.io/jobset)", "TrainJob": "Kubeflow Trainer"}


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl for one cluster."""

    settings: KubernetesConfig

    def run(self, *words: str, stdin: str = "", timeout_s: float = _TIMEOUT_S) -> str:
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
        self.run("delete", resource_of(self.settings), job_name(run_id), *words, timeout_s=180 if wait else _TIMEOUT_S)
        if at_once:
            self.run("delete", "pods", f"--selector={RUN_LABEL}={run_id}", "--grace-period=0", "--force", *words)

    def _error(self, verb: str, said: str) -> SchedulerError:
        kind, named = self.settings.kind, self.settings.context
        last = said[-200:]  # before it stand kubectl's own tries, in its log's format
        if _NO_CONTEXT.search(said):
            which = "no context" if named is None else f"no context {named}"
            text = f"kubectl has {which}: set cluster.kubernetes.context to one of `kubectl config get-contexts`"
            return SchedulerError("context", f"{text} ({last})")
        if _NO_KIND.search(said):
            other = "TrainJob" if kind == "JobSet" else "JobSet"
            text = f"the cluster has no {kind} ({resource_of(self.settings)}): install {_PROJECT[kind]}, or set "
            return SchedulerError("crd", f"{text}cluster.kubernetes.kind={other} ({last})")
        if _SILENT.search(said):
            return SchedulerError("silent", f"the cluster does not answer kubectl {verb}: {last}")
        return SchedulerError("refused", f"kubectl {verb}: {said[-500:]}")


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
    """A job and its pods by index. conditions: of the job, type -> message; None: it is gone, or being deleted."""

    conditions: Mapping[str, str] | None = None
    pods: Mapping[int, Pod] = field(default_factory=dict)


def read_answer(text: str) -> Answer:
    """The answer of `kubectl get KIND,pods -o json`. Raises SchedulerError for what makes no sense."""
    conditions, pods = None, dict[int, Pod]()
    try:
        for item in json.loads(text)["items"]:
            if item["kind"] != "Pod" and "deletionTimestamp" not in item["metadata"]:
                found = item.get("status", {}).get("conditions", ())
                true = (each for each in found if each.get("status") == "True")
                conditions = {str(each["type"]): one_line(str(each.get("message", "")), 500) for each in true}
            elif (
                item["kind"] == "Pod"
                and (index := item["metadata"].get("labels", {}).get(_INDEX_LABEL, "")).isdecimal()
            ):
                pod = _pod(int(index), item)
                # After an eviction the job makes a second pod of the index: the one that is not over counts.
                if pod.index not in pods or pod.phase != "ended":
                    pods[pod.index] = pod
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"kubectl get: its answer makes no sense: {one_line(str(error), 200)}"
        raise SchedulerError("refused", said) from error
    return Answer(conditions, pods)


def _pod(index: int, item: Mapping[str, Any]) -> Pod:
    status, name = item.get("status", {}), one_line(item["metadata"]["name"], 253)
    host = one_line(str(item.get("spec", {}).get("nodeName", "")), 253)
    own = (each for each in status.get("containerStatuses", ()) if each.get("name") == CONTAINER)
    container: Mapping[str, Any] = next(own, {})
    state = container.get("state", {})
    # A runtime may have its containers begun again in place: for a run that is the end all the same.
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated")
    if ended is not None or status.get("phase") in ("Succeeded", "Failed"):
        # An eviction is said of the pod, what a container met of the container.
        said = status if status.get("reason") else ended or {}
        code = (ended or {}).get("exitCode", 0 if status.get("phase") == "Succeeded" else None)
        words = (one_line(str(said.get("reason", "")), 100), one_line(str(said.get("message", "")), 500))
        return Pod(index, name, "ended", host, code if isinstance(code, int) else None, *words)
    if "running" in state:
        return Pod(index, name, "running", host)
    waiting = state.get("waiting", {})
    unmet = (each for each in status.get("conditions", ()) if each.get("status") == "False")
    unscheduled = next((each for each in unmet if each.get("type") == "PodScheduled"), None)
    trouble, is_stuck = str(waiting.get("reason", "")), bool(waiting.get("reason")) and waiting["reason"] not in _STARTS
    if is_stuck or unscheduled is not None:
        told = waiting if is_stuck or unscheduled is None else unscheduled
        trouble = f"{told.get('reason', 'Unschedulable')}: {told.get('message', 'no more is said')}"
    return Pod(index, name, "waiting", host, trouble=one_line(trouble, 500), is_stuck=is_stuck)


# `kubectl logs --prefix --timestamps`: kubelets write times with nine digits, so they are in order as texts.
_LINE = re.compile(r"\[pod/([^/\]]{1,253})/[^\]]{1,253}\] (\d{4}-\S{10,40}) ?(.*)", re.DOTALL)
_OF_RANK = re.compile(r"rank(\d{4,9})\| (.*)", re.DOTALL)
_ERROR = re.compile(r"rank\d{4,9}\.error\.json")
_FETCHED = "fetched.json"


class PodFiles:
    """The files of one node, its pod's lines so far. A pod of a later attempt has another name, and begins anew."""

    def __init__(self, run: RunFolder, node: NodePlan) -> None:
        self._run, self._node = run, node
        self.folder, self._logs = run.path / "nodes" / run.log_dir(node.name).name, run.log_dir(node.name)
        for folder in (self.folder, self._logs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fetched: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            self._fetched = read_json_object(self.folder / _FETCHED) or {}

    def take(self, pod: str, lines: list[tuple[str, str]]) -> None:
        """Write those of the pod's (time, line) that are new. Raises OSError."""
        before, count = self._fetched.get(pod, ("", 0))
        # Some runtimes give all lines of one write the same time.
        first = next((at for at, (time, _) in enumerate(lines) if time >= before), len(lines))
        new = lines[first + (count if first < len(lines) and lines[first][0] == before else 0) :]
        if not new:
            return
        by_path: dict[Path, list[str]] = {}
        for _, line in new:
            if (entry := self._place(line)) is not None:
                by_path.setdefault(entry[0], []).append(entry[1])
        for path, texts in by_path.items():
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{text}\n" for text in texts))
        last = new[-1][0]
        self._fetched = {pod: (last, sum(time == last for time, _ in lines))}
        replace_json(self.folder / _FETCHED, self._fetched)

    def _place(self, line: str) -> tuple[Path, str] | None:
        """(the log to which the text is added, the text); None where the line is dealt with."""
        if (found := _OF_RANK.fullmatch(line)) and int(found[1]) in self._node.ranks:
            return self._run.log_path(self._node.name, int(found[1])), found[2]
        mark, _, rest = line.partition(" ")
        name, _, text = rest.partition(" ")
        if mark != MARK:
            return torchrun_log(self._node, self._run), line
        # What ranks print is no command: names of files come from a list.
        is_first = self._node.node_rank == 0
        if (document := parse_line(text.encode("utf-8", "surrogatepass"))) is None:
            return None
        if name in RECORDS and is_first:
            return self._run.path / name, text
        if name in DOCUMENTS and is_first:
            replace_json((self.folder if name == DOCUMENTS[0] else self._run.path) / name, document)
        elif _ERROR.fullmatch(name):
            replace_json(self._logs / name, document)
        return None


_OVERLAP_S = 30  # of two looks at the logs
_STOP_MARGIN_S = 10.0
_AT_ONCE = 16


class KubernetesJob(WatchedJob):
    """One attempt of a run as the cluster knows it, asked by a thread; all links share it.

    stuck_s: after how long an image that cannot be pulled, and the like, ends the run.
    """

    error = "KubernetesError"

    def __init__(self, plan: LaunchPlan, run: RunFolder, poll_s: float = 2.0, stuck_s: float = 60.0) -> None:
        super().__init__(run, poll_s)
        self._nodes, self._kubectl, self._stuck_s = plan.nodes, Kubectl(plan.config.cluster.kubernetes), stuck_s
        self._files = {node.node_rank: PodFiles(run, node) for node in plan.nodes}
        self._answer: Answer | None = None
        self._pods: dict[int, Pod] = {}  # as last seen, also after they are gone
        self._synced: set[str] = set()  # pods all of whose lines are here
        self._noted: dict[int, NodeStatus] = {}
        self._logged_at: float | None = None
        self._stuck_at: float | None = None
        self._stop_cause: str | None = None
        self._term_due = self._at_once = False
        self._ended: set[int] = set()  # which pods were over when the stop was asked for

    @property
    def end_command(self) -> str:
        return f"kubectl delete {resource_of(self._kubectl.settings)} {self.name}"

    def begin(self, *, start: bool) -> None:
        """Create the job, in the place of that of an earlier attempt."""
        if start:
            try:
                self._kubectl.delete(self.run.run_id, wait=True)
                self._kubectl.run("create", "--output=name", f"--filename={self.run.path / JOB_FILE}")
            except SchedulerError:
                with contextlib.suppress(SchedulerError):
                    self._kubectl.delete(self.run.run_id, at_once=True)  # should it have been created all the same
                raise
        else:
            self.look()  # what runs is to be stopped in order, should somebody wait for that
        self.run.record(job=self.name)

    def link(self, node: NodePlan) -> PodLink:
        return PodLink(self, node)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):
            self._note()  # what the links have told already may not be written down yet

    # --- while it waits: see `WatchedJob` -------------------------------------------------------------------------

    def granted(self, plan: LaunchPlan) -> LaunchPlan | None:
        """Once every pod has begun; with a pod that has ended already, the controller sees to the rest."""
        phases = [pod.phase for pod in self._pods.values()]
        return plan if "ended" in phases or phases.count("running") == len(plan.nodes) else None

    def refusal(self) -> Failure | None:
        stuck = next((pod for pod in self._pods.values() if pod.is_stuck), None)
        self._stuck_at = None if stuck is None else self._stuck_at or time.monotonic()
        if stuck is not None and time.monotonic() > (self._stuck_at or 0.0) + self._stuck_s:
            with contextlib.suppress(SchedulerError):
                self._kubectl.delete(self.run.run_id, at_once=True)
            node = pod_node(stuck.index)
            return Failure("start", stuck.trouble.partition(":")[0], f"pod {stuck.name}: {stuck.trouble}", host=node)
        if self._answer is not None and self._answer.conditions is None:
            return Failure("start", self.error, f"{self.name} is gone: somebody deleted it")
        if "Failed" in self._conditions:
            return Failure("start", self.error, f"{self.name} failed: {self._conditions['Failed']}")
        return None

    def waits_for(self) -> str:
        if self.problem is not None:
            return self.problem
        if "Suspended" in self._conditions:
            return f"{self.name} is suspended: it waits in its queue"
        told = (f"{pod.name}: {pod.trouble}" for pod in self._pods.values() if pod.trouble)
        return next(told, f"{self.name} waits for its pods")

    def cancel(self) -> None:
        self.stop("cancel", 0.0)

    def has_ended(self) -> bool:
        return self._answer is not None and self._answer.conditions is None and not self._answer.pods

    @property
    def _conditions(self) -> Mapping[str, str]:
        return (self._answer.conditions if self._answer is not None else None) or {}

    # --- while it runs --------------------------------------------------------------------------------------------

    def stop(self, cause: str, grace_s: float) -> None:
        """Have the ranks end in order, and what is left after `grace_s` deleted; or all of it at once."""
        with self._lock:
            if self._take_stop(cause):
                self._term_due = grace_s > 0
            self._at_once = self._at_once or grace_s <= 0
        self.end_after(grace_s + _STOP_MARGIN_S if grace_s > 0 else 0.0)

    def _take_stop(self, cause: str) -> bool:
        """Whether this is the first stop. Pods that have ended before it have ended by themselves."""
        if self._stop_cause is not None:
            return False
        self._ended = {index for index, pod in self._pods.items() if pod.phase == "ended"}
        self._stop_cause = cause
        return True

    def status(self, node: NodePlan) -> NodeStatus:
        """What is known of a node. kubectl that does not answer is a problem, but no loss: the pods go on."""
        pod, answer, cause = self._pods.get(node.node_rank), self._answer, self._stop_cause
        if answer is None or (pod is None and answer.conditions is not None):
            return NodeStatus(node.name, "starting", problem=self.problem)
        if pod is not None and pod.phase == "ended":
            cause = None if pod.index in self._ended else cause
            is_synced = pod.name in self._synced or pod.index not in answer.pods
            outcome = {"cause": "stop" if cause else "exit", "stop_cause": cause, "exit_code": pod.exit_code}
            failure = None if cause else pod.failure
            return NodeStatus(node.name, "ended", outcome, is_synced=is_synced, failure=failure)
        if pod is not None and node.node_rank in answer.pods:
            phase: Phase = "starting" if pod.phase == "waiting" else "stopping" if cause else "running"
            return NodeStatus(node.name, phase, problem=self.problem)
        # Its pod is gone: deleted by us or by others, or by the job controller, because another one has failed.
        has_failed = any(other.phase == "ended" and other.exit_code != 0 for other in self._pods.values())
        if cause is None and (has_failed or "Failed" in self._conditions):
            cause = "failure"
        if cause is None:
            return NodeStatus(node.name, "lost", problem=f"its pod {pod.name if pod else ''} is gone")
        outcome = {"cause": "stop", "stop_cause": cause, "exit_code": None}
        return NodeStatus(node.name, "ended", outcome, is_synced=True)

    def look(self) -> bool:
        try:
            self._handle_stop()
            answer = self._kubectl.query(self.run.run_id)
            if answer.conditions is None:
                with self._lock:
                    self._take_stop("kubectl delete")
            try:
                self._fetch(answer)
            finally:  # the answer first: a pod that is known and not in it counts as gone
                self._answer = answer
                self._pods |= answer.pods
            self.problem = None
        except SchedulerError as error:
            self.problem = str(error)
        except OSError as error:
            self.problem = f"{error.filename or self.run.path}: {error.strerror or error}"
        with contextlib.suppress(OSError):
            self._note()
        return True

    def _handle_stop(self) -> None:
        if self._term_due and self._answer is not None:  # else it is not known yet whom to tell
            self._term_due = False
            running = [pod for pod in self._pods.values() if pod.phase == "running"]
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                list(threads.map(self._terminate, running))
        if self._is_end_due(_STOP_MARGIN_S):
            self._kubectl.delete(self.run.run_id, at_once=self._at_once)

    def _terminate(self, pod: Pod) -> None:
        """SIGTERM to the pod's command: unlike a deleted pod, one that ends of it keeps what it said."""
        try:
            self._kubectl.run("exec", pod.name, f"--container={CONTAINER}", "--", "sh", "-c", "kill -TERM 1")
        except SchedulerError:
            self._end_at = time.monotonic()

    def _fetch(self, answer: Answer) -> None:
        """What the pods have said since the last look; a little twice, for clocks differ: `PodFiles` knows."""
        begun = {pod.name: pod for pod in answer.pods.values() if pod.phase != "waiting"}
        if begun.keys() <= self._synced:
            return
        at = time.monotonic()
        since = () if self._logged_at is None else (f"--since={math.ceil(at - self._logged_at) + _OVERLAP_S}s",)
        words = (f"--selector={RUN_LABEL}={self.run.run_id}", f"--container={CONTAINER}", "--prefix", "--timestamps")
        lines: dict[str, list[tuple[str, str]]] = {name: [] for name in begun}
        for line in self._kubectl.run("logs", *words, "--tail=-1", "--ignore-errors", *since).split("\n"):
            if (found := _LINE.fullmatch(line)) and found[1] in begun:
                lines[found[1]].append((found[2], found[3]))
        for name, pod in begun.items():
            self._files[pod.index].take(name, lines[name])
        self._logged_at = at
        self._synced |= {name for name, pod in begun.items() if pod.phase == "ended"}

    def _note(self) -> None:
        """What whoever looks at the run folder sees of the nodes."""
        for node in self._nodes if self._answer is not None else ():
            status, pod, folder = self.status(node), self._pods.get(node.node_rank), self._files[node.node_rank].folder
            if self._noted.get(node.node_rank) != status or status.phase == "running":
                self._noted[node.node_rank] = status
                place = {"phase": status.phase, "pod": pod and pod.name, "host": pod and pod.host}
                replace_json(folder / "supervisor.json", place)
                if status.outcome is not None:
                    replace_json(folder / "outcome.json", dict(status.outcome))


class PodLink(NodeLink):
    """One pod. It began with the job, does not end with its launcher, and takes no questions."""

    def __init__(self, job: KubernetesJob, node: NodePlan) -> None:
        self._job, self._plan, self.node = job, node, node.name

    def follow(self) -> None:
        self._job.watch()

    def poll(self) -> NodeStatus:
        swept = () if self._job.has_ended() else None
        return replace(self._job.status(self._plan), has_started=True, swept=swept)

    def stop(self, cause: str, grace_s: float) -> None:
        self._job.stop(cause, grace_s)

    def sweep(self) -> None:
        """Have the whole job deleted."""
        self._job.cancel()

    def close(self) -> None:
        self._job.close()
