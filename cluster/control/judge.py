"""How a run ended: from what its nodes left behind to one verdict, with place, memory and advice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.advice import advice
from cluster.agent.folder import read_json
from cluster.control.evidence import NodeFindings, collect_evidence, torchrun_log
from cluster.control.link import as_pids
from cluster.control.outcome import INTERRUPTED, LaunchOutcome, Leftover
from cluster.failure import Failure, find_failure
from cluster.node_checkpoints import roots_of
from cluster.plan import LaunchPlan
from cluster.ssh.nodes import fold_nodes
from cluster.values import integer, table, word
from engine.runs.commit import checkpoints_folder, list_checkpoints
from engine.runs.folder import RunFolder
from engine.runs.manifest import MANIFEST_FILE

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
