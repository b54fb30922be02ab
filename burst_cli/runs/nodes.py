"""How the nodes of a run are: a row per node, those that are alike in one, and a table as wide as there is room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from burst_cli.figures import DASH, binary_bytes, fold_names, fold_numbers, grouped, percent
from burst_cli.render import Column, fitted_table
from burst_cli.runs.read import RunFacts
from cluster.control.link import NodeStatus
from cluster.remote_text import integer, number, rows, table, word

QUIET_S = 10.0  # a healthy node speaks every 2 s, and writes how it is every 5 s
LITTLE_DISK_BYTES = 2**30
MUCH_MEMORY = 0.95
HOT_C = 90.0
_RANK_STATES = {"stopped": ("T", "t"), "dead": ("Z", "X"), "gone": ("gone",)}
_COLUMNS = (
    Column("node", 0, is_number=False),
    Column("state", 1, is_number=False),
    Column("ranks", 3, is_number=False),
    Column("GPU", 2),
    Column("load", 5),
    Column("memory", 6),
)
_STYLES = {"bad": "bold red", "warn": "yellow", "ok": ""}  # the worst first
_PHASE_STYLES = {"running": "green", "stopping": "yellow", "lost": "bold red", "none": "dim", "ended": ""}


@dataclass(frozen=True)
class NodeRow:
    """One node, or several that are alike; then every figure has one value per node that says it.

    ranks: the state of each in /proc/PID/stat. load, gpu: of all cores and of each GPU, in percent. memory: the share
    that is used. notes: what a person should know, worst first; mark: how bad the worst of it is: ok, warn, bad.
    """

    nodes: tuple[str, ...]
    phase: str
    mark: str
    notes: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    load: tuple[float, ...] = ()
    gpu: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """Names in short."""
        return fold_names(self.nodes)


# --- rows -------------------------------------------------------------------------------------------------------------


def node_rows(
    statuses: Sequence[NodeStatus], facts: RunFacts, straggler: int | None = None, *, is_over: bool = False
) -> list[NodeRow]:
    """A row per node, in their order. straggler: the rank that the others wait for.

    is_over: the run has ended, so silence is no news.
    """
    late = next((node.name for node in facts.nodes if straggler in node.ranks), None)
    found = []
    for status in statuses:
        health = (status.health if status.phase != "ended" else None) or {}
        states, bad, warn = _rank_states(health), _end_notes(status), list[str]()
        if not is_over:
            bad += _rank_notes(_unended(states, status)) if status.phase == "running" else []
            warn += _warn_notes(status, health)
            warn += [f"straggler: rank {straggler}"] if status.node == late else []
        mark = "bad" if bad else "warn" if warn else "ok"
        figures = ([number(health, "load1")], [number(gpu, "utilization") for gpu in rows(health, "gpus")])
        load, gpu, memory = (
            tuple(value for value in values if value is not None) for values in (*figures, [_memory_used(health)])
        )
        ranks = tuple(states.values())
        found.append(NodeRow((status.node,), status.phase, mark, (*bad, *warn), ranks, load, gpu, memory))
    return found


def fold_rows(rows: Sequence[NodeRow]) -> list[NodeRow]:
    """`rows` with those that are alike but for figures folded; worst first, those that are well last."""
    alike = grouped(((row.mark, row.phase, *map(without_figures, row.notes)), row) for row in rows)
    folded = []
    for group in alike.values():
        names = ("nodes", "ranks", "load", "gpu", "memory")
        joined: dict[str, Any] = {name: tuple(v for row in group for v in getattr(row, name)) for name in names}
        folded.append(replace(group[0], **joined))
    return sorted(folded, key=lambda row: list(_STYLES).index(row.mark))


def without_figures(note: str) -> str:
    """A note without its digits: `not heard for 12 s` is the same news every second."""
    return "".join(char for char in note if not char.isdigit())


def _end_notes(status: NodeStatus) -> list[str]:
    """Why it cannot be heard, and how its part ended, unless that was well or asked for."""
    notes = []
    if status.problem:
        notes.append((word({"text": status.problem}, "text") or "").removeprefix(f"{status.node}: "))
    if status.phase == "lost":
        notes.append("its supervisor is gone without a word")
    cause = word(status.outcome, "cause")
    if status.end and (cause == "lease" or (cause != "stop" and number(status.outcome, "exit_code") != 0)):
        notes.append(status.end)
    return notes


def _unended(states: Mapping[int, str], status: NodeStatus) -> dict[int, str]:
    """Those of ranks that have not ended well, as all do when a run completes."""
    deaths = rows(status.supervisor, "deaths")
    well = {integer(death, "rank") for death in deaths if integer(death, "exit_code") == 0}
    return {rank: state for rank, state in states.items() if rank not in well}


def _rank_notes(states: Mapping[int, str]) -> list[str]:
    hit = {name: [rank for rank, state in states.items() if state in letters] for name, letters in _RANK_STATES.items()}
    return [
        f"rank{'' if len(ranks) == 1 else 's'} {fold_numbers(ranks)} {name}" for name, ranks in hit.items() if ranks
    ]


def _warn_notes(status: NodeStatus, health: Mapping[str, Any]) -> list[str]:
    notes = []
    if QUIET_S < status.heard_s != float("inf") and status.phase in ("starting", "running", "stopping"):
        notes.append(f"not heard for {status.heard_s:.0f} s")
    if (used := _memory_used(health)) is not None and used > MUCH_MEMORY:
        notes.append(f"memory {percent(used)} full")
    free = number(health, "disk_free_bytes")
    if free is not None and free < LITTLE_DISK_BYTES:
        notes.append(f"disk nearly full: {binary_bytes(free)} free")
    for gpu in rows(health, "gpus"):
        name = f"GPU {number(gpu, 'index') or 0:.0f}"
        heat, throttle = number(gpu, "temperature_c"), word(gpu, "throttle", 80)
        if throttle:
            notes.append(f"{name} is throttled: {throttle}")
        elif heat is not None and heat >= HOT_C:
            notes.append(f"{name} has {heat:.0f} °C")
    return notes


def _rank_states(health: Mapping[str, Any]) -> dict[int, str]:
    """{rank: letter} of those that a node names; at most a few characters each, whatever it says."""
    return {
        int(name): word(facts, "state", 8) or "?"
        for name, facts in table(health, "ranks").items()
        if name.isascii() and name.isdigit() and len(name) < 8
    }


def _memory_used(health: Mapping[str, Any]) -> float | None:
    used, limit = number(health, "memory_used_bytes"), number(health, "memory_limit_bytes")
    return used / limit if used is not None and limit else None


# --- the table --------------------------------------------------------------------------------------------------------


def nodes_table(rows: Sequence[NodeRow], width: int) -> Table:
    """Nodes that are alike in one row, the worst first; notes say more than the figures of nodes that are well."""
    folded = fold_rows(rows)
    cells = [_cells(row, max(8, width // 4)) for row in folded]
    notes = [Text("; ".join(row.notes), style=_STYLES[row.mark]) for row in folded]
    return fitted_table(_COLUMNS, cells, notes, width, notes_room=width // 2)[0]


def _cells(row: NodeRow, room: int) -> list[Text]:
    name = row.name if len(row.name) <= room or len(row.nodes) == 1 else f"{len(row.nodes)} nodes"
    unknown = "unknown" if row.notes else "not started"
    ranks = " ".join(f"{count} {letter}" for letter, count in sorted(Counter(row.ranks).items()))
    return [
        Text(name, style=_STYLES[row.mark]),
        Text(unknown if row.phase == "none" else row.phase, style=_PHASE_STYLES.get(row.phase, "")),
        Text(ranks or DASH),  # `3 R 1 T`: how many are in which state
        Text(_span(row.gpu, "%")),
        Text(_span(row.load, "", 1)),
        Text(_span([100 * share for share in row.memory], "%")),
    ]


def _span(values: Sequence[float], unit: str, digits: int = 0) -> str:
    """The value of all nodes, or the lowest and the highest."""
    if not values:
        return DASH
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"
