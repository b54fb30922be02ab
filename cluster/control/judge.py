"""How a run ended: from what its nodes left behind to one verdict, with place, memory and advice.

Signs that a run is failing, per node, as early as they can be seen. Who is to blame is judged at the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.agent.folder import read_json
from cluster.control.link import INTERRUPTED, LaunchOutcome, Leftover, NodeStatus, as_pids
from cluster.failure import Death, Failure, KillFacts, NodeEvidence, find_failure, first_death
from cluster.node_checkpoints import roots_of
from cluster.plan import LaunchPlan, NodePlan
from cluster.ssh.hosts import node_command, reaching
from cluster.ssh.nodes import fold_nodes
from cluster.values import integer, rows, table, word
from engine.config.settings import RunConfig
from engine.runs.commit import checkpoints_folder, list_checkpoints
from engine.runs.folder import RunFolder, typed_overrides
from engine.runs.manifest import MANIFEST_FILE
from engine.runs.oom import Where, less_memory_text
from engine.runs.records import read_json_object

TORCHRUN_LOG = "torchrun.log"
_LOG_TAIL_BYTES = 256 * 1024
_MAX_ERROR_BYTES = 4 << 20
_RANK_ERROR = re.compile(r"rank(\d{1,9})\.error\.json")


@dataclass(frozen=True)
class StopOrder:
    """The first request to stop that a node got from us: when, in our clock, and what its torchrun had said by then."""

    cause: str
    at_ns: int
    death: Death | None = None


@dataclass(frozen=True)
class Loss:
    """Why a node was given up, and since when it said nothing, in our clock."""

    reason: str
    since_ns: int


@dataclass(kw_only=True)
class NodeFindings:
    """All that is known of one node. log_start: bytes of torchrun.log that earlier attempts wrote."""

    node: NodePlan
    status: NodeStatus
    log_start: int = 0
    order: StopOrder | None = None
    loss: Loss | None = None

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

    @property
    def deaths(self) -> list[Death]:
        """How the supervisor saw ranks end, so far, in our clock; what makes no sense is left out."""
        deaths = []
        for entry in rows(self.status.outcome or self.status.supervisor, "deaths"):
            rank, at_ns = integer(entry, "rank"), integer(entry, "at_ns")
            if rank is not None and rank in self.node.ranks:
                time_ns = None if at_ns is None else at_ns - self.status.clock_offset_ns
                facts = _kill_facts(table(entry, "memory"))
                deaths.append(Death(rank, integer(entry, "exit_code"), integer(entry, "pid"), time_ns, facts))
        return deaths


def collect_evidence(nodes: Sequence[NodeFindings], run: RunFolder) -> tuple[NodeEvidence, ...]:
    """One value per node; what came of our own request to stop is left out or marked as an echo."""
    return tuple(_of_node(one, run) for one in nodes)


def rank_errors(node: NodePlan, run: RunFolder, offset_ns: int = 0) -> list[dict[str, Any]]:
    """The errors that ranks of `node` left, with time_ns in our clock; files of ranks of other nodes are ignored."""
    errors = []
    folder = run.log_dir(node.name)
    for name in _names(folder):
        found = _RANK_ERROR.fullmatch(name)
        rank, path = int(found[1]) if found else -1, folder / name
        if rank not in node.ranks:
            continue
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if path.stat().st_size <= _MAX_ERROR_BYTES and (error := read_json_object(path)):
                time_ns = integer(error, "time_ns")
                errors.append({**error, "rank": rank, "time_ns": None if time_ns is None else time_ns - offset_ns})
    return errors


def torchrun_death(node: NodePlan, run: RunFolder, start: int) -> Death | None:
    """The rank that torchrun of `node` named first in this attempt, whose output begins at byte `start`."""
    death = first_death(tail_text(torchrun_log(node, run), start=start), node.first_rank)
    return death if death is not None and death.rank in node.ranks else None


def torchrun_log(node: NodePlan, run: RunFolder) -> Path:
    """Where the output of torchrun of `node` lies in the run folder."""
    return run.log_dir(node.name) / TORCHRUN_LOG


def log_starts(run: RunFolder) -> dict[str, int]:
    """How long every log is now, by its path in the run, before a new attempt appends to it."""
    sizes = {}
    for path in (run.path / "logs").glob("*/*.log"):
        # Opened, not asked for by stat: on a network file system only that shows what another machine wrote.
        with contextlib.suppress(OSError), path.open("rb") as file:
            sizes[path.relative_to(run.path).as_posix()] = file.seek(0, os.SEEK_END)
    return sizes


def tail_text(path: Path, size: int = _LOG_TAIL_BYTES, start: int = 0) -> str:
    """The last `size` bytes of a log, but none before byte `start`, as text; empty when there is none."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size, start if start <= end else 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _names(folder: Path) -> list[str]:
    """The files of a folder; not by globbing, for this is done often and on hundreds of folders."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return []


def _of_node(found: NodeFindings, run: RunFolder) -> NodeEvidence:
    node, outcome, loss = found.node, found.status.outcome, found.loss
    order = found.order or _order_of_others(found.status)
    vanished = [death for death in found.deaths if _came_before(death, order)]
    death = torchrun_death(node, run, found.log_start)
    if order is not None and (death is None or death.rank not in {seen.rank for seen in vanished}):
        death = order.death  # what it says after it was asked to stop may be our doing
    death = _timed(death, vanished)
    return NodeEvidence(
        node.name,
        [_marked(error, order) for error in rank_errors(node, run, found.status.clock_offset_ns)],
        death,
        vanished,
        integer(outcome, "exit_code") if word(outcome, "cause") == "exit" else None,
        _kill_facts(table(outcome, "memory")),
        None if loss is None else loss.reason,
        None if loss is None else loss.since_ns,
        tail_text(torchrun_log(node, run), start=found.log_start),
    )


def _order_of_others(status: NodeStatus) -> StopOrder | None:
    """When the node itself, or somebody who controlled the run before, began to stop its ranks."""
    at_ns = integer(status.outcome, "stop_at_ns")
    if at_ns is None or word(status.outcome, "cause") not in ("stop", "lease"):
        return None
    return StopOrder(str(word(status.outcome, "stop_cause")), at_ns - status.clock_offset_ns)


def _came_before(death: Death, order: StopOrder | None) -> bool:
    return order is None or (death.at_ns is not None and death.at_ns < order.at_ns)


def _timed(death: Death | None, seen: Sequence[Death]) -> Death | None:
    """`death` with the time at which the supervisor saw it, and what it knew of it."""
    other = None if death is None else next((other for other in seen if other.rank == death.rank), None)
    return death if death is None or other is None else replace(death, at_ns=other.at_ns, kill=other.kill)


def _marked(error: Mapping[str, Any], order: StopOrder | None) -> Mapping[str, Any]:
    """`error`, called an echo when it came after the node was asked to stop."""
    time_ns = error.get("time_ns")
    is_late = order is not None and isinstance(time_ns, int) and time_ns > order.at_ns
    return {**error, "is_echo": is_late or error.get("kind") == "peer_lost"}


def _kill_facts(facts: Mapping[str, Any]) -> KillFacts:
    return KillFacts(word(facts, "evidence", 500), word(facts, "hint", 500), table(facts, "memory") or None)


_STOPS_RANKS = re.compile(r"failed \(exitcode: |closing signal SIG")
_SETTLED_NS = 1_000_000_000  # a folder that changed this recently may change again within the tick of its clock


class Signs:
    """Looks at what the nodes say and at the error files of ranks; `strong` and `weak` give one line per node.

    A weak sign is an end that looks well, but may have come too early.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._stamps: dict[str, int] = {}  # of folders that were read long enough after their last change
        self._sizes: dict[str, int] = {}
        self._errors: dict[str, str] = {}

    def strong(self, nodes: Sequence[NodeFindings]) -> dict[str, str]:
        """Nodes on which something failed, and what."""
        return {one.name: text for one in nodes if (text := self._of_node(one))}

    def weak(self, nodes: Sequence[NodeFindings]) -> dict[str, str]:
        """Nodes on which ranks ended without any sign of a failure."""
        found = {}
        for one in nodes:
            ended = [death for death in one.deaths if not death.exit_code]
            if integer(one.status.outcome, "exit_code") == 0:
                found[one.name] = "its ranks have ended"
            elif ended:
                found[one.name] = f"rank {ended[0].rank} has ended"
        return found

    def _of_node(self, found: NodeFindings) -> str | None:
        outcome = found.status.outcome
        if outcome is not None and (word(outcome, "cause") == "lease" or integer(outcome, "exit_code") != 0):
            return found.status.end
        bad = [death for death in found.deaths if death.exit_code]
        if bad:
            signal = bad[0].signal
            how = signal.name if signal is not None else f"exit code {bad[0].exit_code}"
            return f"rank {bad[0].rank} ended ({how})"
        return self._error_of_rank(found.node) or self._word_of_torchrun(found.node, found.log_start)

    def _word_of_torchrun(self, node: NodePlan, start: int) -> str | None:
        """What torchrun says when it ends the ranks of `node` because one of them failed; read when it grows."""
        try:
            size = torchrun_log(node, self._run).stat().st_size
        except OSError:
            return None
        if size > self._sizes.get(node.name, start):
            self._sizes[node.name] = size
            if _STOPS_RANKS.search(tail_text(torchrun_log(node, self._run), start=start)):
                self._errors[node.name] = "torchrun stops its ranks, for one has failed"
        return self._errors.get(node.name)

    def _error_of_rank(self, node: NodePlan) -> str | None:
        """The error that a rank of `node` left, if one did; the folder is read again only when it has changed."""
        try:
            stamp = self._run.log_dir(node.name).stat().st_mtime_ns
        except OSError:
            return None
        if self._stamps.get(node.name) != stamp and node.name not in self._errors:
            errors = rank_errors(node, self._run)
            if errors:
                self._errors[node.name] = f"rank {errors[0]['rank']} failed"
            elif time.time_ns() - stamp > _SETTLED_NS:
                self._stamps[node.name] = stamp
        return self._errors.get(node.name)


