"""A node's run folder: what a supervisor is told, the files by which it is controlled, and what it tells.

    nodes/<node>/ spec.json supervisor.json health.json stacks_done.json outcome.json supervisor.log   by the supervisor
                  lease stop.json stacks.json                                            by whoever controls the run
    logs/<node>/  torchrun.log (argv, appended)  rank<NNNN>.*  (the ranks)  flight.request (the supervisor)

Every JSON file is replaced as a whole; a reader sees the old or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import threading
import time
from typing import Any, BinaryIO, NamedTuple

from cluster.agent.messages import safe_name, write_all
from engine.runs.process import process_start

LEAD_LOGS = ("metrics.jsonl", "events.jsonl")  # of the node with rank 0, as the next
LEAD_WHOLE = ("run.json", "summary.json", "tokenizer.json")
LOG_BYTES = 1 << 30  # a run of months that talks would fill the disk
_MAX_JSON_BYTES = 4 << 20
_LOCK_WAIT_S = 1.0  # a supervisor that ends is about to let go
_POLL_S = 0.05
Document = dict[str, Any]


class Stamp(NamedTuple):
    """Of a file, as it was opened."""

    mtime_ns: int
    size: int
    inode: int


class NodeFiles:
    """Where everything of node `node` lies in the run folder `folder`; creates nothing."""

    def __init__(self, folder: str, node: str) -> None:
        self.folder, self.node, self.name = folder, node, safe_name(node)
        self.state_dir = os.path.join(folder, "nodes", self.name)
        self.log_dir = os.path.join(folder, "logs", self.name)
        self.spec = self._state("spec.json")
        self.supervisor = self._state("supervisor.json")
        self.lease = self._state("lease")
        self.stop = self._state("stop.json")
        self.stacks = self._state("stacks.json")
        self.stacks_done = self._state("stacks_done.json")
        self.health = self._state("health.json")
        self.outcome = self._state("outcome.json")
        self.own_log = self._state("supervisor.log")
        self.lock = self._state("supervisor.lock")
        self.torchrun_log = os.path.join(self.log_dir, "torchrun.log")
        self.flight_request = os.path.join(self.log_dir, "flight.request")

    def _state(self, name: str) -> str:
        return os.path.join(self.state_dir, name)


def now_text() -> str:
    """The present as ISO 8601 in UTC with milliseconds."""
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"


def write_text(path: str, text: str, *, mode: int = 0o600, sync: bool = False) -> None:
    """Replace `path`; a reader sees the old or the new text. Raises OSError."""
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}-{threading.get_ident()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb"):
            write_all(descriptor, text.encode("utf-8", "surrogateescape"))
            if sync:
                os.fsync(descriptor)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(path: str, document: Document, *, sync: bool = False) -> None:
    """Replace `path` by `document`. Raises OSError."""
    write_text(path, json.dumps(document, indent=1) + "\n", sync=sync)


def read_json(path: str) -> Document | None:
    """The object in `path`; None if there is none, or none that can be read."""
    opened = open_plain(path)
    if opened is None:
        return None
    try:
        with os.fdopen(opened[0], "rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
        document = json.loads(data.decode("utf-8")) if len(data) <= _MAX_JSON_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def open_plain(path: str) -> tuple[int, Stamp] | None:
    """Descriptor of a plain file, which its user closes, and what changes when it is touched or replaced.

    None for anything else: whoever made a folder before us may have put anything there. Opened, not asked for by stat:
    on a network file system only that shows what another machine wrote.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, Stamp(status.st_mtime_ns, status.st_size, status.st_ino)
    os.close(descriptor)
    return None


def stamp_of(path: str) -> Stamp | None:
    """What changes when a file is touched or replaced; None when there is none."""
    opened = open_plain(path)
    if opened is not None:
        os.close(opened[0])
    return None if opened is None else opened[1]


def rotate_logs(folder: str, limit: int) -> None:
    """Let every log that has more than `limit` bytes begin anew; what it had lies beside it until the next time.

    Whoever writes it has it open to append, and goes on in it: so it is copied and cut, and a line that is written
    between the two is lost. OSError where there is no room for the copy; the log stays as it was.
    """
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        opened = open_plain(path) if name.endswith(".log") else None
        if opened is not None:
            with os.fdopen(opened[0], "rb") as log:
                if opened[1].size > limit:
                    _put_aside(log, path)


