"""How one run is: everything that `burst status` shows, gathered once, as values and as one JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from burst_cli.fleet_rows import FleetHints, NodeRow, node_rows
from burst_cli.nccl_network import fallback_rows, socket_fallbacks
from burst_cli.run_facts import read_nodes, seconds_between, word
from burst_cli.run_progress import RunProgress
from burst_cli.run_watch import RunState
from cluster.control.link import NodeStatus
from engine.runs import RunFolder

_FIGURES = ("loss", "tokens_per_s", "tokens_per_s_per_device", "mfu", "peak_memory_bytes")


@dataclass(frozen=True)
class RunStatus:
    """One run as it is now. next_steps: (command, what it does) that a person may want to type.

    fallbacks: nodes on which NCCL took sockets in place of planned RDMA ports, with its own words.
    """

    run: RunFolder
    seen: RunState
    progress: RunProgress
    statuses: tuple[NodeStatus, ...]
    rows: tuple[NodeRow, ...]
    fallbacks: Mapping[str, str]

    @property
    def goes_on(self) -> bool:
        """Whether nodes that were asked say that ranks run."""
        return any(status.phase in ("starting", "running", "stopping") for status in self.seen.nodes)

    @property
    def shown_state(self) -> str:
        """The state in run.json; lost where nobody controls a run that has not ended, and no rank is seen to go on."""
        return "lost" if self.seen.is_lost and not self.goes_on else self.seen.state

    @property
    def elapsed_s(self) -> float | None:
        """Seconds of this attempt, so far."""
        document = self.seen.document
        return seconds_between(document.get("started_at"), document.get("ended_at"))

    @property
    def leftover(self) -> list[str]:
        """What may still run somewhere although the run has ended."""
        left = self.seen.document.get("leftover")
        return [text for entry in left if (text := word({"text": entry}, "text"))] if isinstance(left, list) else []

    def next_steps(self) -> list[tuple[str, str]]:
        """What to type next, most useful first."""
        name, state = self.run.run_id, self.seen.state
        if self.seen.is_lost:
            return [
                (f"burst resume {name}", "takes it over where it still runs, else starts its next attempt"),
                (f"burst cancel {name}", "stops what may still run"),
            ]
        if state == "completed":
            return [(f"burst report {name}", "shows its figures")]
        if state in ("failed", "oom"):
            failure = self.seen.document.get("failure")
            rank = failure.get("rank") if isinstance(failure, Mapping) else None
            which = f" --ranks {rank}" if isinstance(rank, int) else ""
            return [
                (f"burst logs {name}{which}", "shows what was said last"),
                (f"burst resume {name}", "starts the next attempt"),
            ]
        if state == "cancelled":
            return [(f"burst resume {name}", "starts the next attempt")]
        if state == "planned":
            return [(f"burst resume {name}", "starts it")]
        return [(f"burst logs -f {name}", "follows its ranks"), (f"burst cancel {name}", "stops it")]


def gather_status(run: RunFolder, seen: RunState) -> RunStatus:
    """All of it, from the run folder and from what nodes that were asked said."""
    progress = attached_progress(run, seen)
    progress.poll()
    statuses = merge_statuses(read_nodes(run, progress.facts), seen.nodes)
    hints = FleetHints(progress.straggler)
    rows = node_rows(statuses, progress.facts, hints, is_over=seen.is_final)
    return RunStatus(run, seen, progress, tuple(statuses), tuple(rows), socket_fallbacks(run))


def attached_progress(run: RunFolder, seen: RunState) -> RunProgress:
    """The progress of a run that began earlier."""
    progress = RunProgress(run, 0, ran_s=seconds_between(seen.document.get("started_at")) or 0.0)
    progress.total_steps = progress.facts.steps or 0
    return progress


def merge_statuses(read: Sequence[NodeStatus], told: Sequence[NodeStatus]) -> list[NodeStatus]:
    """What lies in the run folder, replaced by what the nodes said themselves; of those that said nothing, why not."""
    by_name = {status.node: status for status in told}
    merged = []
    for status in read:
        new = by_name.get(status.node)
        if new is None:
            merged.append(status)
        elif new.problem is not None and new.phase in ("none", "lost"):
            merged.append(replace(status, problem=new.problem))
        else:
            merged.append(new)
    return merged


def status_document(status: RunStatus) -> dict[str, Any]:
    """The one JSON document of `burst status --json`."""
    seen, progress, facts = status.seen, status.progress, status.progress.facts
    document = seen.document
    return {
        "run_id": status.run.run_id,
        "exp": status.run.exp,
        "path": str(status.run.path),
        "status": seen.state,
        "lost": seen.is_lost,
        "problem": seen.problem,
        "exit_code": seen.exit_code,
        "attempt": document.get("attempt"),
        "started_at": document.get("started_at"),
        "ended_at": document.get("ended_at"),
        "elapsed_s": status.elapsed_s,
        "controller": _controller(seen),
        "launcher": facts.launcher,
        "attention_preset": facts.preset,
        "seq_len": facts.seq_len,
        "world_size": facts.world_size,
        "phase": progress.phase,
        "step": progress.step,
        "steps": progress.total_steps or None,
        **{name: progress.figure(name) for name in _FIGURES},
        "remaining_s": None if seen.is_final else progress.remaining_s(),
        "silence_s": None if seen.is_final else progress.silence_s,
        "straggler_rank": progress.straggler,
        "warnings": progress.warnings[-20:],
        "socket_fallback": fallback_rows(status.fallbacks),
        "nodes": [_node(one, row) for one, row in zip(status.statuses, status.rows, strict=True)],
        "failure": document.get("failure"),
        "leftover": status.leftover,
        "next": [command for command, _ in status.next_steps()],
    }


def is_detached(pid: int | None) -> bool | None:
    """Whether the controller is a process in the background; None when it cannot be seen."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if pid else []
    except OSError:
        return None
    return b"burst_cli.follow" in words if words else None


def _controller(seen: RunState) -> dict[str, Any] | None:
    found = seen.controller
    if found is None:
        return None
    detached = is_detached(found.pid)
    return {"pid": found.pid, "host": found.host, "since": found.since, "alive": True, "detached": detached}


def _node(status: NodeStatus, row: NodeRow) -> dict[str, Any]:
    health = status.health or {}
    return {
        "node": status.node,
        "phase": status.phase,
        "heard_s": status.heard_s if status.heard_s != float("inf") else None,
        "problem": status.problem,
        "mark": row.mark,
        "notes": list(row.notes),
        "health": health or None,
        "outcome": status.outcome,
    }
