"""The identity of a folder of code: one hash over the names and contents of its files."""

import hashlib
import os
import stat
from typing import Optional

_SKIPPED = "__pycache__"  # what an interpreter leaves there does not belong to the code
MAX_FILES = 20000


class TreeError(Exception):
    """A folder holds what no code archive of ours holds."""


def list_tree(folder: str) -> dict[str, str]:
    """Path relative to `folder` -> hash of the content, of every file. Raises TreeError for links and other things."""
    found: dict[str, str] = {}
    for parent, names, files in os.walk(folder, onerror=_refuse):
        names[:] = sorted(name for name in names if name != _SKIPPED)
        for name in names + files:
            path = os.path.join(parent, name)
            mode = os.lstat(path).st_mode
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                raise TreeError(f"{path} is neither a file nor a folder")
        for name in files:
            path = os.path.join(parent, name)
            found[os.path.relpath(path, folder).replace(os.sep, "/")] = _hash_file(path)
            if len(found) > MAX_FILES:
                raise TreeError(f"{folder} holds more than {MAX_FILES} files")
    return found


def tree_id(files: dict[str, str]) -> str:
    """64 hex digits: equal exactly when names and contents are."""
    lines = [f"{content} {name}\n" for name, content in sorted(files.items())]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def check_tree(folder: str, code_id: str) -> str:
    """ "good", "missing", or why what lies in `folder` is not the code `code_id`."""
    try:
        mode = os.lstat(folder)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if not stat.S_ISDIR(mode.st_mode):
        return f"{folder} is no folder"
    if mode.st_uid != os.getuid() or mode.st_mode & 0o022:
        return f"{folder} belongs to somebody else, or others may write there"
    stranger = replaceable_above(folder)
    if stranger is not None:
        return f"{stranger} belongs to somebody else, or others may put another folder there"
    try:
        files = list_tree(folder)
    except (OSError, TreeError) as error:
        return f"{folder}: {error}"
    return "good" if tree_id(files) == code_id else f"{folder} was changed or is incomplete"


def replaceable_above(folder: str) -> Optional[str]:
    """The first of the two folders above `folder` in which another user could exchange what we have put there."""
    for _ in range(2):
        folder = os.path.dirname(folder)
        found = os.stat(folder)
        others_write = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (os.getuid(), 0) or others_write:
            return folder
    return None


def _hash_file(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while True:
            block = file.read(1 << 20)
            if not block:
                return digest.hexdigest()
            digest.update(block)


def _refuse(error: OSError) -> None:
    raise error


def used_code(proc: str = "/proc") -> list[str]:
    """PYTHONPATH of every process that we may look at and that belongs to a run."""
    found: list[str] = []
    for name in os.listdir(proc):
        if name.isdigit():
            path = read_environment(os.path.join(proc, name)).get("PYTHONPATH")
            if path:
                found.append(path)
    return found


def read_environment(process: str) -> dict[str, str]:
    """The environment that a process was started with; empty when it is gone or not ours to see."""
    try:
        with open(os.path.join(process, "environ"), "rb") as file:
            raw = file.read(1 << 20)
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0"))
    return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, _, value in pairs if key}


def expand(path: Optional[str], home: str) -> Optional[str]:
    """`path` with the home of the node's user in the place of `~`."""
    if path is None or not (path == "~" or path.startswith("~/")):
        return path
    return home + path[1:]
