"""How the nodes of a run are, those that are alike in one row. Values only; nothing is drawn here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from burst_cli.figures import binary_bytes, percent
from burst_cli.log_files import fold_names, fold_numbers
from burst_cli.run_facts import RunFacts, number, word
from cluster.control.link import NodeStatus

QUIET_S = 10.0  # a healthy node speaks every 2 s, and writes how it is every 5 s
LITTLE_DISK_BYTES = 2**30
MUCH_MEMORY = 0.95
HOT_C = 90.0
_STATES = {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead", "gone": "gone"}


@dataclass(frozen=True)
class Span:
    """Lowest and highest of a figure over nodes; None: no node says."""

    low: float
    high: float

    def __or__(self, other: Span) -> Span:
        return Span(min(self.low, other.low), max(self.high, other.high))


@dataclass(frozen=True)
class NodeRow:
    """One node, or several that are alike.

    ranks: how many are in which state of /proc/PID/stat. notes: what a person should know, worst first; mark: how bad
    the worst of it is.
    """

    nodes: tuple[str, ...]
    phase: str
    heard_s: float | None = None
    ranks: tuple[tuple[str, int], ...] = ()
    load: Span | None = None
    gpu: Span | None = None
    memory: Span | None = None
    notes: tuple[str, ...] = ()
    mark: str = "ok"  # ok, warn, bad

    @property
    def name(self) -> str:
        """Names in short."""
        return fold_names(list(self.nodes))


@dataclass(frozen=True)
class FleetHints:
    """What is known of nodes beside their own words: the rank that the others wait for."""

    straggler: int | None = None


def node_rows(
    statuses: Sequence[NodeStatus], facts: RunFacts, hints: FleetHints = FleetHints(), *, is_over: bool = False
) -> list[NodeRow]:
    """A row per node, in their order. is_over: the run has ended, so silence is no news."""
    planned = {node.name: node for node in facts.nodes}
    return [_row(status, planned.get(status.node), hints, is_over=is_over) for status in statuses]


def fold_rows(rows: Sequence[NodeRow]) -> list[NodeRow]:
    """`rows` with those that are alike but for figures folded; worst first, those that are well last."""
    alike: dict[tuple[str, ...], list[NodeRow]] = {}
    for row in rows:
        alike.setdefault((row.mark, row.phase, *map(without_figures, row.notes)), []).append(row)
    folded = [_folded(group) for group in alike.values()]
    return sorted(folded, key=lambda row: ("bad", "warn", "ok").index(row.mark))


def fit_rows(rows: Sequence[NodeRow], count: int) -> tuple[list[NodeRow], int]:
    """(at most `count` folded rows, how many nodes are left out); those that are well stay in sight."""
    if len(rows) <= count:
        return list(rows), 0
    well = [row for row in rows if row.mark == "ok"]
    odd = [row for row in rows if row.mark != "ok"]
    shown = [*odd[: max(0, count - len(well))], *well][: max(count, 0)]
    return shown, sum(len(row.nodes) for row in rows) - sum(len(row.nodes) for row in shown)


def without_figures(note: str) -> str:
    """A note without its digits: `not heard for 12 s` is the same news every second."""
    return "".join(char for char in note if not char.isdigit())


def _row(status: NodeStatus, planned: Any, hints: FleetHints, *, is_over: bool) -> NodeRow:
    health = (status.health if status.phase != "ended" else None) or {}
    states = _rank_states(health)
    ranks = planned.ranks if planned is not None else range(0)
    bad = _bad_notes(status, states, is_over=is_over)
    warn = [] if is_over else _warn_notes(status, health)
    if hints.straggler is not None and hints.straggler in ranks and not is_over:
        warn.append(f"straggler: rank {hints.straggler}")
    limit = number(health, "memory_limit_bytes")
    used = number(health, "memory_used_bytes")
    return NodeRow(
        nodes=(status.node,),
        phase=status.phase,
        heard_s=None if is_over or status.heard_s == float("inf") else status.heard_s,
        ranks=tuple(sorted(Counter(states.values()).items())),
        load=_span([number(health, "load1")]),
        gpu=_span([number(gpu, "utilization") for gpu in _gpus(health)]),
        memory=Span(used / limit, used / limit) if used is not None and limit else None,
        notes=(*bad, *warn),
        mark="bad" if bad else "warn" if warn else "ok",
    )


def _bad_notes(status: NodeStatus, states: Mapping[int, str], *, is_over: bool) -> list[str]:
    notes = []
    if status.problem:
        notes.append((word({"text": status.problem}, "text") or "").removeprefix(f"{status.node}: "))
    if status.phase == "lost":
        notes.append("its supervisor is gone without a word")
    outcome = status.outcome or {}
    code, cause = number(outcome, "exit_code"), word(outcome, "cause", 40)
    if cause == "lease":
        notes.append("it heard nothing of its launcher and stopped its ranks")
    elif cause == "start_failed":
        notes.append(f"start failed: {word(outcome, 'error') or 'no reason given'}")
    elif cause == "exit" and code:
        notes.append(f"ended by signal {-code:.0f}" if code < 0 else f"ended with exit code {code:.0f}")
    if not is_over and status.phase == "running":
        for state in dict.fromkeys(_STATES.values()):
            hit = [rank for rank, letter in states.items() if _STATES.get(letter) == state]
            if hit:
                notes.append(f"rank{'' if len(hit) == 1 else 's'} {fold_numbers(hit)} {state}")
    return notes


def _warn_notes(status: NodeStatus, health: Mapping[str, Any]) -> list[str]:
    notes = []
    if QUIET_S < status.heard_s != float("inf") and status.phase in ("starting", "running", "stopping"):
        notes.append(f"not heard for {status.heard_s:.0f} s")
    used, limit = number(health, "memory_used_bytes"), number(health, "memory_limit_bytes")
    if used is not None and limit and used / limit > MUCH_MEMORY:
        notes.append(f"memory {percent(used / limit)} full")
    free = number(health, "disk_free_bytes")
    if free is not None and free < LITTLE_DISK_BYTES:
        notes.append(f"disk nearly full: {binary_bytes(free)} free")
    for gpu in _gpus(health):
        name = f"GPU {number(gpu, 'index') or 0:.0f}"
        heat, throttle = number(gpu, "temperature_c"), word(gpu, "throttle", 40)
        if throttle and throttle.lower() not in ("none", "not active", "0x0000000000000000"):
            notes.append(f"{name} is throttled: {throttle}")
        elif heat is not None and heat >= HOT_C:
            notes.append(f"{name} has {heat:.0f} °C")
    return notes


def _rank_states(health: Mapping[str, Any]) -> dict[int, str]:
    """{rank: letter} of those that a node names; at most a few characters each, whatever it says."""
    ranks = health.get("ranks")
    if not isinstance(ranks, Mapping):
        return {}
    found = {}
    for name, facts in ranks.items():
        if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 8:
            found[int(name)] = word(facts, "state", 8) or "?"
    return found


def _gpus(health: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    gpus = health.get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, Mapping)] if isinstance(gpus, list) else []


def _span(values: Sequence[float | None]) -> Span | None:
    known = [value for value in values if value is not None]
    return Span(min(known), max(known)) if known else None


def _folded(rows: Sequence[NodeRow]) -> NodeRow:
    if len(rows) == 1:
        return rows[0]
    ranks: Counter[str] = Counter()
    for row in rows:
        ranks.update(dict(row.ranks))
    heard = [row.heard_s for row in rows if row.heard_s is not None]
    return NodeRow(
        nodes=tuple(name for row in rows for name in row.nodes),
        phase=rows[0].phase,
        heard_s=max(heard, default=None),
        ranks=tuple(sorted(ranks.items())),
        load=_union([row.load for row in rows]),
        gpu=_union([row.gpu for row in rows]),
        memory=_union([row.memory for row in rows]),
        notes=rows[0].notes,
        mark=rows[0].mark,
    )


def _union(spans: Sequence[Span | None]) -> Span | None:
    whole: Span | None = None
    for span in spans:
        if span is not None:
            whole = span if whole is None else whole | span
    return whole
