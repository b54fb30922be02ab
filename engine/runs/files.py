"""Files that survive being killed, standard library only: replaced whole, seen on the disk, known by their hash; JSON
among them: objects replaced atomically, lines appended whole, torn lines skipped.

Figures that are not finite (NaN, infinity) have no place in JSON: they become null.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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
        sync(Path(temporary))
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


_BLOCK_BYTES = 8 << 20
_MAX_LINE_BYTES = 16 << 20
_NO_JSON = b"\0"  # begins no JSON value
_MAX_DIGITS = 38  # those of 128 bits; what is longer cannot be computed with


def utc_now() -> str:
    """The present as ISO 8601 in UTC with milliseconds, e.g. 2026-01-31T12:00:00.000Z."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The object in `path`, or None when there is no such file. Raises ValueError when it holds anything else."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    document = _decoded(text)
    if not isinstance(document, dict):
        raise ValueError(f"expected a JSON object, found {type(document).__name__}")
    return document


def require_json_object(path: Path, what: str, kind: type[BurstError]) -> dict[str, Any]:
    """The object in `path`, which is `what`. Raises `kind` when there is no such file or it holds anything else."""
    try:
        document = read_json_object(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise kind(f"{path} cannot be read: {reason}; expected {what}") from error
    if document is None:
        raise kind(f"{path} is missing; expected {what}")
    return document


def json_text(document: Mapping[str, Any], *, is_ascii: bool = True) -> str:
    """`document` as the text of a JSON file; paths become text."""
    return json.dumps(finite(document), indent=2, ensure_ascii=is_ascii, allow_nan=False, default=str) + "\n"


def replace_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace `path` by `document`; a reader sees the old or the new text, never a part of one."""
    replace_file(path, json_text(document))


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append `row` as one line with a single write; a line torn by an earlier crash is closed first."""
    line = json.dumps(finite(row), allow_nan=False, default=str) + "\n"
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of all complete lines of `path`; torn or damaged lines are left out, a missing file has none."""
    return JsonLinesTail(path).poll(final=True)


class JsonLinesTail:
    """Follows a JSON lines file: `poll()` returns the rows that became complete since last time.

    From its beginning, or from the whole rows of its last `last_bytes` on.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""
        with contextlib.suppress(OSError):
            if last_bytes is not None and (size := path.stat().st_size) > last_bytes:
                self._offset, self._rest = size - last_bytes, _NO_JSON  # and what follows, up to the next line end

    def poll(self, *, final: bool = False) -> list[dict[str, Any]]:
        """New rows; with `final` a last line without newline counts too, if it is whole."""
        rows: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._offset:  # replaced by a shorter file: a new attempt
                self._offset, self._rest = 0, b""
            file.seek(self._offset)
            while block := file.read(_BLOCK_BYTES):
                self._offset += len(block)
                *lines, self._rest = (self._rest + block).split(b"\n")
                rows += [row for line in lines if (row := parse_line(line)) is not None]
                if len(self._rest) > _MAX_LINE_BYTES:
                    self._rest = _NO_JSON  # and what follows, up to the next line end
        if final and (row := parse_line(self._rest)) is not None:
            rows.append(row)
        return rows


def finite(value: Any) -> Any:
    """`value` with every float that is not finite replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object in one line; None when it holds anything else."""
    try:
        row = _decoded(line.decode("utf-8"))
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _decoded(text: str) -> Any:
    """What a JSON text says; numbers that no figure can be become None. Raises ValueError, also for endless nesting."""
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def _whole(text: str) -> int | None:
    return int(text) if len(text) <= _MAX_DIGITS else None


_DECODER = json.JSONDecoder(parse_int=_whole)
