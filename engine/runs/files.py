"""Files that survive being killed: replaced whole, seen on the disk, known by their hash. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine.config.errors import BurstError

CACHE_VARIABLE = "BURST_CACHE_DIR"


def cache_folder() -> Path:
    """$BURST_CACHE_DIR, $XDG_CACHE_HOME/burst, or ~/.cache/burst."""
    given, base = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME", "")
    if given:
        return home_path(given).absolute()
    if base.startswith("/"):  # a relative one counts for nothing, says the XDG Base Directory Specification
        return Path(base) / "burst"
    try:
        return Path.home() / ".cache" / "burst"
    except RuntimeError:
        raise BurstError(f"this user has no home folder to keep a cache in. Set {CACHE_VARIABLE}.") from None


def home_path(path: str) -> Path:
    """`path` with its home put in for ~ or ~NAME; as it is, where this machine knows no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (that of Path raises RuntimeError)


def hash_json(value: object) -> str:
    """SHA-256 in hex of `value` as JSON, however its keys are ordered."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 in hex of the bytes of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(*paths: Path) -> None:
    """Returns when the contents of these files, and the names in these folders, are on the disk. Raises OSError."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(path: Path, content: str | bytes, *, is_shared: bool = False) -> None:
    """Replace `path`; a reader, whatever happens here, sees the old content or the new one. Raises OSError.

    The file is its owner's alone, or `is_shared` as if it had been opened under its own name. A device or pipe is never
    replaced: /dev/null would be gone.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileExistsError(errno.EEXIST, "it is no regular file", str(path))
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:80]}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if is_shared:
            umask = os.umask(0)
            os.umask(umask)
            Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


@contextlib.contextmanager
def new_folder(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """A folder beside `path`, to be filled in the body and renamed to `path` after it: that exists whole or not at all.

    Whatever fails, it is gone, with the folders above it that this made. Raises OSError, also where a folder with
    anything in it lies at `path`.
    """
    made = [parent for parent in path.parents if not parent.exists()]  # deepest first
    work = path.parent / f"{path.name}.tmp-{secrets.token_hex(8)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(mode)
        yield work
        sync(*work.rglob("*"), work)
        work.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        with contextlib.suppress(OSError):  # where anything lies in one
            for parent in made:
                parent.rmdir()


def remove_folder(path: Path) -> None:
    """Delete it; whoever looks meanwhile, or after this was killed, sees all of it or nothing. Raises OSError."""
    gone = path.with_name(f"{path.name}.gone-{secrets.token_hex(8)}")
    path.rename(gone)
    shutil.rmtree(gone)
