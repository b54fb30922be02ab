"""What only a launch must know of this node; `cluster.checks.launch` judges it. It changes nothing here."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import pwd
import random
import re
import socket
import time
from collections.abc import Callable
from typing import Any

from cluster.agent.code import expand
from cluster.agent.start import active_locks, user_name
from engine.runs.process import usable_bytes

_HASH_S = 10.0
_EDGE_BYTES = 1 << 20
_MAX_FILES = 20000
_HASHED_FILES = 64
# By the name of the kernel: where nodes that mount the same source see the same files.
_NETWORKED = re.compile(r"nfs4?|lustre|gpfs|ceph|cifs|smb3|beegfs.*|wekafs|panfs|(fuse\.)?(glusterfs|juicefs|ceph)")
_CONFIG_BYTES = 256 << 10
# As `engine.pretrained.folder` has them, which does not come along.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json"),
    *("merges.txt", "vocab.txt", "spiece.model", "tekken.json"),
)
_STEP = re.compile(r"step-\d{8,}")
_UNFINISHED = ("step-*.tmp-*", "step-*.gone-*", "fetched-*")  # which the next start of a run deletes
_PORTS = (20000, 30000)  # below those that systems give to outgoing connections


def survey(question: dict[str, Any]) -> dict[str, Any]:
    """Facts by name.

    question: root, where a node keeps runs; port; data, see `find_data`; checkpoints, the folder above those of a run,
    and run_id of a run that has begun, or null; source, where training is to go on from, or null; model, the folder
    of its first weights, or null.
    """
    home, uid = os.path.expanduser("~"), os.getuid()
    user = str(uid)
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(uid).pw_name
    return {
        "home": home,
        "user": user,
        "uid": uid,
        "gid": os.getgid(),
        "groups": sorted(os.getgroups()),
        "has_infiniband_devices": os.path.isdir("/dev/infiniband"),
        "memory_bytes": usable_bytes(),
        "room": _attempt(lambda: find_room(expand(question["root"], home))),
        "port": _attempt(lambda: find_port(question["port"])),
        "locks": find_locks(),
        "data": find_data(question["data"], home),
        **_checkpoints(question, home),
        "model": None if question["model"] is None else find_model(expand(question["model"], home)),
    }


def _checkpoints(question: dict[str, Any], home: str) -> dict[str, Any]:
    """What is known of the disk that checkpoints are written to and of the folder that they are read from."""
    folder, source, run_id = expand(question["checkpoints"], home), question["source"], question["run_id"]
    own = os.path.join(folder, run_id or "")
    old = 0 if run_id is None else unfinished_bytes(own) + unfinished_bytes(os.path.join(own, "checkpoints"))
    return {
        "checkpoint_room": _attempt(lambda: find_room(folder) + old),
        "checkpoint_disk": find_disk(folder),
        "has_source": None if source is None else has_checkpoint(expand(source, home)),
    }


def _attempt(find: Callable[[], int]) -> tuple[int | None, str]:
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


def find_model(folder: str) -> dict[str, Any] | None:
    """What config.json in the folder of a model says, or why it says nothing; whether a tokenizer is beside it.

    None without a folder, which `find_data` tells.
    """
    if not os.path.isdir(folder):
        return None
    has_tokenizer = any(os.path.isfile(os.path.join(folder, name)) for name in TOKENIZER_FILES)
    told: dict[str, Any] = {"problem": "", "config": None, "has_tokenizer": has_tokenizer}
    try:
        with open(os.path.join(folder, "config.json"), "rb") as file:
            text = file.read(_CONFIG_BYTES + 1)
        if len(text) > _CONFIG_BYTES:
            raise ValueError(f"it has more than {_CONFIG_BYTES} bytes")
        told["config"] = json.loads(text)
    except (OSError, ValueError) as error:
        told["problem"] = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return told


def find_disk(root: str) -> str:
    """Equal where nodes see the same disk: source of a network file system, else machine and device; "": not known."""
    folder = os.path.abspath(root)
    while not os.path.isdir(folder) and folder != "/":
        folder = os.path.dirname(folder)
    with contextlib.suppress(OSError):
        number = os.stat(folder).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        source = network_source(_text("/proc/self/mountinfo"), device)
        return source or f"{_text('/proc/sys/kernel/random/boot_id').strip()} {device}"
    return ""


def network_source(mounts: str, device: str) -> str:
    """Kind and source of the network file system that mountinfo (proc(5)) has as `device`, MAJOR:MINOR; else ""."""
    for line in mounts.splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2:3] == [device] and _NETWORKED.fullmatch((kind.split() or [""])[0]):
            return " ".join(kind.split()[:2])
    return ""


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def unfinished_bytes(folder: str) -> int:
    """Bytes in `folder` of saves that did not end, which are deleted when the run goes on, before it saves again."""
    paths = [path for name in _UNFINISHED for path in glob.glob(os.path.join(glob.escape(folder), name, "*"))]
    size = 0
    for path in paths:
        with contextlib.suppress(OSError):
            size += os.stat(path).st_blocks * 512
    return size


def has_checkpoint(path: str) -> bool | None:
    """Whether ranks find a checkpoint by this path; None: its configuration, which is not read here, may say where."""
    is_step = _STEP.fullmatch(os.path.basename(path)) and os.path.isdir(path)
    if is_step or any(_STEP.fullmatch(name) for folder in (path, f"{path}/checkpoints") for name in _names(folder)):
        return True
    return None if os.path.exists(os.path.join(path, "config.yaml")) else False


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def find_port(wanted: int | None) -> int:
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
    """Which runs hold which nodes, by the name of the lock's file: a machine may have several names.

    Of another user it is `RUN of USER`; a run of this user counts first.
    """
    held: dict[str, str] = {}
    for lock in sorted(active_locks(), key=lambda lock: lock.uid == os.geteuid()):
        held[lock.name] = lock.run_id if lock.uid == os.geteuid() else f"{lock.run_id} of {user_name(lock.uid)}"
    return held


def find_data(entries: list[dict[str, Any]], home: str) -> list[dict[str, Any]]:
    """Per entry of data.paths: its files' number, bytes and a hash of names, sizes and edges, or what is wrong."""
    deadline = time.time() + _HASH_S
    found = []
    for entry in entries:
        path = expand(entry["path"], home)
        try:
            found.append({"path": path, **_look_at(path, tuple(entry["suffixes"]), deadline)})
        except OSError as error:
            found.append({"path": path, "problem": f"{error.filename or path}: {error.strerror}"})
    return found


