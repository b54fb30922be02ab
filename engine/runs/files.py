"""Files that survive being killed, standard library only: replaced whole, seen on the disk, known by their hash; JSON
among them: objects replaced atomically, lines appended whole, torn lines skipped.

Figures that are not finite (NaN, infinity) are not valid JSON: they become null.
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
    """Return $BURST_CACHE_DIR, $XDG_CACHE_HOME/burst, or ~/.cache/burst."""
    given, base = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME", "")
    if given:
        return home_path(given).absolute()
    if base.startswith("/"):  # relative paths are ignored by the XDG Base Directory Specification
        return Path(base) / "burst"
    try:
        return Path.home() / ".cache" / "burst"
    except RuntimeError:
        raise BurstError(f"this user has no home folder for a cache. Set {CACHE_VARIABLE}.") from None


def home_path(path: str) -> Path:
    """Expand ~ and ~NAME in `path`; unchanged if this machine has no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (that of Path raises RuntimeError)


def hash_file(path: Path) -> str:
    """Return the SHA-256 in hex of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(*paths: Path) -> None:
    """Sync the contents of these files and the entries of these folders to the disk. Raises OSError."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(path: Path, content: str | bytes, *, is_shared: bool = False) -> None:
    """Replace `path` atomically: a reader sees the old or the new content. Raises OSError.

    Only the owner can access the file, unless `is_shared`: then the umask applies. A device or pipe is never replaced,
    so /dev/null is safe.
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
    """Yield a temporary folder next to `path` to fill; it is renamed to `path` at the end, so `path` is never partial.

    On any failure it is removed, with the parent folders created here. Raises OSError, also if `path` is a non-empty
    folder.
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
        with contextlib.suppress(OSError):  # if one is not empty
            for parent in made:
                parent.rmdir()


def remove_folder(path: Path) -> None:
    """Delete a folder; a reader, even after a kill, sees all of it or nothing. Raises OSError."""
    gone = path.with_name(f"{path.name}.gone-{secrets.token_hex(8)}")
    path.rename(gone)
    shutil.rmtree(gone)


_BLOCK_BYTES = 8 << 20
_MAX_LINE_BYTES = 16 << 20
_NO_JSON = b"\0"  # begins no JSON value
_MAX_DIGITS = 38  # of 128 bits; longer numbers are rejected


def utc_now() -> str:
    """Return the current time as ISO 8601 in UTC with milliseconds, e.g. 2026-01-31T12:00:00.000Z."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in `path`, None if there is no such file. Raises ValueError for other contents."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    document = _decoded(text)
    if not isinstance(document, dict):
        raise ValueError(f"expected a JSON object, found {type(document).__name__}")
    return document


def require_json_object(path: Path, what: str, kind: type[BurstError]) -> dict[str, Any]:
    """Read the JSON object in `path`, described as `what`. Raises `kind` if it is missing or is no object."""
    try:
        document = read_json_object(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise kind(f"{path} cannot be read: {reason}; expected {what}") from error
    if document is None:
        raise kind(f"{path} is missing; expected {what}")
    return document


def json_text(document: Mapping[str, Any], *, is_ascii: bool = True) -> str:
    """Return `document` as the text of a JSON file; paths become strings."""
    return json.dumps(finite(document), indent=2, ensure_ascii=is_ascii, allow_nan=False, default=str) + "\n"


def replace_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace `path` by `document` atomically."""
    replace_file(path, json_text(document))


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append `row` as one line with a single write, after ending a partial line of an earlier crash."""
    line = json.dumps(finite(row), allow_nan=False, default=str) + "\n"
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of all complete lines of `path`, without damaged ones; none if the file is missing."""
    return JsonLinesTail(path).poll(final=True)


class JsonLinesTail:
    """Follows a JSON lines file: `poll()` returns the rows completed since the last call.

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
        """Return new rows; with `final` also a last line without newline, if it is valid JSON."""
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
    """Return `value` with every non-finite float replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse the object in one line; None for anything else."""
    try:
        row = _decoded(line.decode("utf-8"))
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _decoded(text: str) -> Any:
    """Parse JSON; non-finite numbers become None. Raises ValueError, also for too deep nesting."""
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def _whole(text: str) -> int | None:
    return int(text) if len(text) <= _MAX_DIGITS else None


_DECODER = json.JSONDecoder(parse_int=_whole)