def _put_aside(log: BinaryIO, path: str) -> None:
    part = f"{path}.part"
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as copy:
            shutil.copyfileobj(log, copy)
        os.rename(part, f"{path}.before-1")
        os.truncate(path, 0)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)


def make_folder(path: str) -> None:
    """Folder `path`, absolute, and those above it, for this user alone. Raises OSError."""
    if not os.path.isdir(path):
        make_folder(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


# --- locks ----------------------------------------------------------------------------------------------------------


class Lock:
    """A locked file; its content says who holds it."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    def say(self, run_id: str, pid: int) -> None:
        """Write who holds it; a full disk is no reason to give up."""
        text = json.dumps({"run_id": run_id, "pid": pid, "host": socket.gethostname(), "since": now_text()})
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode("ascii"), 0)

    def release(self) -> None:
        """Remove the file and let go; only its holder may."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self.close()

    def close(self) -> None:
        """Let go and leave the file."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def holder(path: str) -> dict[str, str]:
    """What the holder of a lock says of itself; empty when it says nothing."""
    return {name: str(value)[:200] for name, value in (read_json(path) or {}).items()}


def take_lock(path: str, wait_s: float = _LOCK_WAIT_S, *, is_vital: bool = False) -> Lock | None:
    """The lock on `path`; None while somebody else holds it. Raises OSError.

    is_vital: a file system without locks is an error; else all hold its locks at once.
    """
    deadline = time.monotonic() + wait_s
    while True:
        lock = _try_lock(path, is_vital)
        if lock is not None or time.monotonic() > deadline:
            return lock
        time.sleep(_POLL_S)


def _try_lock(path: str, is_vital: bool) -> Lock | None:
    lock = Lock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    is_held = False
    try:
        fcntl.flock(lock._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_held = error.errno in (errno.EAGAIN, errno.EACCES)
        if is_vital and not is_held:
            lock.close()
            raise
    with contextlib.suppress(OSError):  # its holder may have removed it between our open and our lock
        if not is_held and os.path.samestat(os.fstat(lock._descriptor), os.stat(path)):
            return lock
    lock.close()
    return None


# --- by whoever controls the run -----------------------------------------------------------------------------------


def beat(folder: str, node: str) -> None:
    """Renew the lease. Raises OSError."""
    path = NodeFiles(folder, node).lease
    try:
        os.utime(path, None)
    except FileNotFoundError:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))


def request_stop(folder: str, node: str, cause: str, grace_s: float) -> None:
    """Ask for the end of the run on this node; a later request may shorten the grace. Raises OSError."""
    write_json(NodeFiles(folder, node).stop, {"cause": cause, "grace_s": grace_s})


def request_stacks(folder: str, node: str, nonce: str) -> None:
    """Ask for the stacks of all ranks of this node. Raises OSError."""
    write_json(NodeFiles(folder, node).stacks, {"nonce": nonce})


def read_status(folder: str, node: str) -> Document:
    """{"phase", "supervisor", "outcome", "health"} of node `node`, from its files and its process."""
    files = NodeFiles(folder, node)
    supervisor, outcome = read_json(files.supervisor), read_json(files.outcome)
    phase = _phase(supervisor, outcome)
    if phase == "lost":  # or it ended between the two looks
        outcome = read_json(files.outcome)
        phase = "lost" if outcome is None else "ended"
    return {"phase": phase, "supervisor": supervisor or {}, "outcome": outcome, "health": read_json(files.health)}


def is_alive(supervisor: Document | None) -> bool | None:
    """Whether the process that a supervisor.json names still lives; None when it is on another machine."""
    if not supervisor or supervisor.get("host") != socket.gethostname():
        return None if supervisor else False
    pid = supervisor.get("pid")
    start = process_start(pid) if isinstance(pid, int) else None
    return start is not None and start == supervisor.get("pid_start")


def await_end(supervisor: Document | None, wait_s: float) -> bool:
    """Whether that process ends in that time, or has."""
    deadline = time.monotonic() + wait_s
    while is_alive(supervisor) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return not is_alive(supervisor)


def _phase(supervisor: Document | None, outcome: Document | None) -> str:
    if outcome is not None:
        return "ended"
    if supervisor is None:
        return "none"
    if is_alive(supervisor) is False:
        return "lost"
    phase = supervisor.get("phase")
    if phase == "ended":
        return "stopping"  # its outcome is about to be written
    return phase if phase in ("starting", "running", "stopping") else "running"
