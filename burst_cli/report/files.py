"""Reports as files: nothing that is no report of ours is overwritten unasked, and a reader never sees half of one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from engine.errors import BurstError, ConfigError

_HEAD_BYTES = 4096
_SIGNS = (
    b'name="generator" content="burst report',
    b"burst report",  # the Software entry of a PNG, the first line of LaTeX
    b'{\n  "runs": [',
    b"run_id,exp,status,path",
)
_TEXT_SIGNS = ("tokens/s and step time: median (p25", "MFU (causal-aware) counts")  # the notes of tables and Markdown


def check_target(option: str, path: Path, *, force: bool) -> None:
    """Raise ConfigError, before anything is computed, when `path` cannot or must not be written."""
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder; give the name of a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option}: the folder {path.absolute().parent} does not exist; make it first")
    if path.exists() and not force and not _is_ours(path):
        raise ConfigError(
            f"{option}: {path} exists and is no report that burst wrote; give another name, or --force to replace it"
        )


def write_file(option: str, path: Path, content: bytes) -> None:
    """Replace `path` atomically. Raises BurstError that names the file."""
    descriptor, temporary = -1, ""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:80]}-", dir=path.absolute().parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)  # as if it had been opened under its own name: people share reports
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise BurstError(f"{option}: cannot write {path}: {error.strerror}") from error


def _is_ours(path: Path) -> bool:
    """Whether an earlier report lies there; an empty file may be replaced as well."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            text = (head + file.read()).decode("utf-8", "replace") if path.suffix in (".md", ".txt") else ""
    except OSError:
        return False
    return not head or any(sign in head for sign in _SIGNS) or any(sign in text for sign in _TEXT_SIGNS)
