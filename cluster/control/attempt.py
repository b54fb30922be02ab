"""What run.json and the run folder go through: a new attempt, news from a node far away, and the end.

The lock that makes a run have one controller at a time: whoever starts, watches, copies and judges it. Requests to stop
a run: signals that this process gets, and the file that another terminal writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from cluster.agent.folder import holder, take_lock
from cluster.control.link import LaunchOutcome, NodeStatus
from cluster.errors import ClusterError
from cluster.plan import LaunchPlan, NodePlan
from cluster.remote_text import number, one_line, table, word
from engine.runs.files import read_json_object, replace_json
from engine.runs.folder import FINAL_STATES, RunFolder, RunFolderError

_LOG_TAIL_BYTES = 256 * 1024


@dataclass(frozen=True)
class Restarts:
    """How often in a row a run has begun again without a further checkpoint, and the step of the newest one."""

    in_a_row: int = 0
    saved: int = 0

    def after(self, run: RunFolder) -> Restarts:
        """With one more, after the attempt that lies in the folder of `run`."""
        step = max(run.saved_steps(), default=0)
        return Restarts(1, step) if step > self.saved else Restarts(self.in_a_row + 1, self.saved)


def begin_attempt(plan: LaunchPlan, run: RunFolder, lease_s: float | None) -> None:
    """Move the run to starting; what an earlier attempt left under nodes/ goes to attempts/<N>/nodes/.

    Raises RunFolderError when the run is under way, or its folder cannot be written.
    """
    sizes = {}
    for path in (run.path / "logs").glob("*/*.log"):
        # Opened, not asked for by stat: on a network file system only that shows what another machine wrote.
        with contextlib.suppress(OSError), path.open("rb") as file:
            sizes[path.relative_to(run.path).as_posix()] = file.seek(0, os.SEEK_END)
    document = run.transition(
        "starting",
        world_size=plan.world_size,
        backend=plan.backend.name,
        launcher=plan.launcher,
        nodes=[node.name for node in plan.nodes],
        nodes_started_at=None,
        job=None,
        lease_s=lease_s,
        leftover=[],
        log_starts=sizes,
    )
    try:
        (run.path / CANCEL_FILE).unlink(missing_ok=True)  # it was for an attempt that has ended
        if document["attempt"] > 1:
            _put_nodes_aside(run, run.path / "attempts" / str(document["attempt"] - 1) / "nodes")
    except OSError as error:
        raise RunFolderError(f"Run {run.run_id} cannot begin another attempt: {error}.") from error


def _put_nodes_aside(run: RunFolder, target: Path) -> None:
    """Without an outcome a supervisor may live: it says so itself when it is asked to start."""
    for outcome in list((run.path / "nodes").glob("*/outcome.json")):
        (target / outcome.parent.name).mkdir(parents=True, exist_ok=True)
        for path in filter(Path.is_file, outcome.parent.iterdir()):
            path.rename(target / outcome.parent.name / path.name)


def read_log_starts(run: RunFolder) -> dict[str, int]:
    """How long every log was when the attempt began, as `begin_attempt` recorded it: by its path in the run."""
    starts = table(run.read_state(), "log_starts")
    return {name: start for name, start in starts.items() if isinstance(start, int)}


def torchrun_log(node: NodePlan, run: RunFolder) -> Path:
    """Where the output of torchrun of `node` lies in the run folder."""
    return run.log_dir(node.name) / "torchrun.log"


def tail_text(path: Path, size: int = _LOG_TAIL_BYTES, start: int = 0) -> str:
    """The last `size` bytes of a log, but none before byte `start`, as text; empty when there is none."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size, start if start <= end else 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def follow_first_node(plan: LaunchPlan, run: RunFolder) -> str:
    """The state of the run, after taking over what rank 0 wrote in its own run.json, if that is another file."""
    state = str(run.read_state()["state"])
    if state not in ("starting", "running"):
        return state
    path = run.path / "nodes" / run.log_dir(plan.nodes[0].name).name / "run.json"
    with contextlib.suppress(OSError, ValueError, RunFolderError):  # a full disk: the ranks go on, we try again
        told = (read_json_object(path) or {}).get("state")
        for before, after in (("starting", "running"), ("running", "completed")):
            if state == before and told in (after, "completed"):
                run.transition(after)
                state = after
    return state


def finish(run: RunFolder, outcome: LaunchOutcome) -> LaunchOutcome:
    """Write the outcome to run.json; a final state that rank 0 already wrote stays."""
    facts: dict[str, Any] = {
        "exit_code": outcome.exit_code,
        "failure": outcome.failure.to_dict() if outcome.failure else None,
        "leftover": [str(leftover) for leftover in outcome.leftover],
    }
    if run.read_state()["state"] in FINAL_STATES:
        run.record(**facts)
    else:
        run.transition(outcome.status, **facts)
    with contextlib.suppress(OSError):
        (run.path / CANCEL_FILE).unlink()
    return outcome


