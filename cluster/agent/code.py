"""The code of the ranks on a node: a zip that Python imports from, named by its SHA-256, put into its place whole.

ROOT/<code id>.zip             good for every run that names it
ROOT/<code id>.zip.part-<nonce>    being written
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
import stat
import time
from typing import Any

from cluster.agent.folder import make_folder
from cluster.agent.messages import code_id_of, code_path, write_all
from cluster.agent.processes import all_pids, read_environ

_OURS = re.compile(r"[0-9a-f]{64}\.zip(\.part-.*)?")
_OTHERS = 0o022  # group and others may write
_NAME_PREFIX = ".burst"  # of folders that nobody but burst makes


def check_code(path: str, code_id: str) -> str:
    """ "good", "missing", or why what lies at `path` is not the code `code_id`."""
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            return f"{path} is no plain file"
        if found.st_uid != os.getuid() or found.st_mode & _OTHERS:
            return f"{path} belongs to {_describe(found)}: another user could have written it"
        folder = os.path.dirname(path)
        distrust = _distrust(folder, own=True) or _distrust(os.path.dirname(folder))
        if distrust:
            return distrust
        with open(path, "rb") as file:
            return "good" if code_id_of(file.read()) == code_id else f"{path} was changed or is incomplete"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"{path}: {error.strerror}"


def _distrust(folder: str, *, own: bool = False) -> str:
    """Why another user could exchange what is in `folder`; "" when none could. own: it must be this user's, not root's.

    In a folder with the sticky bit everybody may make files, and exchange none of another user.
    """
    found = os.stat(folder)
    if found.st_uid != os.getuid() and (own or found.st_uid != 0):
        return f"{folder} belongs to {_describe(found)}; use another folder, or have it removed by its owner"
    if found.st_mode & _OTHERS and (own or not found.st_mode & stat.S_ISVTX):
        text = f"{folder} belongs to {_describe(found)}: other users could exchange what is in it"
        return f"{text}; run `chmod go-w {shlex.quote(folder)}` on the node"
    return ""


def _describe(found: os.stat_result) -> str:
    """The owner and the mode of a file, as `ls` shows them."""
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = f"user {found.st_uid}"
    return f"{owner} and has mode {stat.S_IMODE(found.st_mode):04o}"


def make_private(folder: str) -> None:
    """Make `folder`, which burst has named, for this user alone; one that is there and ours is made so.

    Raises InstallError where it, or the one above, is another user's, OSError.
    """
    make_folder(folder)
    for path in (os.path.dirname(folder), folder):
        found = os.stat(path)
        is_ours = found.st_uid == os.getuid() and os.path.basename(path).startswith(_NAME_PREFIX)
        if found.st_mode & _OTHERS and (is_ours or (path == folder and found.st_uid == os.getuid())):
            os.chmod(path, 0o700)  # made with the umask, which lets a group write
        distrust = _distrust(path, own=path == folder)
        if distrust:
            raise InstallError(distrust)


def expand(path: str, home: str) -> str:
    """`path` with the home of the node's user in the place of `~`."""
    return home + path[1:] if path == "~" or path.startswith("~/") else path


class InstallError(Exception):
    """The code cannot be brought into its place."""


def install(root: str, code_id: str, archive: bytes, nonce: str) -> None:
    """Put it into its place, unless it is there. Of two that install at once either one's is good.

    Raises InstallError where another user could change the folder of all code, OSError.
    """
    make_private(root)
    target = code_path(root, code_id)
    if check_code(target, code_id) == "good":
        os.utime(target, None)
        return
    if code_id_of(archive) != code_id:
        raise InstallError("the archive did not arrive whole")
    part = f"{target}.part-{nonce}"
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb"):
            write_all(descriptor, archive)
            os.fsync(descriptor)
        os.replace(part, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


def prune(root: str, keep: int, age_s: float, now: float) -> None:
    """Remove all code but the `keep` used last, if unused for `age_s` and by any process that we may look at."""
    in_use = os.fsdecode(b":".join((read_environ(pid) or {}).get(b"PYTHONPATH", b"") for pid in all_pids()))
    entries = []
    for path in (os.path.join(root, name) for name in os.listdir(root) if _OURS.fullmatch(name)):
        with contextlib.suppress(OSError):  # others remove, too
            entries.append((os.lstat(path).st_mtime, path))
    for mtime, path in sorted(entries, reverse=True)[keep:]:
        if now - mtime > age_s and path not in in_use:
            with contextlib.suppress(OSError):
                os.unlink(path)


def install_code(question: dict[str, Any], archive: bytes) -> dict[str, Any]:
    """Answer the launcher, which brings the code in `archive`, or nothing: {"state": "good", or why it is not}."""
    home = os.path.expanduser("~")
    root, code_id = expand(str(question["root"]), home), str(question["code_id"])
    try:
        for folder in question["folders"]:
            make_folder(expand(str(folder), home))
        for folder in question["private"]:
            make_private(expand(str(folder), home))
        if archive:
            install(root, code_id, archive, str(question["nonce"]))
            prune(root, int(question["keep"]), float(question["age_s"]), time.time())
        return {"state": check_code(code_path(root, code_id), code_id)}
    except InstallError as error:
        return {"state": str(error)}
    except OSError as error:
        return {"state": f"{error.filename or root}: {error.strerror or error}"}
