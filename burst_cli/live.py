"""A launch as a person watches it: one live block on a terminal, plain lines anywhere else. All of it on stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from burst_cli.figures import binary_bytes, clean, count, duration, percent, plain, sparkline
from burst_cli.run_progress import RunProgress

REFRESH_S = 0.2
PLAIN_INTERVAL_S = 2.0
TRAINING_PHASE = "train"  # the phase that needs no mention, because the steps tell
_SPARKLINE_WIDTH = 24


class LaunchView(Protocol):
    """What the executor tells while it watches; see `cluster.launch.LaunchObserver`."""

    def tick(self) -> None:
        """Look for news and show them."""

    def stopping(self, cause: str, grace_s: float) -> None:
        """Say that the run is being stopped."""


@contextlib.contextmanager
def open_view(console: Console, progress: RunProgress) -> Iterator[LaunchView]:
    """The view for this console: live on a terminal, lines on anything else."""
    if not console.is_terminal:
        yield PlainView(console, progress)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:  # no thread: `tick` refreshes
        yield LiveView(console, progress, live)


class LiveView:
    """One block that is redrawn in place."""

    def __init__(self, console: Console, progress: RunProgress, live: Live) -> None:
        self._console, self._progress, self._live = console, progress, live
        self._next = 0.0
        self._stop_line: str | None = None
        self._warnings_shown = 0

    def tick(self) -> None:
        """Redraw, at most five times a second."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + REFRESH_S
        self._progress.poll()
        for warning in self._progress.warnings[self._warnings_shown :]:
            self._console.print(_warning(warning))
        self._warnings_shown = len(self._progress.warnings)
        self._live.update(self._block(), refresh=True)

    def stopping(self, cause: str, grace_s: float) -> None:
        """Show the request below the figures."""
        self._stop_line = _stop_text(cause, grace_s)
        self._next = 0.0
        self.tick()

    def _block(self) -> RenderableType:
        progress = self._progress
        lines: list[RenderableType] = [_bar(progress)]
        if progress.latest is not None:
            lines.append(_figures(progress))
        if self._stop_line:
            lines.append(Text(self._stop_line, style="yellow"))
        return Group(*lines)


class PlainView:
    """A line per phase, and a line of figures every few seconds and at the last step."""

    def __init__(self, console: Console, progress: RunProgress, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._progress, self._clock = console, progress, clock
        self._next = 0.0
        self._shown_step = 0
        self._shown_phase = ""
        self._warnings_shown = 0

    def tick(self) -> None:
        """Print what is new, figures at most every PLAIN_INTERVAL_S."""
        progress = self._progress
        progress.poll()
        for warning in progress.warnings[self._warnings_shown :]:
            self._say(_warning(warning))
        self._warnings_shown = len(progress.warnings)
        if progress.phase != self._shown_phase:
            self._shown_phase = progress.phase
            self._say(Text(clean(progress.phase)))
        due = self._clock() >= self._next or progress.step == progress.total_steps
        if progress.step > self._shown_step and due:
            self._next = self._clock() + PLAIN_INTERVAL_S
            self._shown_step = progress.step
            self._say(Text(plain_line(progress)))

    def stopping(self, cause: str, grace_s: float) -> None:
        """One line."""
        self._say(Text(_stop_text(cause, grace_s)))

    def _say(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def plain_line(progress: RunProgress) -> str:
    """step, loss, speed, MFU, memory and time left in one line."""
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


def _bar(progress: RunProgress) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    if progress.latest is None:
        bar = ProgressBar(total=None, width=30, pulse=True)
        grid.add_row(bar, Text(clean(progress.phase)), Text(duration(progress.elapsed_s()), style="dim"))
        return grid
    done = Text(f"step {progress.step}/{progress.total_steps}", style="bold")
    times = Text(f"{duration(progress.elapsed_s())} elapsed, {duration(progress.remaining_s())} left", style="dim")
    phase = Text("" if progress.phase == TRAINING_PHASE else clean(progress.phase))
    grid.add_row(ProgressBar(total=progress.total_steps, completed=progress.step, width=30), done, times, phase)
    return grid


def _figures(progress: RunProgress) -> Text:
    text = Text.assemble(
        ("loss ", "dim"),
        (plain(progress.figure("loss")), "bold"),
        (f" {sparkline(progress.losses, _SPARKLINE_WIDTH)}", "cyan"),
        ("   tokens/s ", "dim"),
        (count(progress.figure("tokens_per_s")), "bold"),
        ("   MFU ", "dim"),
        (percent(progress.figure("mfu")), "bold"),
        ("   peak memory ", "dim"),
        (binary_bytes(progress.figure("peak_memory_bytes")), "bold"),
    )
    if progress.validation is not None:
        bits = progress.validation.get("validation_bits_per_byte")
        text.append_text(Text.assemble(("   bits/byte ", "dim"), (plain(bits), "bold")))
    return text


def _warning(message: str) -> Text:
    return Text.assemble(("warning: ", "yellow"), clean(message))


def _stop_text(cause: str, grace_s: float) -> str:
    again = "; press Ctrl-C again to kill them now" if cause == "Ctrl-C" else ""
    return f"{cause}: stopping the ranks, killing what is left after {grace_s:g} s{again}"
