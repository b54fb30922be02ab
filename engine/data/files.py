"""File work of the data pipeline: path lists and texts with readable errors, a lock between processes."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.config.errors import DataError

LOCK_POLL_S = 0.1
_GLOB_CHARACTERS = frozenset("*?[")


def reading_error(path: Path, error: OSError) -> DataError:
    """The `DataError` that tells why `path` could not be read."""
    return DataError(f"cannot read {path}: {error.strerror or error}. Check that it exists and that you may read it.")


def list_files(paths: Sequence[str], suffixes: tuple[str, ...]) -> tuple[Path, ...]:
    """Absolute paths of all regular files that `paths` name, in the order given and sorted within one entry.

    An entry is a file, a glob (`**` goes into folders) or a folder, which stands for every file below it that ends
    in one of `suffixes` (all files if `suffixes` is empty) and is not hidden. A file named twice is read once.
    """
    found: dict[Path, None] = {}
    missing: list[str] = []
    for entry in paths:
        matches = _matches(entry, suffixes)
        if matches is None:
            missing.append(entry)
        else:
            found.update(dict.fromkeys(matches))
    if missing:
        raise DataError(
            f"data.paths: no such file or folder: {', '.join(repr(entry) for entry in missing)} "
            f"(looked from {Path.cwd()}). Name files, folders or globs that exist."
        )
    if not found:
        what = f"a file ending in {' or '.join(suffixes)}" if suffixes else "a file"
        given = ", ".join(repr(entry) for entry in paths) or "an empty list"
        raise DataError(f"data.paths: {given} holds no files to read. Name a folder with {what} in it, or the files.")
    return tuple(found)


def _matches(entry: str, suffixes: tuple[str, ...]) -> list[Path] | None:
    if not entry:
        return None
    path = Path(entry).expanduser().absolute()
    if path.is_dir():
        return _files_below(path, suffixes)
    if path.is_file():
        return [path]
    if path.exists():
        raise DataError(f"data.paths: {path} is not a regular file. Name files, folders or globs of text files.")
    if _GLOB_CHARACTERS & set(entry):
        matches = glob.glob(str(path), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute patterns)
        return sorted(Path(match) for match in matches if Path(match).is_file())
    return None


def _files_below(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise reading_error(Path(error.filename or folder), error)

    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files.extend(Path(parent, name) for name in names if not name.startswith(".") and name.endswith(suffixes or ""))
    return sorted(path for path in files if path.is_file())


def stat_key(path: Path) -> tuple[str, int, int]:
    """(absolute path, size in bytes, modification time in ns): changes whenever the file does, without reading it."""
    try:
        facts = path.stat()
    except OSError as error:
        raise reading_error(path, error) from None
    return str(path), facts.st_size, facts.st_mtime_ns


def read_text(path: Path, what: str) -> str:
    """The text in `path`; `what` names the file's role in the error text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; expected {what}.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: invalid UTF-8 at byte offset {error.start}; expected {what}.") from None


def json_type(value: object) -> str:
    """What JSON calls the kind of `value`."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


@contextlib.contextmanager
def exclusive_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock file `path`; yields False where the file system knows no locks (then nothing is excluded).

    The kernel frees the lock when a process dies, however it dies. The file stays: whoever waits for it holds it open.
    """
    with path.open("ab") as file:
        yield _locked(file.fileno(), on_wait)


def _locked(file: int, on_wait: Callable[[], None]) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()  # again and again: who is silent for long is taken for hung
            time.sleep(LOCK_POLL_S)
        except OSError:
            return False
        else:
            return True
