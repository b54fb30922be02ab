"""Lines of logs as people read them: `host:rank | line`, one colour per rank, nothing that a terminal would obey."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from burst_cli.figures import binary_bytes
from burst_cli.logs.files import LogFile, visible_text
from burst_cli.logs.read import Line

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_RESET = "\x1b[0m"


class LogPrinter:
    """Writes lines of `logs` and of those that appear later."""

    def __init__(self, out: TextIO, logs: Iterable[LogFile], *, has_colour: bool) -> None:
        self._out, self._has_colour = out, has_colour
        self._width = max((len(log.label) for log in logs), default=0)

    def show(self, log: LogFile, lines: Iterable[Line]) -> bool:
        """Print what this log says; whether that was anything."""
        is_any = False
        for line in lines:
            cut = f"… (+{binary_bytes(line.cut_bytes)})" if line.cut_bytes else ""
            self._write(log, f"{visible_text(line.text)}{cut}")
            is_any = True
        self._out.flush()
        return is_any

    def skipped(self, log: LogFile, size: int) -> None:
        """Say how much of a log was left out, and where it is."""
        self._write(log, f"... {binary_bytes(size)} not shown, see {log.path}")

    def _write(self, log: LogFile, text: str) -> None:
        prefix = f"{log.label:<{self._width}} |"
        if self._has_colour:
            prefix = f"\x1b[{_COLOURS[(log.rank or 0) % len(_COLOURS)]}m{prefix}{_RESET}"
        self._out.write(f"{prefix} {text}\n")