def _look_at(path: str, suffixes: tuple[str, ...], deadline: float) -> dict[str, Any]:
    files = _list_files(path, suffixes)
    if not files:
        return {"problem": "no such file or folder" if not os.path.exists(path) else "holds no such files"}
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
    return {"files": len(files), "bytes": total, "digest": None if late else digest.hexdigest()}


def _list_files(path: str, suffixes: tuple[str, ...]) -> list[str]:
    """As the trainer will list them: a file, the files of a folder that are not hidden, or what a pattern matches."""
    if os.path.isdir(path):
        found: list[str] = []
        for parent, names, files in os.walk(path):
            names[:] = sorted(name for name in names if not name.startswith("."))
            wanted = sorted(name for name in files if name.endswith(suffixes or ("",)) and not name.startswith("."))
            found += [os.path.join(parent, name) for name in wanted]
            if len(found) > _MAX_FILES:
                break
        return found[:_MAX_FILES]
    is_one = os.path.lexists(path) or not any(character in path for character in "*?[")
    found = [path] if is_one else sorted(glob.glob(path, recursive=True))
    return [name for name in found if os.path.isfile(name)][:_MAX_FILES]


def _edges(path: str, size: int) -> bytes:
    """A hash of the first and the last MiB."""
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(_EDGE_BYTES))
        if size > _EDGE_BYTES:
            file.seek(max(_EDGE_BYTES, size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    return digest.digest()