OWN_CAUSES = frozenset({"failure", "hang", "node lost", "start", "completed", "exception"})  # why a controller stops
_WEAK_KINDS = ("peer_lost", "launcher", "exit")  # what ranks show whose launcher is gone


@dataclass(frozen=True)
class Case:
    """What is to be judged.

    failure: what the controller itself found. cancelled: it was asked to stop the run. is_orphan: there was none.
    """

    plan: LaunchPlan
    run: RunFolder
    nodes: Sequence[NodeFindings]
    failure: Failure | None = None
    cancelled: bool = False
    leftover: tuple[Leftover, ...] = ()
    is_orphan: bool = False


def judge(case: Case) -> LaunchOutcome:
    """The outcome of a run whose nodes have all ended, or were given up."""
    leftover = tuple({item.node: item for item in (*_leftovers(case), *case.leftover)}.values())
    state = case.run.read_state()["state"]
    if state == "completed":
        return LaunchOutcome("completed", 0, leftover=leftover)
    found = case.failure or next((one.status.failure for one in case.nodes if one.status.failure), None)
    if found is None and (case.cancelled or _was_cancelled(case, state)):
        return LaunchOutcome("cancelled", INTERRUPTED, leftover=leftover)
    failure = complete(found or _find(case), case)
    return LaunchOutcome(failure.status, failure.exit_code, failure, leftover)


