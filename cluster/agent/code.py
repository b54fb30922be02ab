"""The code of the ranks on a node: a zip that Python imports from, named by its SHA-256, put into its place whole.

ROOT/<code id>.zip             good for every run that names it
ROOT/<code id>.zip.part-<nonce>    being written
"""

import contextlib
import os
import re
import shutil
import stat
import time
from typing import Any, Optional

from cluster.agent.messages import code_id_of, code_path
from cluster.agent.processes import all_pids, read_environ


def check_code(path: str, code_id: str) -> str:
    """ "good", "missing", or why what lies at `path` is not the code `code_id`."""
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            return f"{path} is no plain file"
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            return f"{path} belongs to somebody else, or others may write there"
        stranger = replaceable_above(path)
        if stranger is not None:
            return f"{stranger} belongs to somebody else, or others may put another folder there"
        with open(path, "rb") as file:
            return "good" if code_id_of(file.read()) == code_id else f"{path} was changed or is incomplete"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"{path}: {error.strerror}"


def replaceable_above(path: str) -> Optional[str]:
    """The first of the two folders above `path` in which another user could exchange what we have put there."""
    for _ in range(2):
        path = os.path.dirname(path)
        found = os.stat(path)
        others_write = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (os.getuid(), 0) or others_write:
            return path
    return None


def expand(path: Optional[str], home: str) -> Optional[str]:
    """`path` with the home of the node's user in the place of `~`."""
    if path is None or not (path == "~" or path.startswith("~/")):
        return path
    return home + path[1:]


_OURS = re.compile("[0-9a-f]{64}")


class InstallError(Exception):
    """The code cannot be brought into its place."""


def install(root: str, code_id: str, archive: bytes, nonce: str) -> None:
    """Put it into its place, unless it is there. Of two that install at once either one's is good."""
    make_root(root)
    target = code_path(root, code_id)
    if check_code(target, code_id) == "good":
        os.utime(target, None)
        return
    if code_id_of(archive) != code_id:
        raise InstallError("the archive did not arrive whole")
    part = f"{target}.part-{nonce}"
    try:
        with open(part, "xb") as file:
            os.chmod(part, 0o600)
            file.write(archive)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


def make_root(root: str) -> None:
    """The folder of all code, ours alone. Raises InstallError when it is not."""
    os.makedirs(root, 0o700, exist_ok=True)
    found = os.stat(root)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise InstallError(f"{root} belongs to somebody else, or others may write there")
    stranger = replaceable_above(os.path.join(root, "code"))
    if stranger is not None:
        raise InstallError(f"{stranger} belongs to somebody else, or others may put another folder there")


def prune(root: str, keep: int, age_s: float, now: float) -> None:
    """Remove all code but the `keep` used last, if unused for `age_s` and by any process that we may look at."""
    in_use = b":".join((read_environ(pid) or {}).get(b"PYTHONPATH", b"") for pid in all_pids()).decode(
        "utf-8", "replace"
    )
    entries = []
    for path in (os.path.join(root, name) for name in os.listdir(root) if _OURS.match(name)):
        with contextlib.suppress(OSError):  # others remove, too
            entries.append((os.lstat(path).st_mtime, path))
    for mtime, path in sorted(entries, reverse=True)[keep:]:
        if now - mtime > age_s and path not in in_use:
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)  # a folder is an earlier version's


def install_code(question: dict[str, Any], archive: bytes) -> dict[str, Any]:
    """Answer the launcher, which brings the code in `archive`, or nothing: {"state": "good", or why it is not}."""
    home = os.path.expanduser("~")
    root = expand(str(question["root"]), home) or ""
    code_id = str(question["code_id"])
    try:
        for folder in question["folders"]:
            os.makedirs(expand(str(folder), home) or "", 0o700, exist_ok=True)
        if archive:
            install(root, code_id, archive, str(question["nonce"]))
            prune(root, int(question["keep"]), float(question["age_s"]), time.time())
        return {"state": check_code(code_path(root, code_id), code_id)}
    except InstallError as error:
        return {"state": str(error)}
    except OSError as error:
        return {"state": f"{error.filename or root}: {error.strerror or error}"}
