"""Who holds a node: a lock that dies with its holder, so that no file left behind is ever an obstacle."""

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from typing import Optional

from cluster.supervise.node.folder import NodeFiles, is_alive, make_folder, now_text, read_json, safe_name
from cluster.supervise.node.spec import Spec

_WAIT_S = 1.0  # a supervisor that ends is about to let go
_LEAVE_S = 5.0  # one that has written the outcome of this very run surely is, however busy its machine
_POLL_S = 0.05
_MAX_BYTES = 4096


class RefusedError(Exception):
    """A node does not start its part of the run; kind as in `StartRefusedError`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Lock:
    """A locked file; its content says who holds it. The lock belongs to the descriptor, wherever that is inherited."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor

    def say(self, run_id: str, pid: int) -> None:
        """Write who holds it; a full disk is no reason to give up."""
        text = json.dumps({"run_id": run_id, "pid": pid, "since": now_text()})
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


def take_lock(path: str, wait_s: float = _WAIT_S) -> Optional[Lock]:
    """The lock on `path`; None while somebody else holds it. Raises OSError."""
    deadline = time.monotonic() + wait_s
    while True:
        lock = _try(path)
        if lock is not None or time.monotonic() > deadline:
            return lock
        time.sleep(_POLL_S)


def holder(path: str) -> dict[str, str]:
    """What the holder of a lock says of itself; empty when it says nothing."""
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read(_MAX_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict):
        return {}
    return {str(name): str(value)[:200] for name, value in document.items()}


def node_lock_path(node: str, base: str = "/tmp") -> str:
    """The file that this user's runs lock on node `node`; its folder is made. Raises RefusedError.

    Not in a home, which nodes may share: the lock is of the machine.
    """
    folder = os.path.join(base, f"burst-{os.geteuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        status = os.lstat(folder)
    except OSError as error:
        raise RefusedError("folder", f"cannot use {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise RefusedError("folder", f"{folder} is not a folder of this user; its owner or root must remove it")
    if stat.S_IMODE(status.st_mode) & 0o077:
        os.chmod(folder, 0o700)
    return os.path.join(folder, safe_name(node) + ".lock")


def take_node(spec: Spec) -> list[Lock]:
    """The lock of the node for `spec`, if it asks for one. Raises RefusedError naming the holder."""
    if not spec.exclusive:
        return []
    path = node_lock_path(spec.node)
    try:
        lock = take_lock(path)
    except OSError as error:
        raise RefusedError("folder", f"cannot lock {path}: {error.strerror}") from error
    if lock is None:
        other = holder(path)
        if other.get("run_id") == spec.run_id:
            raise RefusedError("exists", "this run has a supervisor here already (pid {})".format(other.get("pid")))
        raise RefusedError(
            "busy",
            "run {} holds this node (pid {}, since {}); wait for its end or cancel it".format(
                other.get("run_id", "unknown"), other.get("pid", "unknown"), other.get("since", "unknown")
            ),
        )
    lock.say(spec.run_id, os.getpid())
    return [lock]


def take_run(spec: Spec) -> list[Lock]:
    """The lock of this run on this node, in its folder, which is made. Raises RefusedError.

    Two attempts of one run never live at once on a node, whoever asks for them.
    """
    files = NodeFiles(spec.folder, spec.node)
    try:
        make_folder(files.state_dir)
        make_folder(files.log_dir)
        if os.stat(files.folder).st_uid not in (os.geteuid(), 0):
            raise PermissionError(errno.EPERM, "it belongs to another user", files.folder)
        wait_s = _LEAVE_S if os.path.exists(files.outcome) else 0.0
        lock = take_lock(files.lock, wait_s)
    except OSError as error:
        text = f"cannot use {error.filename or spec.folder}: {error.strerror or error}"
        raise RefusedError("folder", text) from error
    if lock is None:
        raise RefusedError("exists", f"this run has a supervisor here already ({files.folder})")
    supervisor = read_json(files.supervisor)
    deadline = time.monotonic() + wait_s
    while is_alive(supervisor) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if is_alive(supervisor):  # on a file system without locks
        lock.close()
        raise RefusedError("exists", f"this run has a supervisor here already (pid {(supervisor or {}).get('pid')})")
    return [lock]


def _try(path: str) -> Optional[Lock]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            os.close(descriptor)
            return None
        # A file system without locks: what follows looks for the supervisor itself.
    try:
        is_same = os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        is_same = False
    if not is_same:  # its holder removed it between our open and our lock
        os.close(descriptor)
        return None
    return Lock(path, descriptor)
