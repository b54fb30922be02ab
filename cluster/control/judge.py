"""How a run ended: from what its nodes left behind to one verdict, with place, memory and advice."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.agent.folder import read_json
from cluster.control.attempt import torchrun_log
from cluster.control.fleet import Fleet, Part, kill_facts
from cluster.control.link import INTERRUPTED, LaunchOutcome
from cluster.failure import Failure, NodeEvidence, find_failure
from cluster.plan import LaunchPlan, roots_of
from cluster.remote_text import integer, table, word
from cluster.ssh.hosts import fold_nodes, node_command
from engine.config.settings import RunConfig
from engine.runs.commit import checkpoints_folder, list_checkpoints
from engine.runs.folder import RunFolder, typed_overrides
from engine.runs.manifest import MANIFEST_FILE
from engine.runs.oom import less_memory_text

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
    # Ranks, or somebody on the nodes, may have ended the run on purpose, if nothing failed before.
    causes = {str(word(one.status.outcome, "stop_cause")) for one in _with_cause(fleet, "stop")}
    was_cancelled = (state == "cancelled" or bool(causes - OWN_CAUSES)) and not fleet.run.rank_errors()
    if found is None and (cancelled or was_cancelled):
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
    if is_orphan and not any(one.lost or one.status.outcome for one in fleet.parts):
        return Failure("launcher", "LauncherLost", "the launcher was gone before any node had begun")
    failure = find_failure([_evidence(one) for one in fleet.parts])
    waited = [one.name for one in _with_cause(fleet, "lease")]
    if waited and failure.kind in _WEAK_KINDS and failure.signal is None:
        text = (
            f"the launcher was gone for {fleet.plan.config.cluster.lease_s:g} s, so these nodes stopped their ranks: "
        )
        return Failure("launcher", "LauncherLost", text + ", ".join(waited))
    return failure


def _evidence(part: Part) -> NodeEvidence:
    """What a node shows; what came of our own request to stop is left out or marked as an echo."""
    outcome, stopped_ns, death = part.status.outcome, part.stopped_ns, part.torchrun_death
    if stopped_ns is None and word(outcome, "cause") in ("stop", "lease"):  # by the node, or who led the run before
        at_ns = integer(outcome, "stop_at_ns")
        stopped_ns = None if at_ns is None else at_ns - part.status.clock_offset_ns
    seen = {one.rank: one for one in part.deaths if stopped_ns is None or (one.at_ns or stopped_ns) < stopped_ns}
    if stopped_ns is not None and (death is None or death.rank not in seen):
        death = part.death_before  # what it says after it was asked to stop may be our doing
    if death is not None and death.rank in seen:
        death = replace(death, at_ns=seen[death.rank].at_ns, kill=seen[death.rank].kill)
    errors = []
    for error in part.errors:
        is_late = stopped_ns is not None and (error["time_ns"] or 0) > stopped_ns
        errors.append({**error, "is_echo": is_late or error.get("kind") == "peer_lost"})
    return NodeEvidence(
        part.name,
        errors,
        death,
        list(seen.values()),
        integer(outcome, "exit_code") if word(outcome, "cause") == "exit" else None,
        kill_facts(table(outcome, "memory")),
        part.lost,
        None if part.lost is None else part.lost_ns,
        part.torchrun_text,
    )


def _with_cause(fleet: Fleet, cause: str) -> list[Part]:
    """The nodes that say that their part ended so."""
    return [one for one in fleet.parts if word(one.status.outcome, "cause") == cause]


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
    capacity = memory.get("capacity_bytes")
    status = next((one.status for one in fleet.parts if one.name == failure.host), None)
    if not capacity and where == "host" and status is not None:  # as its supervisor last measured it
        killed = table(table(status.outcome, "memory"), "memory")
        capacity = integer(killed, "capacity_bytes") or integer(status.health, "memory_limit_bytes")
    predicted = plan.get("device_peak_bytes" if on_device else "host_peak_bytes")
    return {**memory, "where": where, "capacity_bytes": capacity, "predicted_peak_bytes": predicted}


def advice(failure: Failure, run_path: Path, config: RunConfig) -> str:
    """What to do next; `run_path` is the run folder."""
    log = failure.log or "the log"
    resume = f"burst resume {shlex.quote(run_path.name)}"
    again = f"`{resume}` starts the same ranks again."
    match failure.kind:
        case "config" | "user":
            return "Correct the setting or file that the message names and launch again."
        case "oom":
            is_device = failure.memory is not None and failure.memory.get("where") == "device"
            return less_memory_text(config, "device" if is_device else "host")
        case "signal" if failure.signal == "SIGKILL":
            text = less_memory_text(config, "host")
            remedy = f"{text[0].lower()}{text[1:]}"
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
