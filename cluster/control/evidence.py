"""What the nodes of a run left behind, gathered from the run folder for `cluster.failure`.

Signs that a run is failing, per node, as early as they can be seen. Who is to blame is judged at the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.control.link import NodeStatus
from cluster.failure import Death, KillFacts, NodeEvidence, first_death
from cluster.plan import NodePlan
from cluster.values import integer, rows, table, word
from engine.runs.folder import RunFolder
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
