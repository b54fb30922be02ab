"""`burst logs`: what is there now, then what comes, through new attempts and new files, to the end of the run.

Lines are `host:rank | line`, one colour per rank, and nothing that a terminal would obey.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from burst_cli.logs.files import LogFile, LogRequest, find_logs, visible_text
from burst_cli.logs.read import Line, LogReader, tail_offset
from engine.runs.figures import binary_bytes
from engine.runs.folder import RunFolder

POLL_S = 0.2
SCAN_S = 1.0  # between looks for files that are new
QUIET_S = 1.0  # after the end: nothing new for so long, and all has been said
MOST_BYTES = 2**20  # that one look takes up of all files together; nobody reads so much
JSON_LINES = 100_000
_LEAST_BYTES = 4 * 1024  # of one file
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


def present_lines(log: LogFile, request: LogRequest) -> Iterable[Line]:
    """The lines of one log that `request` wants."""
    return _last(_reader(log, request).to_end(), request)


def json_lines(logs: Sequence[LogFile], request: LogRequest) -> dict[str, Any]:
    """{lines: [{node, rank, log, text}], left_out}: file by file, at most JSON_LINES; left_out counts the rest."""
    lines: list[dict[str, Any]] = []
    left_out = 0
    for log in logs:
        for line in present_lines(log, request):
            if len(lines) == JSON_LINES:
                left_out += 1
                continue
            entry = {"node": log.node or None, "rank": log.rank, "log": log.name, "text": visible_text(line.text)}
            lines.append({**entry, "cut_bytes": line.cut_bytes} if line.cut_bytes else entry)
    return {"lines": lines, "left_out": left_out}


def follow(
    run: RunFolder,
    request: LogRequest,
    printer: LogPrinter,
    ended: Callable[[], int | None],
    *,
    most: int = MOST_BYTES,
) -> int:
    """Print what the logs of a run hold, then what arrives in them, until they are quiet after the end; the exit code.

    ended: gives that code once the run has ended. most: bytes at a look; of more it is said what was left out.
    """
    readers = {log: _reader(log, request) for log in find_logs(run, request)}
    for log, reader in readers.items():
        printer.show(log, _last(reader.poll()[0], request))
    code, quiet_since, scanned = None, 0.0, 0.0
    while True:
        now = time.monotonic()
        if now >= scanned + SCAN_S:  # files that are new are shown from their beginning
            scanned = now
            for log in find_logs(run, request):
                readers.setdefault(log, LogReader(log.path, 0, request.matches))
        if _look(readers, printer, most) or code is None:
            quiet_since = time.monotonic()
        code = code if code is not None else ended()
        if code is not None and time.monotonic() - quiet_since > QUIET_S:
            break
        time.sleep(POLL_S)
    for log, reader in readers.items():
        printer.show(log, reader.flush())
    return code


def _look(readers: dict[LogFile, LogReader], printer: LogPrinter, most: int) -> bool:
    """Whether anything was new; it is printed."""
    is_any = False
    for log, reader in readers.items():
        lines, skipped = reader.poll(max(_LEAST_BYTES, most // len(readers)))
        if skipped:
            printer.skipped(log, skipped)
        is_any |= printer.show(log, lines)
    return is_any


def _reader(log: LogFile, request: LogRequest) -> LogReader:
    """It stands where the last lines begin; at the beginning where they are the last of those that match."""
    is_counted = request.tail is not None and request.grep is None
    return LogReader(log.path, tail_offset(log.path, request.tail or 0) if is_counted else 0, request.matches)


def _last(lines: Iterable[Line], request: LogRequest) -> Iterable[Line]:
    is_counted = request.tail is None or request.grep is None
    return lines if is_counted else deque(lines, maxlen=request.tail)
