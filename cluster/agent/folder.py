"""A node's run folder: what a supervisor is told, the files by which it is controlled, and what it tells.

    nodes/<node>/ spec.json supervisor.json health.json stacks_done.json outcome.json supervisor.log   by the supervisor
                  lease stop.json stacks.json                                            by whoever controls the run
    logs/<node>/  torchrun.log (argv, appended)  rank<NNNN>.*  (the ranks)  flight.request (the supervisor)

Every JSON file is replaced as a whole; a reader sees the old or the new one.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, Optional

from cluster.agent.processes import process_start

MAX_JSON_BYTES = 4 << 20
_MAX_HOLDER_BYTES = 4096
_LOCK_WAIT_S = 1.0  # a supervisor that ends is about to let go
_LOCK_POLL_S = 0.05
LEAD_LOGS = ("metrics.jsonl", "events.jsonl")  # of the node with rank 0, as the next
LEAD_WHOLE = ("run.json", "summary.json", "tokenizer.json")
Document = dict[str, Any]


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


def safe_name(node: str) -> str:
    """`node` as a file name, as `engine.runs.folder.RunFolder.log_dir` makes it."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", node).lstrip(".") or "_"


def now_text() -> str:
    """The present as ISO 8601 in UTC with milliseconds."""
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"


def write_text(path: str, text: str, *, mode: int = 0o600, sync: bool = False) -> None:
    """Replace `path`; a reader sees the old or the new text. Raises OSError."""
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}-{threading.get_ident()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(path: str, document: Document, *, sync: bool = False) -> None:
    """Replace `path` by `document`. Raises OSError."""
    write_text(path, json.dumps(document, indent=1) + "\n", sync=sync)


def read_json(path: str) -> Optional[Document]:
    """The object in `path`; None if there is none, or none that can be read."""
    try:
        # Opened, not asked for by stat: on a network file system only that shows what another machine wrote.
        with open(path, "rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
        document = json.loads(data.decode("utf-8")) if len(data) <= MAX_JSON_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def make_folder(path: str) -> None:
    """Folder `path` and those above it, for this user alone. Raises OSError."""
    if not os.path.isdir(path):
        parent = os.path.dirname(path)
        if parent and parent != path:
            make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def holder(path: str) -> dict[str, str]:
    """What the holder of a lock says of itself; empty when it says nothing."""
    try:
        # Whoever made the folder before us may have put anything there.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            document = json.loads(file.read(_MAX_HOLDER_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict):
        return {}
    return {str(name): str(value)[:200] for name, value in document.items()}


class Lock:
    """A locked file; its content says who holds it. The lock belongs to the descriptor, wherever that is inherited."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor

    def say(self, run_id: str, pid: int) -> None:
        """Write who holds it; a full disk is no reason to give up."""
        text = json.dumps({"run_id": run_id, "pid": pid, "host": socket.gethostname(), "since": now_text()})
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, text.encode("ascii"), 0)

    def release(self) -> None:
        """Remove the file and let go; only its holder may."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        self.close()

    def close(self) -> None:
        """Let go of this descriptor; the lock stays while another process holds it."""
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


def take_lock(path: str, wait_s: float = _LOCK_WAIT_S, *, is_vital: bool = False) -> Optional[Lock]:
    """The lock on `path`; None while somebody else holds it. Raises OSError.

    is_vital: a file system without locks is an error; else all hold its locks at once.
    """
    deadline = time.monotonic() + wait_s
    while True:
        lock = _try_lock(path, is_vital)
        if lock is not None or time.monotonic() > deadline:
            return lock
        time.sleep(_LOCK_POLL_S)


def _try_lock(path: str, is_vital: bool) -> Optional[Lock]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_held = error.errno in (errno.EAGAIN, errno.EACCES)
        if is_held or is_vital:
            os.close(descriptor)
        if is_held:
            return None
        if is_vital:
            raise
        # A file system without locks: what follows looks for the supervisor itself.
    try:
        is_same = os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        is_same = False
    if not is_same:  # its holder removed it between our open and our lock
        os.close(descriptor)
        return None
    return Lock(path, descriptor)


def lay_files(folder: str, files: Iterable[tuple[str, str]]) -> None:
    """Put `files` (checked relative path, text) below `folder`. Raises OSError."""
    for name, text in files:
        path = os.path.join(folder, name)
        make_folder(os.path.dirname(path))
        write_text(path, text, mode=0o700 if name.endswith(".sh") else 0o600)


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
    supervisor = read_json(files.supervisor)
    outcome = read_json(files.outcome)
    phase = _phase(supervisor, outcome)
    if phase == "lost":  # or it ended between the two looks
        outcome = read_json(files.outcome)
        phase = "lost" if outcome is None else "ended"
    return {"phase": phase, "supervisor": supervisor or {}, "outcome": outcome, "health": read_json(files.health)}


def is_alive(supervisor: Optional[Document]) -> Optional[bool]:
    """Whether the process that a supervisor.json names still lives; None when it is on another machine."""
    if not supervisor or supervisor.get("host") != socket.gethostname():
        return None if supervisor else False
    pid = supervisor.get("pid")
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 1:
        return False
    return process_start(pid) == supervisor.get("pid_start")


def _phase(supervisor: Optional[Document], outcome: Optional[Document]) -> str:
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
