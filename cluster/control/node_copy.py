"""The launcher's copy of one node's files: logs grow by offset, other files are replaced whole.

The length of a log here is the offset from which it goes on, so a launcher that was killed at any moment loses nothing
and writes nothing twice. What a node sends is believed only inside its own folders:

    logs/<node>/NAME   nodes/<node>/NAME   run.json -> nodes/<node>/run.json   profile/rank<NNNN>.json
    metrics.jsonl events.jsonl summary.json tokenizer.json tensorboard/NAME    of the node with rank 0
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.agent.folder import LEAD_LOGS, LEAD_WHOLE
from cluster.agent.messages import write_all
from cluster.control.link import StrangeAnswerError
from cluster.values import integer
from engine.runs.folder import RunFolder

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_TRACE = re.compile(r"profile/rank\d{4,9}\.json")
# What only the copy itself makes: a log that was begun anew on its node.
_ASIDE = re.compile(r".*\.before-\d+")
_IN_THE_WAY = (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ENXIO)


@dataclass(frozen=True)
class CopyLimits:
    """What one node may take of the launcher's machine.

    reserve_bytes: of the disk, left for what the launcher itself must write. retry_s: between two looks at a full disk.
    """

    files: int = 4096
    file_bytes: int = 64 << 20  # of one that is replaced; logs have no limit but the disk
    replaced_logs: int = 9
    reserve_bytes: int = 32 << 20
    retry_s: float = 2.0


@dataclass(frozen=True)
class _Head:
    """What a piece is of. size: of a file that is replaced, None: of a log."""

    path: str
    offset: int
    count: int
    size: int | None
    anew: bool


class NodeCopy:
    """The copy of one node's files in the run folder `run`. lead: whether the node has rank 0.

    problem: why nothing is written now, such as a full disk. Who controls the run is the only one who copies.
    """

    def __init__(self, run: Path, node: str, *, lead: bool, limits: CopyLimits = CopyLimits()) -> None:
        name = RunFolder(run).log_dir(node).name
        self._run, self._logs, self._facts = run, f"logs/{name}", f"nodes/{name}"
        self._lead, self._limits = lead, limits
        self._known: set[str] = set()
        self._retry_at = 0.0
        self.problem: str | None = None

    def offsets(self) -> dict[str, int]:
        """How far every log is here."""
        places = [self._logs, self._facts, *(["tensorboard"] if self._lead else [])]
        paths = [f"{place}/{path.name}" for place in places for path in _files_in(self._run / place)]
        paths += [path for path in LEAD_LOGS if self._lead and (self._run / path).is_file()]
        return {path: (self._run / path).stat().st_size for path in paths if self._is_log(path)}

    def take(self, heads: Any, data: bytes) -> bool:
        """Write pieces of files. False: they do not go on where the copy ends, or cannot be written now, so that the
        node must be asked again, from `offsets()`. Raises StrangeAnswerError."""
        at = 0
        for head in _read_heads(heads):
            piece, at = data[at : at + head.count], at + head.count
            if len(piece) != head.count:
                raise StrangeAnswerError("it sends fewer bytes than it says")
            if not self._put(head, piece):
                return False
        return True

    def can_go_on(self) -> bool:
        """Whether to ask for files: nothing is in the way, or it may be gone by now."""
        if self.problem is None:
            return True
        if time.monotonic() < self._retry_at:
            return False
        try:
            self._need_room(0)
            self.problem = None
        except OSError as error:
            self._pause(error)
        return self.problem is None

    # --- writing ---------------------------------------------------------------------------------------------------

    def _put(self, head: _Head, piece: bytes) -> bool:
        path = f"{self._facts}/run.json" if head.path == "run.json" else head.path
        if not self._is_allowed(path):
            return True
        try:
            self._make_folders(path)
            return self._append(path, head, piece) if self._is_log(path) else self._replace(path, head, piece)
        except OSError as error:
            if error.errno in _IN_THE_WAY:  # something else has its name here
                return True
            self._pause(error)
            return False

    def _append(self, path: str, head: _Head, piece: bytes) -> bool:
        if head.anew:
            self._set_aside(path)
        with self._opened(path, os.O_APPEND | os.O_CREAT) as descriptor:
            if os.fstat(descriptor).st_size != head.offset:
                return False
            self._need_room(len(piece))
            write_all(descriptor, piece)
        return True

    def _replace(self, path: str, head: _Head, piece: bytes) -> bool:
        """A reader sees the old content or the new one."""
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/.{name}.part" if folder else f".{name}.part"  # no node may name such a file
        if head.size is None or head.offset + len(piece) > head.size:
            raise StrangeAnswerError(f"{path} is longer than announced")
        if head.size > self._limits.file_bytes:
            return True
        if not head.offset:
            (self._run / temporary).unlink(missing_ok=True)
        with self._opened(temporary, os.O_APPEND | os.O_CREAT) as descriptor:
            if os.fstat(descriptor).st_size != head.offset:
                return False
            self._need_room(len(piece))
            write_all(descriptor, piece)
        if head.offset + len(piece) == head.size:
            (self._run / temporary).rename(self._run / path)
        return True

    def _set_aside(self, path: str) -> None:
        """The log on the node is another one now: keep what is here under another name."""
        here = self._run / path
        if here.is_symlink() or not here.is_file() or not here.stat().st_size:
            return
        names = [f"{path}.before-{number}" for number in range(1, self._limits.replaced_logs + 1)]
        free = next((name for name in names if not (self._run / name).exists()), names[-1])
        here.rename(self._run / free)

    def _make_folders(self, path: str) -> None:
        """Those above `path`. OSError where one is a link, whoever put it there."""
        folder = self._run
        for part in path.split("/")[:-1]:
            folder = folder / part
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if folder.is_symlink():
                raise OSError(errno.ELOOP, "a link", str(folder))

    @contextlib.contextmanager
    def _opened(self, path: str, flags: int) -> Iterator[int]:
        """A descriptor of a plain file. OSError for links and anything else."""
        # Not blocking: opening a pipe would wait for its other end.
        safely = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self._run / path, os.O_RDWR | safely | flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a plain file", path)
            yield descriptor
        finally:
            os.close(descriptor)

    def _need_room(self, size: int) -> None:
        """OSError unless the disk has room beside what is reserved."""
        found, kept = os.statvfs(self._run), self._limits.reserve_bytes
        free = found.f_bavail * found.f_frsize
        if kept and free < kept + size:
            text = f"its disk has {free >> 20} MiB left, {kept >> 20} MiB are kept for the launcher"
            raise OSError(errno.ENOSPC, text)

    def _pause(self, error: OSError) -> None:
        self.problem = f"the run folder cannot be written: {error.strerror or error}"
        self._retry_at = time.monotonic() + self._limits.retry_s

    # --- what may be written ---------------------------------------------------------------------------------------

    def _is_allowed(self, path: str) -> bool:
        """Whether the node may write `path`."""
        if path in self._known:
            return True
        folder, _, name = path.rpartition("/")
        is_name = _NAME.fullmatch(name) is not None and not _ASIDE.fullmatch(name)
        is_own = (is_name and folder in (self._logs, self._facts)) or _TRACE.fullmatch(path) is not None
        is_leads = (is_name and folder == "tensorboard") or path in (*LEAD_LOGS, *LEAD_WHOLE)
        if not (is_own or (self._lead and is_leads)) or len(self._known) >= self._limits.files:
            return False
        self._known.add(path)
        return True

    def _is_log(self, path: str) -> bool:
        """Whether `path` grows by offset; JSON files are replaced whole."""
        name = path.rpartition("/")[2]
        return not (name.endswith((".json", ".part")) or _ASIDE.fullmatch(name))


def _read_heads(heads: Any) -> Iterator[_Head]:
    if not isinstance(heads, list):
        raise StrangeAnswerError("its list of files makes no sense")
    for head in heads:
        offset, count = integer(head, "offset"), integer(head, "bytes")
        if offset is None or count is None or not isinstance(head.get("path"), str):
            raise StrangeAnswerError("it sends a piece that makes no sense")
        yield _Head(head["path"], offset, count, integer(head, "size"), head.get("anew") is True)


def _files_in(folder: Path) -> list[Path]:
    if folder.is_symlink() or not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
