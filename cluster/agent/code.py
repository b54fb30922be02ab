"""The code of the ranks on a node: identified by its content, put into its place whole, verified, or not at all.

ROOT/<code id>/engine/...      good for every run that names it
ROOT/<code id>.part-<nonce>    being unpacked
"""

import contextlib
import hashlib
import io
import os
import shutil
import stat
import tarfile
import time
from typing import Any, Optional

from cluster.agent.processes import all_pids, read_environ

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


def used_code() -> list[str]:
    """PYTHONPATH of every process that we may look at and that belongs to a run."""
    paths = ((read_environ(pid) or {}).get(b"PYTHONPATH") for pid in all_pids())
    return [path.decode("utf-8", "replace") for path in paths if path]


def expand(path: Optional[str], home: str) -> Optional[str]:
    """`path` with the home of the node's user in the place of `~`."""
    if path is None or not (path == "~" or path.startswith("~/")):
        return path
    return home + path[1:]


_DAY_S = 86400.0


class InstallError(Exception):
    """The code cannot be brought into its place."""


def install(root: str, code_id: str, archive: bytes, nonce: str) -> str:
    """ "present" or "installed". A damaged folder is replaced; of two that install at once either one's is good."""
    make_root(root)
    target = os.path.join(root, code_id)
    if check_tree(target, code_id) == "good":
        with contextlib.suppress(FileNotFoundError):  # whoever found it damaged before is putting another in its place
            os.utime(target, None)
        return "present"
    part = f"{target}.part-{nonce}"
    try:
        os.mkdir(part, 0o700)
        unpack(archive, part)
        state = check_tree(part, code_id)
        if state != "good":
            raise InstallError(f"the archive did not arrive whole: {state}")
        put_in_place(part, target, code_id, nonce)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return "installed"


def make_root(root: str) -> None:
    """The folder of all code, ours alone. Raises InstallError when it is not."""
    os.makedirs(root, 0o700, exist_ok=True)
    found = os.stat(root)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise InstallError(f"{root} belongs to somebody else, or others may write there")
    stranger = replaceable_above(os.path.join(root, "code"))
    if stranger is not None:
        raise InstallError(f"{stranger} belongs to somebody else, or others may put another folder there")


def unpack(archive: bytes, folder: str) -> None:
    """The regular files of a tar, each below `folder`. Raises InstallError for anything else."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as packed:
            for member in packed:
                parts = member.name.split("/")
                if not member.isreg() or member.name.startswith("/") or not all(parts) or ".." in parts or "." in parts:
                    raise InstallError(f"the archive holds {member.name[:100]!r}")
                path = os.path.join(folder, *parts)
                os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
                source = packed.extractfile(member)
                assert source is not None
                with open(path, "xb") as file:
                    shutil.copyfileobj(source, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(path, 0o600)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise InstallError(f"the archive cannot be read: {error}") from error


def put_in_place(part: str, target: str, code_id: str, nonce: str) -> None:
    """Rename `part` to `target`; what lies there and is not good goes away, what is good stays."""
    for attempt in range(5):
        with contextlib.suppress(OSError):
            os.rename(part, target)
        if check_tree(target, code_id) == "good":
            return  # ours, or that of another one who was faster
        aside = f"{target}.bad-{nonce}-{attempt}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, aside)
        _remove(aside)
    raise InstallError(f"{target} cannot be replaced")


def prune(root: str, keep: int, age_s: float, now: float) -> list[str]:
    """Names of the code that was removed: all but the `keep` used last, if unused for `age_s` and by any process."""
    in_use = ":".join(used_code())
    entries = []
    for name in os.listdir(root):
        path = os.path.join(root, name)
        with contextlib.suppress(OSError):
            entries.append((os.lstat(path).st_mtime, name, path))
    entries.sort(reverse=True)
    whole = [entry for entry in entries if len(entry[1]) == 64]
    torn = [entry for entry in entries if ".part-" in entry[1] or ".bad-" in entry[1]]
    removed = []
    for mtime, name, path in whole[keep:] + [entry for entry in torn if now - entry[0] > _DAY_S]:
        if now - mtime > age_s and path not in in_use:
            _remove(path)
            removed.append(name)
    return removed


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def install_code(question: dict[str, Any], archive: bytes) -> dict[str, Any]:
    """Answer the launcher, which brings the code in `archive`; without one: whether it is there."""
    home = os.path.expanduser("~")
    root = expand(str(question["root"]), home) or ""
    code_id = str(question["code_id"])
    try:
        for folder in question["folders"]:
            os.makedirs(expand(str(folder), home) or "", 0o700, exist_ok=True)
        if not archive:
            return {"state": check_tree(os.path.join(root, code_id), code_id)}
        state = install(root, code_id, archive, str(question["nonce"]))
        removed = prune(root, int(question["keep"]), float(question["age_s"]), time.time())
        return {"state": state, "removed": removed}
    except InstallError as error:
        return {"error": str(error)}
    except OSError as error:
        return {"error": f"{error.filename or root}: {error.strerror or error}"}
