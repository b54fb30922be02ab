"""A launch as a person watches it: one live block on a terminal, plain lines anywhere else. All of it on stderr."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live
from rich.text import Text

from burst_cli.figures import DASH, binary_bytes, clean, count, duration, percent, plain
from burst_cli.fleet_rows import FleetHints, NodeRow, node_rows, without_figures
from burst_cli.live_screen import Screen, draw
from burst_cli.log_warnings import WarningWatch
from burst_cli.run_progress import RunProgress
from cluster.control.link import NodeStatus

REFRESH_S = 0.2
PLAIN_INTERVAL_S = 2.0
_LOG_LOOK_S = 1.0
_NODES_S = 1.0
_EVALUATED = {
    "validation_loss": "validation loss",
    "validation_bits_per_byte": "bits/byte",
    "needle_accuracy": "needles right",
    "needle_gain": "needle gain",
}
_SHARE = 20  # drawing takes at most this part of the time of the controller, whose thread it is


class LaunchView(Protocol):
    """What the controller tells while it watches; see `cluster.control.outcome.LaunchObserver`."""

    def tick(self) -> None:
        """Look for news and show them."""

    def nodes(self, statuses: Sequence[NodeStatus]) -> None:
        """What is known of every node; called before `tick`."""

    def stopping(self, cause: str, grace_s: float) -> None:
        """Say that the run is being stopped."""

    def note(self, text: str) -> None:
        """Say something that a person should know."""


@contextlib.contextmanager
def open_view(console: Console, progress: RunProgress) -> Iterator[LaunchView]:
    """The view for this console: live on a terminal, lines on anything else."""
    if not console.is_terminal:
        yield PlainView(console, progress)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:  # no thread: `tick` refreshes
        yield LiveView(console, progress, live)


class LiveView:
    """One block that is redrawn in place; warnings and notes stay above it."""

    def __init__(
        self, console: Console, progress: RunProgress, live: Live, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._progress, self._live, self._clock = console, progress, live, clock
        self._next = 0.0
        self._stop_line: str | None = None
        self._statuses: Sequence[NodeStatus] = ()
        self._news = _News(progress)
        self._log_lines = WarningWatch(progress.run)
        self._next_log_look = 0.0

    def tick(self) -> None:
        """Redraw, at most five times a second; less often where drawing takes long."""
        now = self._clock()
        if now < self._next:
            return
        self._progress.poll()
        if now >= self._next_log_look:
            self._next_log_look = now + _LOG_LOOK_S
            self._log_lines.look()
        for text in self._news.warnings():
            self._console.print(text)
        self._live.update(self._block(), refresh=True)
        self._next = now + max(REFRESH_S, _SHARE * (self._clock() - now))

    def nodes(self, statuses: Sequence[NodeStatus]) -> None:
        """Keep them for the next drawing."""
        self._statuses = tuple(statuses)

    def stopping(self, cause: str, grace_s: float) -> None:
        """Show the request below the figures."""
        self._stop_line = _stop_text(cause, grace_s)
        self._next = 0.0
        self.tick()

    def note(self, text: str) -> None:
        """One line above the block."""
        self._console.print(_note(text))

    def _fit(self) -> None:
        """Take the size that the terminal has now; our consoles are made with that of their beginning."""
        with contextlib.suppress(OSError, ValueError):
            self._console.size = ConsoleDimensions(*os.get_terminal_size(self._console.file.fileno()))

    def _block(self) -> RenderableType:
        self._fit()
        hints = FleetHints(self._progress.straggler)
        rows = node_rows(self._statuses, self._progress.facts, hints)
        screen = Screen(self._progress, rows, self._stop_line, self._log_lines.newest())
        return draw(screen, self._console.width, self._console.height)


class PlainView:
    """Lines: phases, figures every few seconds and at the last step, nodes whose state changes or that are not well."""

    def __init__(self, console: Console, progress: RunProgress, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._progress, self._clock = console, progress, clock
        self._next = self._next_nodes = 0.0
        self._shown_step = 0
        self._shown_phase = ""
        self._news = _News(progress)
        self._node_news = NodeNews()

    def tick(self) -> None:
        """Print what is new, figures at most every PLAIN_INTERVAL_S."""
        progress = self._progress
        progress.poll()
        for text in self._news.warnings():
            self._say(text)
        if progress.phase != self._shown_phase:
            self._shown_phase = progress.phase
            self._say(Text(clean(progress.phase)))
        if progress.step > self._shown_step and self._is_due():
            self._next = self._clock() + PLAIN_INTERVAL_S
            self._shown_step = progress.step
            self._say(Text(plain_line(progress)))

    def nodes(self, statuses: Sequence[NodeStatus]) -> None:
        """A line for every change that a person should know; looked for once a second."""
        if self._clock() < self._next_nodes:
            return
        self._next_nodes = self._clock() + _NODES_S
        progress = self._progress
        for text in self._node_news.changes(node_rows(statuses, progress.facts, FleetHints(progress.straggler))):
            self._say(Text(text))

    def stopping(self, cause: str, grace_s: float) -> None:
        """One line."""
        self._say(Text(_stop_text(cause, grace_s)))

    def note(self, text: str) -> None:
        """One line."""
        self._say(_note(text))

    def _is_due(self) -> bool:
        progress = self._progress
        if progress.step == progress.total_steps:
            return True
        interval = progress.facts.log_interval
        return self._clock() >= self._next and progress.step // interval > self._shown_step // interval

    def _say(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


class NodeNews:
    """What has changed about nodes since the last time, one line per change; nodes that change alike share it."""

    def __init__(self) -> None:
        self._phases: dict[str, str] = {}
        self._notes: dict[str, frozenset[str]] = {}

    def changes(self, rows: Sequence[NodeRow]) -> list[str]:
        """Lines such as `node tb[1-3]: running`, `node tb4: rank 13 stopped`, `node tb4: well again`."""
        from burst_cli.log_files import fold_names

        said: dict[str, list[str]] = {}
        for row in rows:
            name = row.name
            if row.phase != self._phases.get(name, "none"):
                said.setdefault(row.phase, []).append(name)
            kinds = {without_figures(note): note for note in row.notes}
            known = self._notes.get(name, frozenset())
            for kind, note in kinds.items():
                if kind not in known:
                    said.setdefault(note, []).append(name)
            if known and not kinds:
                said.setdefault("well again", []).append(name)
            self._phases[name], self._notes[name] = row.phase, frozenset(kinds)
        return [f"node {fold_names(names)}: {what}" for what, names in said.items()]


def plain_line(progress: RunProgress) -> str:
    """step, loss, speed, MFU, memory and time left in one line; of an evaluation what it found."""
    if progress.latest is not None and "loss" not in progress.latest:
        found = [f"{name} {plain(progress.figure(key))}" for key, name in _EVALUATED.items()]
        return "  ".join([f"weights of step {progress.step}", *(text for text in found if not text.endswith(DASH))])
    parts = [
        f"step {progress.step}/{progress.total_steps}",
        f"loss {plain(progress.figure('loss'))}",
        f"{count(progress.figure('tokens_per_s'))} tokens/s",
        f"MFU {percent(progress.figure('mfu'))}",
        f"memory {binary_bytes(progress.figure('peak_memory_bytes'))}",
        f"left {duration(progress.remaining_s())}",
    ]
    if progress.latest is progress.validation and progress.validation is not None:
        parts.append(f"validation loss {plain(progress.figure('validation_loss'))}")
        parts.append(f"bits/byte {plain(progress.figure('validation_bits_per_byte'))}")
    return "  ".join(parts)


class _News:
    """Warnings of the run that were not said yet."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress, self._shown = progress, 0

    def warnings(self) -> list[Text]:
        """Those that are new, as lines."""
        fresh = self._progress.warnings[self._shown :]
        self._shown = len(self._progress.warnings)
        return [Text.assemble(("warning: ", "yellow"), clean(message)) for message in fresh]


def _note(text: str) -> Text:
    return Text.assemble(("note: ", "cyan"), clean(text))


def _stop_text(cause: str, grace_s: float) -> str:
    again = "; press Ctrl-C again to kill them now" if cause == "Ctrl-C" else ""
    if not grace_s:
        return f"{cause}: killing the ranks now"
    return f"{cause}: stopping the ranks, killing what is left after {grace_s:g} s{again}"
