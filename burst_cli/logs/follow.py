"""`burst logs`: what is there now, then what comes, through new attempts and new files, to the end of the run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from burst_cli.logs.files import LogFile, LogRequest, find_logs, visible_text
from burst_cli.logs.read import Line, LogFollower, complete_end, read_lines, tail_offset
from burst_cli.logs.show import LogPrinter
from engine.runs.folder import RunFolder

POLL_S = 0.2
SCAN_S = 1.0  # between looks for files that are new
QUIET_S = 1.0  # after the end: nothing new for so long, and all has been said
MOST_BYTES = 2**20  # that one look takes up of all files together; nobody reads so much
JSON_LINES = 100_000
_LEAST_BYTES = 4 * 1024  # of one file


def present_lines(log: LogFile, request: LogRequest, end: int | None = None) -> Iterable[Line]:
    """The lines of one log, up to offset `end`, that `request` wants."""
    if request.tail is None or request.grep is None:
        offset = 0 if request.tail is None else tail_offset(log.path, request.tail)
        return filter(request.matches, read_lines(log.path, offset, end))
    return deque(filter(request.matches, read_lines(log.path, 0, end)), maxlen=request.tail)


def show(streams: Iterable[tuple[LogFile, Iterable[Line]]], printer: LogPrinter) -> bool:
    """Print the lines of logs, one log after the other; whether there was any."""
    is_any = False
    for log, lines in streams:
        for line in lines:
            printer.line(log, line)
            is_any = True
    printer.flush()
    return is_any


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


class LogFollow:
    """Prints what the logs of a run hold and then what arrives in them, by arrival.

    The logs are those of the printer, to which files are added as they appear. most: bytes at a look.
    """

    def __init__(self, run: RunFolder, request: LogRequest, printer: LogPrinter, *, most: int = MOST_BYTES) -> None:
        self._run, self._request, self._printer, self._most = run, request, printer, most
        self._followers: list[LogFollower] = []
        self._known = {log.path for log in printer.logs}
        self._next_scan = 0.0

    def begin(self) -> None:
        """Print what is there, whole lines only, and stand behind it."""
        pairs = [(log, complete_end(log.path)) for log in self._printer.logs]
        show(((log, present_lines(log, self._request, end)) for log, end in pairs), self._printer)
        self._followers = [LogFollower(log.path, end, self._request.matches) for log, end in pairs]

    def look(self) -> bool:
        """Whether anything was new; it is printed."""
        self._scan()
        share = max(_LEAST_BYTES, self._most // max(1, len(self._followers)))
        arrived = []
        for log, follower in zip(self._printer.logs, self._followers, strict=True):
            lines, skipped = follower.poll(share)
            if skipped:
                self._printer.skipped(log, skipped)
            arrived.append((log, lines))
        return show(arrived, self._printer)

    def finish(self) -> None:
        """Print last lines that have no end."""
        last = ((log, one.flush()) for log, one in zip(self._printer.logs, self._followers, strict=True))
        show(last, self._printer)

    def until(self, ended: Callable[[], int | None]) -> int:
        """Follow until `ended` gives an exit code and the logs are quiet; that code."""
        self.begin()
        code, quiet_since = None, 0.0
        while True:
            if self.look() or code is None:
                quiet_since = time.monotonic()
            code = code if code is not None else ended()
            if code is not None and time.monotonic() - quiet_since > QUIET_S:
                self.finish()
                return code
            time.sleep(POLL_S)

    def _scan(self) -> None:
        """Take up files that are new, from their beginning."""
        if time.monotonic() < self._next_scan:
            return
        self._next_scan = time.monotonic() + SCAN_S
        for log in find_logs(self._run, self._request):
            if log.path not in self._known:
                self._known.add(log.path)
                self._printer.logs.append(log)
                self._followers.append(LogFollower(log.path, 0, self._request.matches))
