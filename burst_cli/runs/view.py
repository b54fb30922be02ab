"""A run as a person watches it: a row per node, one live block on a terminal, plain lines anywhere else (on stderr)."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from burst_cli.render import (
    Column,
    clean,
    fitted_table,
    fold_names,
    fold_numbers,
    grouped,
    say,
    sparkline,
)
from burst_cli.runs.read import RunFacts, RunProgress
from cluster.control.judge import TRAINING_PHASE
from cluster.control.link import LaunchObserver, NodeStatus
from cluster.remote_text import integer, number, rows, table, word
from engine.runs.figures import DASH, EVALUATION_NAMES, binary_bytes, count, count_of, duration, percent, plain
from engine.runs.files import utc_now

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


# --- the run while it lives -------------------------------------------------------------------------------------------


REFRESH_S = 0.2
PLAIN_INTERVAL_S, LOG_INTERVAL_S = 2.0, 60.0
_NODES_S = 1.0
_SPARKLINE_WIDTH = 24
_SHARE = 20  # drawing takes at most this part of the time of the controller, whose thread it is


@contextlib.contextmanager
def open_view(console: Console, progress: RunProgress, *, is_log: bool = False) -> Iterator[LaunchObserver]:
    """The view for this console: live on a terminal, lines on anything else; with their times for a log."""
    if is_log or not console.is_terminal:
        yield PlainView(console, progress, is_log=is_log)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:  # no thread: `tick` refreshes
        yield LiveView(console, progress, live)


class _View(LaunchObserver):
    """What both views say in lines."""

    def __init__(self, console: Console, progress: RunProgress) -> None:
        self._console, self._progress, self._clock = console, progress, progress.clock
        self._next = 0.0

    def note(self, text: str) -> None:
        """One line."""
        self._say(f"note: {text}")

    def _say(self, text: str) -> None:
        say(self._console, clean(text))

    def _poll(self) -> None:
        """Take up what is new, and say new warnings."""
        for text in self._progress.poll():
            self._say(f"warning: {text}")

    def _rows(self, statuses: Sequence[NodeStatus]) -> list[NodeRow]:
        return node_rows(statuses, self._progress.facts, self._progress.straggler)


class LiveView(_View):
    """One block that is redrawn in place; warnings and notes stay above it."""

    def __init__(self, console: Console, progress: RunProgress, live: Live) -> None:
        super().__init__(console, progress)
        self._live = live
        self._stop_line: str | None = None
        self._statuses: Sequence[NodeStatus] = ()

    def tick(self) -> None:
        """Redraw, at most five times a second; less often where drawing takes long."""
        now = self._clock()
        if now < self._next:
            return
        self._poll()
        with contextlib.suppress(OSError, ValueError):  # our consoles are made with the size of their beginning
            self._console.size = ConsoleDimensions(*os.get_terminal_size(self._console.file.fileno()))
        block = draw(self._progress, self._rows(self._statuses), self._stop_line, self._console.width)
        self._live.update(block, refresh=True)
        self._next = now + max(REFRESH_S, _SHARE * (self._clock() - now))

    def nodes(self, statuses: Sequence[NodeStatus]) -> None:
        """Keep them for the next drawing."""
        self._statuses = tuple(statuses)

    def stopping(self, cause: str, grace_s: float) -> None:
        """Show the request below the figures."""
        self._stop_line = _stop_text(cause, grace_s)
        self._next = 0.0
        self.tick()


class PlainView(_View):
    """Lines: phases, figures every few seconds and at the last step, nodes whose state changes or that are not well."""

    def __init__(self, console: Console, progress: RunProgress, *, is_log: bool = False) -> None:
        super().__init__(console, progress)
        self._is_log = is_log
        self._next_nodes, self._shown_step, self._shown_phase = 0.0, 0, ""
        self._known: dict[str, tuple[str, frozenset[str]]] = {}  # node: phase, kinds of notes

    def tick(self) -> None:
        """Print what is new, figures at most every PLAIN_INTERVAL_S, in a log every LOG_INTERVAL_S."""
        progress = self._progress
        self._poll()
        if progress.phase != self._shown_phase:
            self._shown_phase = progress.phase
            self._say(progress.phase)
        is_due = self._clock() >= self._next or progress.step == progress.total_steps
        if progress.step > self._shown_step and is_due:
            self._next = self._clock() + (LOG_INTERVAL_S if self._is_log else PLAIN_INTERVAL_S)
            self._shown_step = progress.step
            self._say(plain_line(progress))

    def nodes(self, statuses: Sequence[NodeStatus]) -> None:
        """A line for every change that a person should know, one for nodes that change alike; looked for every second.

        `node tb[1-3]: running`, `node tb4: rank 13 stopped`, `node tb4: well again`
        """
        if self._clock() < self._next_nodes:
            return
        self._next_nodes = self._clock() + _NODES_S
        news = grouped((text, row.name) for row in self._rows(statuses) for text in self._changes(row))
        for text, names in news.items():
            self._say(f"node {fold_names(names)}: {text}")

    def stopping(self, cause: str, grace_s: float) -> None:
        """One line."""
        self._say(_stop_text(cause, grace_s))

    def _changes(self, row: NodeRow) -> list[str]:
        phase, known = self._known.get(row.name, ("none", frozenset[str]()))
        kinds = {without_figures(note): note for note in row.notes}
        self._known[row.name] = row.phase, frozenset(kinds)
        news = [row.phase] if row.phase != phase else []
        news += [note for kind, note in kinds.items() if kind not in known]
        return news + (["well again"] if known and not kinds else [])

    def _say(self, text: str) -> None:
        super()._say(f"{utc_now()} {text}" if self._is_log else text)


def plain_line(progress: RunProgress) -> str:
    """step, loss, speed, MFU, memory and time left in one line; of an evaluation what it found."""
    latest, figure = progress.latest, progress.figure
    if latest is not None and "loss" not in latest:
        found = [f"{name} {plain(figure(key))}" for key, name in EVALUATION_NAMES.items() if figure(key) is not None]
        return "  ".join([f"weights of step {progress.step}", *found])
    parts = [
        f"step {progress.step}/{progress.total_steps}",
        f"loss {plain(figure('loss'))}",
        f"{count(figure('tokens_per_s'))} tokens/s",
        f"MFU {percent(figure('mfu'))}",
        f"memory {binary_bytes(figure('peak_memory_bytes'))}",
        f"left {duration(progress.remaining_s())}",
    ]
    if latest is not None and latest is progress.validation:
        parts += [f"{name} {plain(figure(key))}" for key, name in list(EVALUATION_NAMES.items())[:2]]
    return "  ".join(parts)


def _stop_text(cause: str, grace_s: float) -> str:
    again = "; press Ctrl-C again to kill them now" if cause == "Ctrl-C" else ""
    if not grace_s:
        return f"{cause}: killing the ranks now"
    return f"{cause}: stopping the ranks, killing what is left after {grace_s:g} s{again}"


# --- the block --------------------------------------------------------------------------------------------------------


def draw(progress: RunProgress, rows: Sequence[NodeRow], stop_line: str | None, width: int) -> RenderableType:
    """The block, what matters most first: a terminal that is too low cuts its end off.

    stop_line: how the run is being stopped.
    """
    parts: list[RenderableType] = [heading(progress), _progress_line(progress, width)]
    parts += [figures_text(progress)] if progress.latest is not None else []
    urgent = stop_line or hang_text(progress)
    parts += [Text(urgent, style="yellow")] if urgent else []
    return Group(*parts, *([nodes_table(rows, width)] if rows else []))


def heading(progress: RunProgress) -> Text:
    """Run, preset, length of sequences, ranks on nodes, in one line."""
    facts, run = progress.facts, progress.run
    where = f"{facts.shape} ranks" if facts.nodes else facts.shape
    parts = filter(None, [facts.preset, where, f"seq {facts.seq_len:,}" if facts.seq_len else ""])
    text = Text(f"{run.exp}/{run.run_id}", style="bold", no_wrap=True, overflow="ellipsis")
    return text.append(f"  {', '.join(parts)}".rstrip(), style="dim")


def _progress_line(progress: RunProgress, width: int) -> RenderableType:
    """Bar, step, times and phase."""
    wide, elapsed, total = width // 4, duration(progress.elapsed_s()), progress.total_steps
    phase, bar = clean(progress.phase), ProgressBar(total=None, width=wide)
    step, times = Text(phase), elapsed
    if progress.latest is not None:
        bar = ProgressBar(total=total, completed=progress.step, width=wide)
        step = Text(f"step {progress.step}/{total}", style="bold")
        # Training needs no mention, because the steps tell.
        shown = "" if progress.phase == TRAINING_PHASE else f"  {phase}"
        times = f"{duration(progress.remaining_s())} left, {elapsed} elapsed{shown}"
    grid = Table.grid(padding=(0, 1))
    for least in (wide, min(len(step), width // 2), None):
        grid.add_column(no_wrap=True, overflow="ellipsis", min_width=least)
    grid.add_row(bar, step, Text(times, style="dim"))
    return grid


def figures_text(progress: RunProgress) -> Text:
    """Loss with its curve, speed, MFU, memory; validation when there was one."""
    figures = {
        "loss": f"{plain(progress.figure('loss'))} {sparkline(progress.losses, _SPARKLINE_WIDTH)}",
        "tokens/s/device": count(progress.figure("tokens_per_s_per_device")),
        "MFU": percent(progress.figure("mfu")),
        "peak memory": binary_bytes(progress.figure("peak_memory_bytes")),
    }
    if progress.validation is not None:
        figures["validation"] = plain(progress.figure("validation_loss"))
        figures["bits/byte"] = plain(progress.figure("validation_bits_per_byte"))
    text = Text("   ").join(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in figures.items())
    if progress.measured_steps:
        text.append(f"   median of {count_of('step', progress.measured_steps)}", "dim")
    return text


def hang_text(progress: RunProgress) -> str | None:
    """`no step for 25 s; stacks will be taken at 30 s`, once half of that time has passed."""
    silence, limit = progress.silence_s, progress.hang_limit_s
    if silence < limit / 2:
        return None
    what = "step" if progress.latest is not None else "first step"
    if silence < limit:
        return f"no {what} for {silence:.0f} s; stacks will be taken at {limit:.0f} s"
    return f"no {what} for {silence:.0f} s: it may hang, stacks are taken"
