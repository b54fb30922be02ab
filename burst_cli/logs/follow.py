"""`burst logs`: what is there now, then what comes, through new attempts and new files, to the end of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from burst_cli.logs.files import LogFile, LogRequest, find_logs, visible_text
from burst_cli.logs.merge import merge_folded
from burst_cli.logs.read import Line, LogFollower, complete_end, match_offset, read_lines, tail_offset
from burst_cli.logs.show import LogPrinter
from engine.runs.folder import RunFolder

POLL_S = 0.2
SCAN_S = 1.0  # between looks for files that are new
QUIET_S = 1.0  # after the end: nothing new for so long, and all has been said
# Bytes that one look takes up of all files together. A person reads less; a pipe gets more, but not without bound.
SCREEN_BYTES, PIPE_BYTES = 128 * 1024, 4 * 2**20
JSON_LINES = 100_000
_LEAST_BYTES = 4 * 1024  # of one file


def present_lines(log: LogFile, request: LogRequest, end: int | None = None) -> Iterator[Line]:
    """The lines of one log, up to offset `end`, that `request` wants."""
    offset = 0
    if request.tail is not None:
        is_plain = request.grep is None
        offset = (
            tail_offset(log.path, request.tail) if is_plain else match_offset(log.path, request.tail, request.matches)
        )
    return filter(request.matches, read_lines(log.path, offset, end))


def show_folded(streams: Sequence[Iterable[Line]], printer: LogPrinter) -> bool:
    """Print the lines of logs, equal ones of several ranks as one; whether there was any."""
    is_any = False
    for line, positions in merge_folded(streams):
        printer.line(line, positions)
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

    def __init__(self, run: RunFolder, request: LogRequest, printer: LogPrinter, *, most: int) -> None:
        self._run, self._request, self._printer, self._most = run, request, printer, most
        self._followers: list[LogFollower] = []
        self._known = {log.path for log in printer.logs}
        self._next_scan = 0.0

    def begin(self) -> None:
        """Print what is there, whole lines only, and stand behind it."""
        pairs = [(log, complete_end(log.path)) for log in self._printer.logs]
        show_folded([present_lines(log, self._request, end) for log, end in pairs], self._printer)
        self._followers = [LogFollower(log.path, end, self._request.matches) for log, end in pairs]

    def look(self) -> bool:
        """Whether anything was new; it is printed."""
        self._scan()
        share = max(_LEAST_BYTES, self._most // max(1, len(self._followers)))
        arrived = [follower.poll(share) for follower in self._followers]
        for position, (_, skipped) in enumerate(arrived):
            if skipped:
                self._printer.skipped(skipped, position)
        return show_folded([lines for lines, _ in arrived], self._printer)

    def finish(self) -> None:
        """Print last lines that have no end."""
        show_folded([follower.flush() for follower in self._followers], self._printer)

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