def complete(failure: Failure, case: Case) -> Failure:
    """`failure` with its place, its log, memory beside what was predicted, the last checkpoint, and advice."""
    failure = _located(failure, case)
    if failure.kind == "oom":
        failure = replace(failure, memory=_compared(failure, case))
    failure = replace(failure, checkpoint=last_checkpoint(case.run, case.plan))
    return replace(failure, advice=advice(failure, case.run.path, case.plan.config))


def last_checkpoint(run: RunFolder, plan: LaunchPlan) -> str | None:
    """The checkpoint of the most steps that was committed: its folder here, or that on the run's nodes; or None."""
    known = list_checkpoints(checkpoints_folder(plan.config.train.checkpoint, run.path))
    here = next((checkpoint for checkpoint in known if (checkpoint.path / MANIFEST_FILE).exists()), None)
    told = max(run.saved_steps(), default=0)
    if not plan.has_own_folders or told <= (0 if here is None else here.step):
        return None if here is None else str(here.path)
    root = roots_of(plan)[plan.nodes[0].name]
    return f"{root}/step-{told:08d} on {fold_nodes([node.name for node in plan.nodes])}"


def _find(case: Case) -> Failure:
    if refused := _with_cause(case, "start_failed"):
        text = word(refused[0].status.outcome, "error", 1000) or "the command could not be started"
        return Failure("start", "StartFailed", text, host=refused[0].name)
    if case.is_orphan and not any(one.loss or one.status.outcome for one in case.nodes):
        return Failure("launcher", "LauncherLost", "the launcher was gone before any node had begun")
    failure = find_failure(collect_evidence(case.nodes, case.run))
    waited = [one.name for one in _with_cause(case, "lease")]
    if waited and failure.kind in _WEAK_KINDS and failure.signal is None:
        text = f"the launcher was gone for {case.plan.config.cluster.lease_s:g} s, so these nodes stopped their ranks: "
        return Failure("launcher", "LauncherLost", text + ", ".join(waited))
    return failure


