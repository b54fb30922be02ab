"""What only a launch must know of this node; `cluster.checks.groups.launch` judges it. It changes nothing here."""

import contextlib
import glob
import hashlib
import os
import random
import socket
import time
from typing import Any, Callable, Optional

from cluster.agent.code import expand
from cluster.agent.folder import holder
from cluster.agent.memory import memory_limit_bytes
from cluster.agent.start import lock_folder

_HASH_S = 10.0
_EDGE_BYTES = 1 << 20
_MAX_FILES = 20000
_HASHED_FILES = 64
_PORTS = (20000, 30000)  # below those that systems give to outgoing connections


def survey(question: dict[str, Any]) -> dict[str, Any]:
    """Facts by name. question: root, where a node keeps runs; port; data, see `find_data`."""
    home = os.path.expanduser("~")
    return {
        "home": home,
        "user": _user(),
        "uid": os.getuid(),
        "gid": os.getgid(),
        "groups": sorted(os.getgroups()),
        "has_infiniband_devices": os.path.isdir("/dev/infiniband"),
        "memory_bytes": memory_limit_bytes(),
        "room": attempt(lambda: find_room(expand(question["root"], home) or home)),
        "port": attempt(lambda: find_port(question["port"])),
        "locks": find_locks(),
        "data": find_data(question["data"], home),
    }


def attempt(find: Callable[[], int]) -> "tuple[Optional[int], str]":
    """(what it finds, why it finds nothing)."""
    try:
        return find(), ""
    except OSError as error:
        return None, f"{error.filename} {error.strerror}" if error.filename else error.strerror or str(error)


def find_room(root: str) -> int:
    """Free bytes where `root` is or will be, and we may write. Raises OSError."""
    folder = os.path.abspath(root)
    while not os.path.isdir(folder):
        if os.path.lexists(folder):
            raise NotADirectoryError(20, "is not a folder", folder)
        folder = os.path.dirname(folder)
    found = os.statvfs(folder)
    if found.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "is not writable", folder)
    if not found.f_favail and found.f_files:
        raise OSError(28, "has no free inodes", folder)
    return found.f_bavail * found.f_frsize


def find_port(wanted: Optional[int]) -> int:
    """A port that nobody listens on: the wanted one, or one of our choice. Raises OSError."""
    for port in [wanted] if wanted else [random.randrange(*_PORTS) for _ in range(200)]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("0.0.0.0", port))
                listener.listen(1)  # two sockets with SO_REUSEADDR may share a port, but not listen
                return port
            except OSError as error:
                last = OSError(error.errno, f"port {port}: {error.strerror}")
    raise last


def find_locks() -> dict[str, str]:
    """Which runs hold which nodes of this user, by the name of the lock's file: a machine may have several names.

    Held is what the kernel's table says: taking a lock to find out could get in somebody's way.
    """
    held: dict[str, str] = {}
    with contextlib.suppress(OSError):
        with open("/proc/locks") as file:
            inodes = {line.split()[-3].split(":")[-1] for line in file if line.split()[1] == "FLOCK"}
        for entry in os.scandir(lock_folder()):
            if entry.name.endswith(".lock") and str(entry.inode()) in inodes:
                held[entry.name[:-5]] = holder(entry.path).get("run_id", "?")
    return held


def find_data(entries: list[dict[str, Any]], home: str) -> list[dict[str, Any]]:
    """Per entry of data.paths: its files' number, bytes and a hash of names, sizes and edges, or what is wrong."""
    deadline = time.time() + _HASH_S
    return [_look_at(expand(entry["path"], home) or "", entry["suffixes"], deadline) for entry in entries]


def _look_at(path: str, suffixes: list[str], deadline: float) -> dict[str, Any]:
    found: dict[str, Any] = {"path": path}
    try:
        files = _list_files(path, suffixes)
        if not files:
            return dict(found, problem="no such file or folder" if not os.path.exists(path) else "holds no such files")
        digest, total = hashlib.sha256(), 0
        base = path if os.path.isdir(path) else os.path.dirname(path)
        for number, name in enumerate(files):
            size = os.stat(name).st_size
            total += size
            digest.update(f"{os.path.relpath(name, base)} {size}\n".encode("utf-8", "surrogateescape"))
            if number < _HASHED_FILES and time.time() < deadline:
                digest.update(_edges(name, size))
            elif not os.access(name, os.R_OK):
                raise PermissionError(13, "Permission denied", name)
        late = time.time() > deadline
        return dict(found, files=len(files), bytes=total, digest=None if late else digest.hexdigest())
    except OSError as error:
        return dict(found, problem=f"{error.filename or path}: {error.strerror}")


def _list_files(path: str, suffixes: list[str]) -> list[str]:
    """As the trainer will list them: a file, the files of a folder that are not hidden, or what a pattern matches."""
    if os.path.isdir(path):
        found: list[str] = []
        for parent, names, files in os.walk(path):
            names[:] = sorted(name for name in names if not name.startswith("."))
            wanted = [name for name in files if not suffixes or name.endswith(tuple(suffixes))]
            found += [os.path.join(parent, name) for name in sorted(wanted) if not name.startswith(".")]
            if len(found) > _MAX_FILES:
                break
        return found[:_MAX_FILES]
    if os.path.lexists(path) or not any(character in path for character in "*?["):
        return [path] if os.path.isfile(path) else []
    return sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))[:_MAX_FILES]


def _edges(path: str, size: int) -> bytes:
    """A hash of the first and the last MiB."""
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(_EDGE_BYTES))
        if size > _EDGE_BYTES:
            file.seek(max(_EDGE_BYTES, size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    return digest.digest()


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
