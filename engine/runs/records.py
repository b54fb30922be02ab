"""JSON on disk that survives being killed: objects replaced atomically, lines appended whole, torn lines skipped.

Standard library only. Figures that are not finite (NaN, infinity) have no place in JSON: they become null.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.config.errors import BurstError
from engine.runs.files import replace_file

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