LOCK_FILE = "controller.lock"
_PATIENCE_S = 0.5  # somebody who only looks whether the lock is held lets go of it at once


@dataclass(frozen=True)
class Controller:
    """The process that controls a run, as it wrote itself into the lock; None: it could not be read."""

    pid: int | None
    host: str | None
    since: str | None

    def __str__(self) -> str:
        return f"process {self.pid or '?'} on {self.host or 'an unknown host'}, since {self.since or 'an unknown time'}"


class ControllerBusyError(ClusterError):
    """Another process controls the run; `controller` says which."""

    def __init__(self, run: RunFolder, controller: Controller) -> None:
        self.controller = controller
        super().__init__(
            f"Run {run.run_id} is controlled by {controller}. Watch it with `burst status {run.run_id}` and "
            f"`burst logs {run.run_id}`, or stop it with `burst cancel {run.run_id}`."
        )


@contextlib.contextmanager
def controlling(run: RunFolder) -> Iterator[None]:
    """Hold the lock of `run`; it falls when this process ends, however that happens.

    Raises ControllerBusyError, RunFolderError.
    """
    path = run.path / LOCK_FILE
    try:
        lock = take_lock(str(path), _PATIENCE_S, is_vital=True)
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be locked: {error.strerror}; a run needs a folder that may be written, on a file system "
            "that has locks (give another one by --runs-dir)."
        ) from error
    if lock is None:
        raise ControllerBusyError(run, _holder(run))
    try:
        lock.say(run.run_id, os.getpid())
        yield
    finally:
        lock.close()


def find_controller(run: RunFolder) -> Controller | None:
    """Who holds the lock of `run`, or None when nobody does, as on a file system without locks."""
    with contextlib.suppress(OSError), (run.path / LOCK_FILE).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder(run)
    return None


def _holder(run: RunFolder) -> Controller:
    said = holder(str(run.path / LOCK_FILE))
    pid = said.get("pid", "")
    return Controller(int(pid) if pid.isdecimal() else None, said.get("host"), said.get("since"))


UNKNOWN = 3
_EXIT_CODES = {"completed": 0, "failed": 1, "oom": 1, "cancelled": 130}


@dataclass(frozen=True)
class RunState:
    """The state of a run as seen from outside: run.json, who controls it, and what its nodes say if they were asked.

    document: content of run.json. is_lost: it has not ended, and nobody controls it. problem: why the truth is not
    known. nodes: empty where the run folder is all that is known.
    """

    document: Mapping[str, Any]
    controller: Controller | None = None
    is_lost: bool = False
    problem: str | None = None
    nodes: tuple[NodeStatus, ...] = ()

    @property
    def state(self) -> str:
        """The state in run.json."""
        return str(self.document["state"])

    @property
    def goes_on(self) -> bool:
        """Whether nodes that were asked say that ranks run."""
        return any(status.is_running for status in self.nodes)

    @property
    def shown(self) -> str:
        """The state in run.json; lost where nobody controls a run that has not ended, and no rank is seen to go on."""
        return "lost" if self.is_lost and not self.goes_on else self.state

    @property
    def is_final(self) -> bool:
        """Whether the run has ended."""
        return self.state in FINAL_STATES

    @property
    def exit_code(self) -> int:
        """0 goes on or completed, 1 failed or out of memory, 130 cancelled, 3 nobody knows."""
        if self.is_final:
            return _EXIT_CODES[self.state]
        return UNKNOWN if self.problem is not None else 0

    @property
    def leftover(self) -> list[str]:
        """What may still run somewhere although the run has ended."""
        told = self.document.get("leftover")
        return [one_line(text, 400) for text in told if isinstance(text, str)] if isinstance(told, list) else []


def read_run_state(run: RunFolder) -> RunState:
    """The state of `run` by its folder alone.

    A run that was started without a launcher has no lock; the process in run.json speaks for it, where it can be seen.
    Raises RunFolderError.
    """
    document, controller = run.read_state(), find_controller(run)
    if controller is not None or document["state"] not in ("starting", "running"):
        return RunState(document, controller)
    is_alive = run.is_alive()
    is_gone = is_alive is False or (is_alive is None and (run.path / LOCK_FILE).exists())
    return RunState(document, is_lost=is_gone)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CANCEL_FILE = "cancel.json"
_MAX_CAUSE = 100


@dataclass(frozen=True)
class CancelFile:
    """A request that another process left in the run folder: who asks, and how patiently (None: as usual)."""

    cause: str
    grace_s: float | None


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

    def most_urgent(self, run: RunFolder, grace_s: float) -> tuple[str, float] | None:
        """(who asks for the end, after how many seconds what remains is killed) by signals or the folder of `run`.

        grace_s: as usual.
        """
        asked = [(self.cause, 0.0 if self.count > 1 else grace_s)] if self.count else []
        if (cancel := read_cancel(run)) is not None:
            asked.append((cancel.cause, grace_s if cancel.grace_s is None else cancel.grace_s))
        return min(asked, key=lambda one: one[1], default=None)


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
