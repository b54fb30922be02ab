"""How a run ended: from what its nodes left behind to one verdict, with place, memory and advice.

Signs that a run is failing, per node, as early as they can be seen. Who is to blame is judged at the end.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.agent.folder import read_json
from cluster.control.attempt import tail_text, torchrun_log
from cluster.control.fleet import Fleet, Part, StopOrder, kill_facts
from cluster.control.link import INTERRUPTED, LaunchOutcome, NodeStatus
from cluster.failure import Death, Failure, NodeEvidence, find_failure
from cluster.plan import LaunchPlan, NodePlan, roots_of
from cluster.ssh.hosts import node_command
from cluster.ssh.nodes import fold_nodes
from cluster.values import integer, table, word
from engine.config.settings import RunConfig
from engine.runs.commit import checkpoints_folder, list_checkpoints
from engine.runs.folder import RunFolder, typed_overrides
from engine.runs.manifest import MANIFEST_FILE
from engine.runs.oom import Where, less_memory_text
from engine.runs.records import read_json_object

_MAX_ERROR_BYTES = 4 << 20


def rank_errors(node: NodePlan, run: RunFolder, offset_ns: int = 0) -> list[dict[str, Any]]:
    """The errors that ranks of `node` left, with time_ns in our clock; files of ranks of other nodes are ignored."""
    errors = []
    for rank in node.ranks:
        path = run.log_path(node.name, rank).with_suffix(".error.json")
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if path.stat().st_size <= _MAX_ERROR_BYTES and (error := read_json_object(path)):
                time_ns = integer(error, "time_ns")
                errors.append({**error, "rank": rank, "time_ns": None if time_ns is None else time_ns - offset_ns})
    return errors


def _evidence(found: Part, run: RunFolder) -> NodeEvidence:
    """What a node shows; what came of our own request to stop is left out or marked as an echo."""
    node, outcome, loss = found.node, found.status.outcome, found.loss
    order = found.order or _order_of_others(found.status)
    vanished = [death for death in found.deaths if _came_before(death, order)]
    death = found.torchrun_death(run)
    if order is not None and (death is None or death.rank not in {seen.rank for seen in vanished}):
        death = order.death  # what it says after it was asked to stop may be our doing
    death = _timed(death, vanished)
    return NodeEvidence(
        node.name,
        [_marked(error, order) for error in rank_errors(node, run, found.status.clock_offset_ns)],
        death,
        vanished,
        integer(outcome, "exit_code") if word(outcome, "cause") == "exit" else None,
        kill_facts(table(outcome, "memory")),
        None if loss is None else loss.reason,
        None if loss is None else loss.since_ns,
        tail_text(torchrun_log(node, run), start=found.log_start),
    )


def _order_of_others(status: NodeStatus) -> StopOrder | None:
    """When the node itself, or somebody who controlled the run before, began to stop its ranks."""
    at_ns = integer(status.outcome, "stop_at_ns")
    if at_ns is None or word(status.outcome, "cause") not in ("stop", "lease"):
        return None
    return StopOrder(at_ns - status.clock_offset_ns)


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


_STOPS_RANKS = re.compile(r"failed \(exitcode: |closing signal SIG")
_SETTLED_NS = 1_000_000_000  # a folder that changed this recently may change again within the tick of its clock


class Signs:
    """Looks at what the nodes say and at the files of their ranks; `strong` and `weak` give one line per node.

    A weak sign is an end that looks well, but may have come too early.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._read: dict[str, tuple[tuple[int, int] | None, str | None]] = {}  # as of when, and what was found

    def strong(self, nodes: Sequence[Part]) -> dict[str, str]:
        """Nodes on which something failed, and what."""
        return {one.name: text for one in nodes if (text := self._of_node(one))}

    def weak(self, nodes: Sequence[Part]) -> dict[str, str]:
        """Nodes on which ranks ended without any sign of a failure."""
        found = {}
        for one in nodes:
            ended = [death for death in one.deaths if not death.exit_code]
            if integer(one.status.outcome, "exit_code") == 0:
                found[one.name] = "its ranks have ended"
            elif ended:
                found[one.name] = f"rank {ended[0].rank} has ended"
        return found

    def _of_node(self, found: Part) -> str | None:
        outcome = found.status.outcome
        if outcome is not None and (word(outcome, "cause") == "lease" or integer(outcome, "exit_code") != 0):
            return found.status.end
        bad = [death for death in found.deaths if death.exit_code]
        if bad:
            signal = bad[0].signal
            how = signal.name if signal is not None else f"exit code {bad[0].exit_code}"
            return f"rank {bad[0].rank} ended ({how})"
        return self._of_files(found)

    def _of_files(self, found: Part) -> str | None:
        """What the ranks left, or their torchrun says when it ends them; read again only when that has changed."""
        try:
            changed_ns = self._run.log_dir(found.name).stat().st_mtime_ns
        except OSError:
            return None
        log = torchrun_log(found.node, self._run)
        stamp, text = (changed_ns, log.stat().st_size if log.exists() else 0), None
        before, known = self._read.get(found.name, (None, None))
        if known is not None or stamp == before:
            return known
        if errors := rank_errors(found.node, self._run):
            text = f"rank {errors[0]['rank']} failed"
        elif _STOPS_RANKS.search(tail_text(log, start=found.log_start)):
            text = "torchrun stops its ranks, for one has failed"
        self._read[found.name] = (stamp if time.time_ns() - changed_ns > _SETTLED_NS else None, text)
        return text


OWN_CAUSES = frozenset({"failure", "hang", "node lost", "start", "completed", "exception"})  # why a controller stops
_WEAK_KINDS = ("peer_lost", "launcher", "exit")  # what ranks show whose launcher is gone