def _with_cause(case: Case, cause: str) -> list[NodeFindings]:
    """The nodes that say that their part ended so."""
    return [one for one in case.nodes if word(one.status.outcome, "cause") == cause]


def _was_cancelled(case: Case, state: str) -> bool:
    """Whether ranks or somebody on the nodes ended the run on purpose, and nothing failed before."""
    if state == "cancelled" and not case.run.rank_errors():
        return True
    causes = {str(word(one.status.outcome, "stop_cause")) for one in _with_cause(case, "stop")}
    return bool(causes - OWN_CAUSES) and not case.run.rank_errors()


def _leftovers(case: Case) -> Iterable[Leftover]:
    for one in case.nodes:
        if pids := as_pids((one.status.outcome or {}).get("leftover_pids")):
            yield Leftover(one.name, pids, "they did not end even when killed")


def _located(failure: Failure, case: Case) -> Failure:
    """`failure` with node, log and, where the rank could not say, the last step and phase the run recorded."""
    nodes = case.plan.nodes
    node = next((node for node in nodes if node.name == failure.host), nodes[0])
    host = failure.host or (node.name if len(nodes) == 1 else None)
    log = torchrun_log(node, case.run)
    if failure.rank is not None and (rank_log := case.run.log_path(node.name, failure.rank)).exists():
        log = rank_log
    step, phase = failure.step, failure.phase
    if step is None and phase is None:
        step = next((row["step"] for row in reversed(case.run.read_metrics()) if "step" in row), None)
        if step is None:
            events = (event for event in reversed(case.run.read_events()) if event.get("kind") == "phase")
            phase = next((str(event.get("phase")) for event in events), None)
    return replace(failure, host=host, log=failure.log or str(log), step=step, phase=phase)


def _compared(failure: Failure, case: Case) -> dict[str, Any]:
    """The memory of a failure beside the limit of the host and what memory_plan.json predicted for one rank."""
    memory = failure.memory or {}
    where = memory.get("where", "host")
    plan = read_json(str(case.run.path / "memory_plan.json")) or {}
    # On a CPU run the device is the host: what is predicted there is the device's peak.
    on_device = where == "device" or case.plan.config.cluster.backend == "gloo"
    capacity = memory.get("capacity_bytes") or (_host_limit(failure.host, case) if where == "host" else None)
    predicted = plan.get("device_peak_bytes" if on_device else "host_peak_bytes")
    return {**memory, "where": where, "capacity_bytes": capacity, "predicted_peak_bytes": predicted}


def _host_limit(host: str | None, case: Case) -> int | None:
    """Host memory of node `host`, as its supervisor last measured it."""
    status = next((one.status for one in case.nodes if one.name == host), None)
    if status is None:
        return None
    killed = table(table(status.outcome, "memory"), "memory")
    return integer(killed, "capacity_bytes") or integer(status.health, "memory_limit_bytes")


def advice(failure: Failure, run_path: Path, config: RunConfig) -> str:
    """What to do next; `run_path` is the run folder."""
    log = failure.log or "the log"
    resume = f"burst resume {shlex.quote(run_path.name)}"
    again = f"`{resume}` starts the same ranks again."
    match failure.kind:
        case "config" | "user":
            return "Correct the setting or file that the message names and launch again."
        case "oom":
            return less_memory_text(config, _where(failure))
        case "signal" if failure.signal == "SIGKILL":
            remedy = _lower(less_memory_text(config, "host"))
            return f"If `dmesg` shows that the kernel ran out of memory, {remedy} If not, ask who sent the signal."
        case "peer_lost":
            return f"The rank that it lost said nothing: compare the logs beside {log}."
        case "hang":
            return f"Read where every rank was in {failure.stacks or log} and beside it; {again}"
        case "node_lost":
            check = node_command(failure.host or "", "check-nodes", reached_by=reaching(typed_overrides(run_path)))
            return f"See what is left of the node with `{check}`; {again} On other nodes: `{resume} --hosts NODES`."
        case "port":
            chosen = "a free port is chosen, unless cluster.master_port names one"
            return f"See who listens there with `ss -ltnp`, and launch again: {chosen}."
        case "start":
            return f"Remove the reason that the message names; {again}"
        case "launcher":
            return f"Read {log}; {again}"
        case _:
            return f"The whole traceback is in {log}; {again}"


def _where(failure: Failure) -> Where:
    return "device" if failure.memory is not None and failure.memory.get("where") == "device" else "host"


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]
