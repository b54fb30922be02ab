"""A run as a person watches it: one live block on a terminal, plain lines anywhere else. All of it on stderr."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from burst_cli.figures import (
    binary_bytes,
    clean,
    count,
    duration,
    fold_names,
    grouped,
    percent,
    plain,
    sparkline,
)
from burst_cli.render import say
from burst_cli.runs.nodes import NodeRow, node_rows, nodes_table, without_figures
from burst_cli.runs.progress import RunProgress
from cluster.control.hang import TRAINING_PHASE
from cluster.control.link import LaunchObserver, NodeStatus
from cluster.remote_text import number
from engine.runs.files import utc_now

REFRESH_S = 0.2
PLAIN_INTERVAL_S, LOG_INTERVAL_S = 2.0, 60.0
_NODES_S = 1.0
_SPARKLINE_WIDTH = 24
_EVALUATED = {
    "validation_loss": "validation loss",
    "validation_bits_per_byte": "bits/byte",
    "needle_accuracy": "needles right",
    "needle_gain": "needle gain",
}
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
        found = [f"{name} {plain(figure(key))}" for key, name in _EVALUATED.items() if figure(key) is not None]
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
        parts += [f"{name} {plain(figure(key))}" for key, name in list(_EVALUATED.items())[:2]]
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
    if (row := progress.validation) is not None:
        figures["validation"] = plain(number(row, "validation_loss"))
        figures["bits/byte"] = plain(number(row, "validation_bits_per_byte"))
    return Text("   ").join(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in figures.items())


def hang_text(progress: RunProgress) -> str | None:
    """`no step for 25 s; stacks will be taken at 30 s`, once half of that time has passed."""
    silence, limit = progress.silence_s, progress.hang_limit_s
    if silence < limit / 2:
        return None
    what = "step" if progress.latest is not None else "first step"
    if silence < limit:
        return f"no {what} for {silence:.0f} s; stacks will be taken at {limit:.0f} s"
    return f"no {what} for {silence:.0f} s: it may hang, stacks are taken"