def judge(
    fleet: Fleet, failure: Failure | None = None, *, cancelled: bool = False, is_orphan: bool = False
) -> LaunchOutcome:
    """The outcome of a run whose nodes have all ended, or were given up.

    failure: what its controller itself found. cancelled: it was asked to stop the run. is_orphan: there was none.
    """
    leftover, state = fleet.leftover, fleet.run.read_state()["state"]
    if state == "completed":
        return LaunchOutcome("completed", 0, leftover=leftover)
    found = failure or next((one.status.failure for one in fleet.parts if one.status.failure), None)
    if found is None and (cancelled or _was_cancelled(fleet, state)):
        return LaunchOutcome("cancelled", INTERRUPTED, leftover=leftover)
    failure = complete(found or _find(fleet, is_orphan=is_orphan), fleet)
    return LaunchOutcome(failure.status, failure.exit_code, failure, leftover)


def complete(failure: Failure, fleet: Fleet) -> Failure:
    """`failure` with its place, its log, memory beside what was predicted, the last checkpoint, and advice."""
    failure = _located(failure, fleet)
    if failure.kind == "oom":
        failure = replace(failure, memory=_compared(failure, fleet))
    failure = replace(failure, checkpoint=last_checkpoint(fleet.run, fleet.plan))
    return replace(failure, advice=advice(failure, fleet.run.path, fleet.plan.config))


def last_checkpoint(run: RunFolder, plan: LaunchPlan) -> str | None:
    """The checkpoint of the most steps that was committed: its folder here, or that on the run's nodes; or None."""
    known = list_checkpoints(checkpoints_folder(plan.config.train.checkpoint, run.path))
    here = next((checkpoint for checkpoint in known if (checkpoint.path / MANIFEST_FILE).exists()), None)
    told = max(run.saved_steps(), default=0)
    if not plan.has_own_folders or told <= (0 if here is None else here.step):
        return None if here is None else str(here.path)
    root = roots_of(plan)[plan.nodes[0].name]
    return f"{root}/step-{told:08d} on {fold_nodes([node.name for node in plan.nodes])}"


def _find(fleet: Fleet, *, is_orphan: bool) -> Failure:
    if refused := _with_cause(fleet, "start_failed"):
        text = word(refused[0].status.outcome, "error", 1000) or "the command could not be started"
        return Failure("start", "StartFailed", text, host=refused[0].name)
    if is_orphan and not any(one.loss or one.status.outcome for one in fleet.parts):
        return Failure("launcher", "LauncherLost", "the launcher was gone before any node had begun")
    failure = find_failure([_evidence(one, fleet.run) for one in fleet.parts])
    waited = [one.name for one in _with_cause(fleet, "lease")]
    if waited and failure.kind in _WEAK_KINDS and failure.signal is None:
        text = (
            f"the launcher was gone for {fleet.plan.config.cluster.lease_s:g} s, so these nodes stopped their ranks: "
        )
        return Failure("launcher", "LauncherLost", text + ", ".join(waited))
    return failure


def _with_cause(fleet: Fleet, cause: str) -> list[Part]:
    """The nodes that say that their part ended so."""
    return [one for one in fleet.parts if word(one.status.outcome, "cause") == cause]


def _was_cancelled(fleet: Fleet, state: str) -> bool:
    """Whether ranks or somebody on the nodes ended the run on purpose, and nothing failed before."""
    if state == "cancelled" and not fleet.run.rank_errors():
        return True
    causes = {str(word(one.status.outcome, "stop_cause")) for one in _with_cause(fleet, "stop")}
    return bool(causes - OWN_CAUSES) and not fleet.run.rank_errors()


def _located(failure: Failure, fleet: Fleet) -> Failure:
    """`failure` with node, log and, where the rank could not say, the last step and phase the run recorded."""
    nodes = fleet.plan.nodes
    node = next((node for node in nodes if node.name == failure.host), nodes[0])
    host = failure.host or (node.name if len(nodes) == 1 else None)
    log = torchrun_log(node, fleet.run)
    if failure.rank is not None and (rank_log := fleet.run.log_path(node.name, failure.rank)).exists():
        log = rank_log
    step, phase = failure.step, failure.phase
    if step is None and phase is None:
        step = next((row["step"] for row in reversed(fleet.run.read_metrics()) if "step" in row), None)
        if step is None:
            events = (event for event in reversed(fleet.run.read_events()) if event.get("kind") == "phase")
            phase = next((str(event.get("phase")) for event in events), None)
    return replace(failure, host=host, log=failure.log or str(log), step=step, phase=phase)


def _compared(failure: Failure, fleet: Fleet) -> dict[str, Any]:
    """The memory of a failure beside the limit of the host and what memory_plan.json predicted for one rank."""
    memory = failure.memory or {}
    where = memory.get("where", "host")
    plan = read_json(str(fleet.run.path / "memory_plan.json")) or {}
    # On a CPU run the device is the host: what is predicted there is the device's peak.
    on_device = where == "device" or fleet.plan.config.cluster.backend == "gloo"
    capacity = memory.get("capacity_bytes") or (_host_limit(failure.host, fleet) if where == "host" else None)
    predicted = plan.get("device_peak_bytes" if on_device else "host_peak_bytes")
    return {**memory, "where": where, "capacity_bytes": capacity, "predicted_peak_bytes": predicted}


def _host_limit(host: str | None, fleet: Fleet) -> int | None:
    """Host memory of node `host`, as its supervisor last measured it."""
    status = next((one.status for one in fleet.parts if one.name == host), None)
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
            check = node_command(failure.host or "", "check-nodes", overrides=typed_overrides(run_path))
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
