"""What a controller tells while it works, and what it returns.

How long the parts of a launch may take, and the clock that a controller goes by.

Requests to stop a run: signals that this process gets, and the file that another terminal writes.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from cluster.agent.messages import STOP_GRACE_S
from cluster.control.link import NodeStatus
from cluster.failure import Failure
from cluster.values import number, word
from engine.runs.folder import RunFolder, RunFolderError
from engine.runs.records import read_json_object, replace_json

INTERRUPTED = 130


@dataclass(frozen=True)
class Leftover:
    """What may still run on `node`: processes that would not die, or, without pids, all that cannot be seen there."""

    node: str
    pids: tuple[int, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        pids = f"processes {' '.join(map(str, self.pids))}" if self.pids else ""
        return f"{self.node}: {'; '.join(filter(None, [pids, self.reason])) or 'not known'}"


@dataclass(frozen=True)
class LaunchOutcome:
    """How a run ended: final state, exit code for the shell, the first failure, and what could not be cleared away."""

    status: str
    exit_code: int
    failure: Failure | None = None
    leftover: tuple[Leftover, ...] = ()


class LaunchObserver:
    """Whoever shows a launch to a person; this one shows nothing to nobody."""

    def tick(self) -> None:
        """Called several times a second while the run lives."""

    def nodes(self, statuses: Sequence[NodeStatus]) -> None:
        """What is known of every node, in their order; called before every `tick`."""

    def stopping(self, cause: str, grace_s: float) -> None:
        """The run is being stopped; after `grace_s` seconds what remains is killed."""

    def note(self, text: str) -> None:
        """Something that a person should know, in one line."""


@dataclass(frozen=True)
class LaunchTiming:
    """How long things may take, in seconds; `lost_s` None: half of what a node's lease lasts."""

    poll_s: float = 0.1
    beat_s: float = 1.0
    stop_grace_s: float = STOP_GRACE_S  # between asking the ranks to stop and killing them, without checkpoints
    evidence_s: float = 1.0  # between the first sign of a failure and stopping the nodes that know nothing of it
    failure_grace_s: float = 3.0  # between the first sign of a failure and killing the ranks that go on
    early_exit_s: float = 30.0  # for rank 0 to say that training is complete, once the ranks of a node ended well
    finish_s: float = 60.0  # for all ranks to end, once training is complete
    lost_s: float | None = None  # a node that says nothing for so long is lost
    vanish_s: float = 3.0  # for news of the last step to arrive, once a rank has ended well
    kill_s: float = 15.0  # for a node to end once all of its processes were to be killed; then it is given up
    mute_s: float = 8.0  # at once if nothing was heard of it for so long
    sync_s: float = 30.0  # for the last lines of logs to arrive from a node that has ended
    stacks_s: float = 10.0  # for the ranks of a run that hangs to write their stacks


class Clock:
    """Time as the controller sees it: that of this machine; tests have one that they move."""

    def monotonic(self) -> float:
        """Seconds that only go forward."""
        return time.monotonic()

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CANCEL_FILE = "cancel.json"
_MAX_CAUSE = 100


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

    level: 0 none, 1 stop, 2 kill, 3 leave.
    """

    def __init__(self, stop: StopRequests, run: RunFolder) -> None:
        self._stop, self._run = stop, run
        self._cancel: CancelFile | None = None
        self._signals = self.level = 0

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
        return news


def write_cancel(run: RunFolder, cause: str, grace_s: float | None) -> None:
    """Ask the controller of `run` to stop it; a later request may shorten the grace. Raises RunFolderError."""
    path = run.path / CANCEL_FILE
    try:
        replace_json(path, {"cause": cause, "grace_s": grace_s})
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written, so nobody is asked to stop: {error.strerror}.") from error


def read_cancel(run: RunFolder) -> CancelFile | None:
    """The request that lies in the run folder, or None. A damaged one counts: somebody wanted the run to stop."""
    try:
        document = read_json_object(run.path / CANCEL_FILE)
    except (OSError, ValueError):
        return CancelFile("burst cancel", None)
    if document is None:
        return None
    return CancelFile(word(document, "cause", _MAX_CAUSE) or "burst cancel", number(document, "grace_s"))


def clear_cancel(run: RunFolder) -> None:
    """Forget a request: it was for an attempt that has ended."""
    (run.path / CANCEL_FILE).unlink(missing_ok=True)
