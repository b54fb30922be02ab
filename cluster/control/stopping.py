"""Requests to stop a run: signals that this process gets, and the file that another terminal writes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from engine.runs.folder import RunFolder
from engine.runs.records import read_json_object, replace_json, utc_now

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CANCEL_FILE = "cancel.json"
_MAX_CAUSE = 100
_MAX_GRACE_S = 86400.0


class StopRequests:
    """Counts the stop signals this process received while `listening()`; the first one's name is kept.

    Once: stop with patience. Twice: kill now. Three times: leave, and say what may remain.
    """

    def __init__(self) -> None:
        self.count = 0
        self.cause = ""

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequests]:
        """Collect SIGINT, SIGTERM and SIGHUP instead of dying of them; the former handlers return at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread may set handlers
            return
        former = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.cause = self.cause or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)


@dataclass(frozen=True)
class CancelFile:
    """A request that another process left in the run folder: who asks, and how patiently (None: as usual)."""

    cause: str
    grace_s: float | None


class Requests:
    """Signals to this process and the request in the run folder, whichever is more urgent.

    level: 0 none, 1 stop, 2 kill, 3 leave. cause: of the first request.
    """

    def __init__(self, stop: StopRequests, run: RunFolder) -> None:
        self._stop, self._run = stop, run
        self._cancel: CancelFile | None = None
        self._signals = 0
        self.level = 0
        self.cause = ""

    def poll(self) -> list[CancelFile]:
        """What was asked for since the last call; a grace of 0 means to kill now."""
        news = []
        cancel = read_cancel(self._run)
        if cancel is not None and cancel != self._cancel:
            self._cancel = cancel
            news.append(cancel)
            self.level = max(self.level, 2 if cancel.grace_s == 0 else 1)
        count = min(self._stop.count, 3)
        if count > self._signals:
            news.append(CancelFile(self._stop.cause, 0.0 if count > 1 else None))
            self._signals = count
            self.level = max(self.level, count)
        if news and not self.cause:
            self.cause = news[0].cause
        return news


def write_cancel(run: RunFolder, cause: str, grace_s: float | None) -> None:
    """Ask the controller of `run` to stop it; a later request may shorten the grace."""
    replace_json(run.path / CANCEL_FILE, {"cause": cause, "grace_s": grace_s, "at": utc_now()})


def read_cancel(run: RunFolder) -> CancelFile | None:
    """The request that lies in the run folder, or None. A damaged one counts: somebody wanted the run to stop."""
    try:
        document = read_json_object(run.path / CANCEL_FILE)
    except (OSError, ValueError):
        return CancelFile("burst cancel", None)
    if document is None:
        return None
    grace_s = document.get("grace_s")
    if isinstance(grace_s, bool) or not isinstance(grace_s, int | float) or not 0 <= grace_s <= _MAX_GRACE_S:
        grace_s = None
    return CancelFile(str(document.get("cause") or "burst cancel")[:_MAX_CAUSE], grace_s)


def clear_cancel(run: RunFolder) -> None:
    """Forget a request: it was for an attempt that has ended."""
    (run.path / CANCEL_FILE).unlink(missing_ok=True)
