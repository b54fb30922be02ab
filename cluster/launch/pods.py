"""The pods of a run as kubectl shows them: asked about by one thread, ended in order. What they print, see
`cluster.launch.pod`, is written into the run folder as if its ranks had done so there.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.control.attempt import torchrun_log
from cluster.control.link import NodeLink, NodeStatus, Phase
from cluster.failure import Failure
from cluster.launch.kubectl import Answer, Kubectl, Pod
from cluster.launch.manifest import CONTAINER, JOB_FILE, job_name, resource_of
from cluster.launch.pod import DOCUMENTS, MARK, RECORDS, pod_node
from cluster.launch.scheduler import Granted, SchedulerError, WatchedJob
from cluster.plan import LaunchPlan, NodePlan
from cluster.plan_nodes import RUN_LABEL
from engine.runs.folder import RunFolder
from engine.runs.records import parse_line, read_json_object, replace_json

# `kubectl logs --prefix --timestamps`: kubelets write times with nine digits, so they are in order as texts.
_LINE = re.compile(r"\[pod/([^/\]]{1,253})/[^\]]{1,253}\] (\d{4}-\S{10,40}) ?(.*)", re.DOTALL)
_OF_RANK = re.compile(r"rank(\d{4,9})\| (.*)", re.DOTALL)
_ERROR = re.compile(r"rank\d{4,9}\.error\.json")
_FETCHED = "fetched.json"


def split_logs(text: str) -> dict[str, list[tuple[str, str]]]:
    """By name of the pod: (time, line), in order; what no pod said is left out."""
    lines: dict[str, list[tuple[str, str]]] = {}
    for line in text.split("\n"):
        if found := _LINE.fullmatch(line):
            lines.setdefault(found[1], []).append((found[2], found[3]))
    return lines


class PodFiles:
    """The files of one node, its pod's lines so far. A pod of a later attempt has another name, and begins anew."""

    def __init__(self, run: RunFolder, node: NodePlan) -> None:
        self._run, self._node = run, node
        self._folder, self._logs = run.path / "nodes" / run.log_dir(node.name).name, run.log_dir(node.name)
        for folder in (self._folder, self._logs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._fetched = read_json_object(self._folder / _FETCHED) or {}
        except (OSError, ValueError):
            self._fetched = {}

    def take(self, pod: str, lines: list[tuple[str, str]]) -> None:
        """Write those of the pod's lines that are new. Raises OSError."""
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
        replace_json(self._folder / _FETCHED, self._fetched)

    def note(self, name: str, document: dict[str, object]) -> None:
        """Leave a document about the node, for whoever looks at the run. Raises OSError."""
        replace_json(self._folder / name, document)

    def _place(self, line: str) -> tuple[Path, str] | None:
        """(the log to which the text is added, the text); None where the line is dealt with."""
        if found := _OF_RANK.fullmatch(line):
            rank = int(found[1])
            if self._node.first_rank <= rank < self._node.first_rank + self._node.local_ranks:
                return self._run.log_path(self._node.name, rank), found[2]
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
            folder = self._folder if name == DOCUMENTS[0] else self._run.path
            replace_json(folder / name, document)
        elif _ERROR.fullmatch(name):
            replace_json(self._logs / name, document)
        return None


POLL_S = 2.0
STUCK_S = 60.0  # an image that cannot be pulled, and the like
_OVERLAP_S = 30  # of two looks at the logs
_STOP_MARGIN_S = 10.0
_AT_ONCE = 16


class KubernetesJob(WatchedJob):
    """One attempt of a run as the cluster knows it, asked by a thread; all links share it."""

    def __init__(self, plan: LaunchPlan, run: RunFolder, poll_s: float = POLL_S, stuck_s: float = STUCK_S) -> None:
        super().__init__(job_name(plan.run_id), poll_s)
        self.plan, self.run = plan, run
        self._kubectl = Kubectl(plan.config.cluster.kubernetes)
        self._stuck_s = stuck_s
        self._files = {node.node_rank: PodFiles(run, node) for node in plan.nodes}
        self._answer: Answer | None = None
        self._pods: dict[int, Pod] = {}  # as last seen, also after they are gone
        self._synced: set[str] = set()  # pods all of whose lines are here
        self._noted: dict[int, NodeStatus] = {}
        self._logged_at: float | None = None
        self._stuck_at: float | None = None
        self._stop_cause: str | None = None
        self._term_due = self._at_once = False

    def submit(self) -> None:
        """Create the job, in the place of that of an earlier attempt. Raises SchedulerError."""
        self._kubectl.delete(self.plan.run_id, wait=True)
        self._kubectl.run("create", "--output=name", f"--filename={self.run.path / JOB_FILE}")

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):
            self._note()  # what the links have told already may not be written down yet

    # --- while it waits: see `WatchedJob` -------------------------------------------------------------------------

    def granted(self, plan: LaunchPlan) -> Granted | None:
        """Once every pod has begun; with a pod that has ended already, the controller sees to the rest."""
        phases = [pod.phase for pod in self._pods.values()]
        if "ended" not in phases and phases.count("running") < len(plan.nodes):
            return None
        return plan, [PodLink(self, node) for node in plan.nodes]

    def refusal(self) -> Failure | None:
        stuck = next((pod for pod in self._pods.values() if pod.is_stuck), None)
        self._stuck_at = None if stuck is None else self._stuck_at or time.monotonic()
        if stuck is not None and time.monotonic() > (self._stuck_at or 0.0) + self._stuck_s:
            with contextlib.suppress(SchedulerError):
                self._kubectl.delete(self.plan.run_id, at_once=True)
            node = pod_node(stuck.index)
            return Failure("start", stuck.trouble.partition(":")[0], f"pod {stuck.name}: {stuck.trouble}", host=node)
        if self._answer is not None and self._answer.conditions is None:
            return Failure("start", "KubernetesError", f"{self.name} is gone: somebody deleted it")
        if self._answer is not None and self._answer.conditions is not None and "Failed" in self._answer.conditions:
            return Failure("start", "KubernetesError", f"{self.name} failed: {self._answer.conditions['Failed']}")
        return None

    def waits_for(self) -> str:
        if self.problem is not None:
            return self.problem
        if self._answer is not None and "Suspended" in (self._answer.conditions or {}):
            return f"{self.name} is suspended: it waits in its queue"
        told = [f"{pod.name}: {pod.trouble}" for pod in self._pods.values() if pod.trouble]
        return told[0] if told else f"{self.name} waits for its pods"

    def cancel(self) -> None:
        self.stop("cancel", 0.0)

    def has_ended(self) -> bool:
        return self._answer is not None and self._answer.conditions is None and not self._answer.pods

    def leftover(self) -> str:
        what = f"{resource_of(self._kubectl.settings)} {self.name}"
        return f"{self.name} has not ended ({self.problem or 'no answer'}); `kubectl delete {what}`"

    # --- while it runs --------------------------------------------------------------------------------------------

    def stop(self, cause: str, grace_s: float) -> None:
        """Have the ranks end in order, and what is left after `grace_s` deleted; or all of it at once."""
        with self._lock:
            self._term_due = self._term_due or (self._stop_cause is None and grace_s > 0)
            self._stop_cause = self._stop_cause or cause
            self._at_once = self._at_once or grace_s <= 0
        self.end_after(grace_s + _STOP_MARGIN_S if grace_s > 0 else 0.0)

    def status(self, node: NodePlan) -> NodeStatus:
        """What is known of a node. kubectl that does not answer is a problem, but no loss: the pods go on."""
        pod, answer = self._pods.get(node.node_rank), self._answer
        if answer is None or (pod is None and answer.conditions is not None):
            return NodeStatus(node.name, "starting", problem=self.problem)
        if pod is not None and pod.phase == "ended":
            is_synced = pod.name in self._synced or pod.index not in answer.pods
            outcome = _outcome("exit" if self._stop_cause is None else "stop", self._stop_cause, pod.exit_code)
            failure = pod.failure if self._stop_cause is None else None
            return NodeStatus(node.name, "ended", outcome, is_synced=is_synced, failure=failure)
        if pod is not None and node.node_rank in answer.pods:
            running: Phase = "running" if self._stop_cause is None else "stopping"
            return NodeStatus(node.name, running if pod.phase == "running" else "starting", problem=self.problem)
        # Its pod is gone: deleted by us or by others, or by the job controller, because another one has failed.
        others = [other for other in self._pods.values() if other.phase == "ended" and other.exit_code != 0]
        by_job = "failure" if others or "Failed" in (answer.conditions or {}) else None
        cause = self._stop_cause or by_job or ("kubectl delete" if answer.conditions is None else None)
        if cause is None:
            return NodeStatus(node.name, "lost", problem=f"its pod {pod.name if pod else ''} is gone")
        return NodeStatus(node.name, "ended", _outcome("stop", cause, None), is_synced=True)

    def look(self) -> bool:
        try:
            self._heed_stop()
            answer = self._kubectl.query(self.plan.run_id)
            self._pods |= answer.pods
            try:
                self._fetch(answer)
            finally:
                self._answer = answer
            self.problem = None
        except SchedulerError as error:
            self.problem = str(error)
        except OSError as error:
            self.problem = f"{error.filename or self.run.path}: {error.strerror or error}"
        with contextlib.suppress(OSError):
            self._note()
        return True

    def _heed_stop(self) -> None:
        if self._term_due and self._answer is not None:  # else it is not known yet whom to tell
            self._term_due = False
            running = [pod for pod in self._pods.values() if pod.phase == "running"]
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                list(threads.map(self._terminate, running))
        if self._is_end_due(_STOP_MARGIN_S):
            self._kubectl.delete(self.plan.run_id, at_once=self._at_once)

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
        words = (f"--selector={RUN_LABEL}={self.plan.run_id}", f"--container={CONTAINER}", "--prefix", "--timestamps")
        said = self._kubectl.run("logs", *words, "--tail=-1", "--ignore-errors", *since)
        for name, lines in split_logs(said).items():
            if name in begun:
                self._files[begun[name].index].take(name, lines)
        self._logged_at = at
        self._synced |= {name for name, pod in begun.items() if pod.phase == "ended"}

    def _note(self) -> None:
        """What whoever looks at the run folder sees of the nodes."""
        for node in self.plan.nodes if self._answer is not None else ():
            status = self.status(node)
            if self._noted.get(node.node_rank) != status or status.phase == "running":
                self._noted[node.node_rank] = status
                pod = self._pods.get(node.node_rank)
                place: dict[str, object] = {"phase": status.phase, "pod": pod and pod.name, "host": pod and pod.host}
                self._files[node.node_rank].note("supervisor.json", place)
                if status.outcome is not None:
                    self._files[node.node_rank].note("outcome.json", dict(status.outcome))


def _outcome(cause: str, stop_cause: str | None, exit_code: int | None) -> Mapping[str, Any]:
    return {"cause": cause, "stop_cause": stop_cause, "exit_code": exit_code}


class PodLink(NodeLink):
    """One pod. It began with the job, does not end with its launcher, and takes no questions."""

    def __init__(self, job: KubernetesJob, node: NodePlan) -> None:
        self._job, self._plan, self.node = job, node, node.name

    def follow(self) -> None:
        self._job.watch()

    def poll(self) -> NodeStatus:
        swept = () if self._job.has_ended() else None
        return replace(self._job.status(self._plan), is_begun=True, swept=swept)

    def stop(self, cause: str, grace_s: float) -> None:
        self._job.stop(cause, grace_s)

    def sweep(self) -> None:
        """Have the whole job deleted."""
        self._job.cancel()

    def close(self) -> None:
        self._job.close()
