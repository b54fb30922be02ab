"""The lock that makes a run have one controller at a time: whoever starts, watches, copies and judges it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.errors import ClusterError
from engine.runs.folder import RunFolder, RunFolderError
from engine.runs.process import process_start
from engine.runs.records import utc_now

LOCK_FILE = "controller.lock"
_PATIENCE_S = 0.5  # somebody who only looks whether the lock is held lets go of it at once
_MAX_BYTES = 4096


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
    """Hold the lock of `run`; it falls when this process ends, however that happens. Raises ControllerBusyError."""
    descriptor = _open(run)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not _locked(run, descriptor):
            if time.monotonic() > deadline:
                raise ControllerBusyError(run, _read(descriptor))
            time.sleep(0.02)
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": utc_now()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(facts).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def find_controller(run: RunFolder) -> Controller | None:
    """Who holds the lock of `run`, or None when nobody does."""
    try:
        descriptor = os.open(run.path / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return None
    try:
        return None if _try_lock(descriptor, fcntl.LOCK_SH) else _read(descriptor)
    except OSError:
        return None  # a file system without locks: nobody can hold one
    finally:
        os.close(descriptor)


def own_facts() -> dict[str, Any]:
    """This process as run.json names the launcher of a run."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "pid_start": process_start(pid)}


def _open(run: RunFolder) -> int:
    path = run.path / LOCK_FILE
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be opened: {error.strerror}; control of the run needs it.") from error


def _locked(run: RunFolder, descriptor: int) -> bool:
    try:
        return _try_lock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        raise RunFolderError(
            f"{run.path / LOCK_FILE} cannot be locked: {error.strerror}; a run needs a folder whose file system has "
            "locks (give another one by --runs-dir)."
        ) from error


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(descriptor: int) -> Controller:
    try:
        facts = json.loads(os.pread(descriptor, _MAX_BYTES, 0))
        pid, host, since = (facts.get(name) for name in ("pid", "host", "since"))
    except (OSError, ValueError, AttributeError):
        return Controller(None, None, None)
    return Controller(
        pid if isinstance(pid, int) else None,
        host if isinstance(host, str) else None,
        since if isinstance(since, str) else None,
    )
