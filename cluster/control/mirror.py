"""The launcher's copy of one node's files, kept up from frames: logs grow by offset, other files are replaced whole.

The length of a log here is the offset from which it goes on, so a launcher that was killed at any moment loses nothing
and writes nothing twice. What a node sends is believed only inside its own folders:

    logs/<node>/NAME   nodes/<node>/NAME   run.json -> nodes/<node>/run.json
    metrics.jsonl events.jsonl summary.json tokenizer.json    of the node with rank 0
    tensorboard/NAME                               of the same
    profile/rank<NNNN>.json
    nodes/<node>/mirror.log                        ours: what was strange; locked by the one who mirrors
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster.control.owned_files import OwnedFiles, temporary_of, write_all
from cluster.errors import ClusterError
from cluster.remote_text import one_line
from engine.run.records import utc_now
from engine.runs import RunFolder

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_TRACE = re.compile(r"profile/rank\d{4,9}\.json")
_ASIDE = re.compile(r".*\.before-\d+")
_LEAD_LOGS = ("metrics.jsonl", "events.jsonl")
_LEAD_FILES = (*_LEAD_LOGS, "summary.json", "tokenizer.json")
_OWN_LOG = "mirror.log"
_IN_THE_WAY = (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ENXIO)


class MirrorError(ClusterError):
    """A node sent what makes no sense; the connection is not worth keeping."""


class MirrorGapError(MirrorError):
    """What came does not go on where the copy ends: the node must be asked again, with `Mirror.offsets()`."""


@dataclass(frozen=True)
class MirrorLimits:
    """What one node may take of the launcher's machine.

    reserve_bytes: of the disk, left for what the launcher itself must write, looked at every second or look_bytes;
    0: nothing.
    retry_s: between two looks at a full disk.
    """

    files: int = 4096
    file_bytes: int = 64 << 20  # of one that is replaced; logs have no limit but the disk
    replaced_logs: int = 9
    own_log_bytes: int = 64 << 10
    open_files: int = 128
    reserve_bytes: int = 32 << 20
    look_bytes: int = 4 << 20
    retry_s: float = 2.0


@dataclass
class _Blob:
    """What the frames of one number are: bytes of a log, or the next content of a file (`size` bytes of it)."""

    path: str
    size: int | None = None
    is_done: bool = False


class Mirror:
    """The copy of one node's files in the run folder `run`; for one thread.

    problem: why nothing is written now (the disk is full, another process mirrors); what comes then is dropped, and
    MirrorGapError follows as soon as it can go on. lead: whether the node has rank 0.
    """

    def __init__(self, run: Path, node: str, *, lead: bool, limits: MirrorLimits = MirrorLimits()) -> None:
        name = RunFolder(run).log_dir(node).name
        self._logs, self._facts = f"logs/{name}", f"nodes/{name}"
        self._lead, self._limits = lead, limits
        self._files = OwnedFiles(run)
        self._blobs: dict[int, _Blob | None] = {}
        self._known: set[str] = set()
        self._refused: set[str] = set()
        self._open: OrderedDict[str, int] = OrderedDict()
        self._own_log: int | None = None
        self._room_checked = (-1.0, 0)  # when, and how much was written since
        self._stuck: tuple[Callable[[], None], str] | None = None
        self._retry_at = 0.0
        self.problem: str | None = None

    # --- what there is ---------------------------------------------------------------------------------------------

    def offsets(self) -> dict[str, int]:
        """How far every log is here; whoever is asked to go on from there numbers blobs anew."""
        self._blobs.clear()
        self._pause_on_error(self._lock, "")
        for path in list(self._open):
            self._forget(path)
        found = {**self._files.sizes(self._logs), **self._files.sizes(self._facts)}
        logs = {path: size for path, size in found.items() if self._is_log(path)}
        if self._lead:
            sizes = {path: self._files.size(path) for path in _LEAD_LOGS}
            logs |= {path: size for path, size in sizes.items() if size is not None}
        return logs

    def has_all(self, sizes: Mapping[str, Any]) -> bool:
        """Whether every log that the node names has arrived whole. Raises MirrorGapError when one has not."""
        if self.problem is not None:
            return False
        for path, size in sizes.items():
            if not isinstance(path, str) or not isinstance(size, int):
                raise MirrorError("its list of sizes makes no sense")
            if not self._is_allowed(path) or not self._is_log(path) or path in self._refused:
                continue
            here = self._files.size(path)
            if here is None:
                self._attempt(partial(self._begin, path), path)  # of an empty log no frame comes
                here = 0
            if here > size:
                self._set_aside(path)
            if here != size:
                raise MirrorGapError(f"{path} has {here} bytes here and {size} there")
        return True

    # --- what comes ------------------------------------------------------------------------------------------------

    def announce(self, message: Mapping[str, Any]) -> None:
        """A message `log`: what the frames of a number will be."""
        number, path, size = message.get("number"), message.get("path"), message.get("size")
        if not isinstance(number, int) or not isinstance(path, str) or not 0 <= number < 1 << 16:
            raise MirrorError("it announces a log that makes no sense")
        path = self._place(path)
        if not self._is_allowed(path):
            self._blobs[number] = None
            return
        self._blobs[number] = blob = _Blob(path)
        if not message.get("replace"):
            return
        if self._is_log(path):
            self._attempt(lambda: self._set_aside(path), path)
        elif isinstance(size, int) and 0 <= size <= self._limits.file_bytes:
            blob.size = size
            self._forget(temporary_of(path))
            self._attempt(lambda: os.close(self._files.open_new(temporary_of(path))), path)
        else:
            self._note(f"{path}: too large to mirror")
            self._blobs[number] = None

    def data(self, number: int, offset: int, data: bytes) -> None:
        """Bytes of an announced blob. What is here already is skipped; MirrorGapError when something is missing."""
        if number not in self._blobs:
            raise MirrorError("it sends bytes of a log that it never announced")
        blob = self._blobs[number]
        if blob is None:
            return
        self._attempt(lambda: self._append(blob, offset, data), blob.path)

    def replace(self, path: Any, text: Any) -> None:
        """A message `file`: its whole content."""
        if not isinstance(path, str) or not isinstance(text, str):
            raise MirrorError("it sends a file that makes no sense")
        path = self._place(path)
        if self._is_allowed(path) and not self._is_log(path):
            body = text.encode("utf-8", errors="replace")
            self._attempt(lambda: self._write_whole(path, body), path)

    def retry(self) -> None:
        """Look whether a paused mirror can go on; raises MirrorGapError when it can."""
        if self._stuck is None or time.monotonic() < self._retry_at:
            return
        self._room_checked = (-1.0, 0)
        (stuck, path), self._stuck, self.problem = self._stuck, None, None
        self._pause_on_error(stuck, path)
        if self.problem is None:
            raise MirrorGapError("the copy can go on")

    def close(self) -> None:
        """Close all files, let others mirror."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._blobs.clear()
        if self._own_log is not None:
            os.close(self._own_log)
            self._own_log = None

    # --- writing ---------------------------------------------------------------------------------------------------

    def _append(self, blob: _Blob, offset: int, data: bytes) -> None:
        path = blob.path if blob.size is None else temporary_of(blob.path)
        descriptor = self._descriptor(path)
        here = os.fstat(descriptor).st_size
        if blob.is_done or offset + len(data) <= here:
            return
        if offset > here:
            raise MirrorGapError(f"{blob.path} ends at {here} here, what came begins at {offset}")
        if blob.size is not None and offset + len(data) > blob.size:
            raise MirrorError(f"{blob.path} is longer than announced")
        self._need_room(len(data))
        write_all(descriptor, memoryview(data)[here - offset :])
        if blob.size is not None and offset + len(data) == blob.size:
            blob.is_done = True
            self._forget(path)
            self._files.rename(path, blob.path)

    def _write_whole(self, path: str, body: bytes) -> None:
        self._need_room(len(body))
        self._files.replace(path, body)

    def _need_room(self, size: int) -> None:
        """OSError unless the disk has room beside what is reserved."""
        checked, written = self._room_checked
        if written + size > self._limits.look_bytes or time.monotonic() > checked + 1.0:
            free, kept = self._files.free_bytes(), self._limits.reserve_bytes
            if kept and free < kept + size:
                text = f"its disk has {free >> 20} MiB left, {kept >> 20} MiB are kept for the launcher"
                raise OSError(errno.ENOSPC, text)
            checked, written = time.monotonic(), 0
        self._room_checked = (checked, written + size)

    def _attempt(self, work: Callable[[], None], path: str) -> None:
        """Do it unless paused; pause when the disk refuses."""
        if path in self._refused:
            return
        if self.problem is not None:
            self.retry()
            return
        self._pause_on_error(work, path)

    def _pause_on_error(self, work: Callable[[], None], path: str) -> None:
        try:
            work()
        except OSError as error:
            said = error.strerror or str(error)
            if path and error.errno in _IN_THE_WAY:
                self._refused.add(path)
                self._note(f"{path} cannot be mirrored, for something else has its name here: {said}")
                return
            self.problem = f"the run folder cannot be written: {said}"
            self._stuck, self._retry_at = (work, path), time.monotonic() + self._limits.retry_s

    def _descriptor(self, path: str) -> int:
        descriptor = self._open.pop(path, None)
        if descriptor is None:
            descriptor = self._files.open_append(path)
        self._open[path] = descriptor
        if len(self._open) > self._limits.open_files:
            _, oldest = self._open.popitem(last=False)
            os.close(oldest)
        return descriptor

    def _begin(self, path: str) -> None:
        """Make the file of a log, empty."""
        self._descriptor(path)

    def _forget(self, path: str) -> None:
        if (descriptor := self._open.pop(path, None)) is not None:
            os.close(descriptor)

    def _set_aside(self, path: str) -> None:
        """The file on the node is another one now: keep what is here under another name, begin anew."""
        if not self._files.size(path):
            return
        self._forget(path)
        names = [f"{path}.before-{number}" for number in range(1, self._limits.replaced_logs + 1)]
        free = next((name for name in names if self._files.size(name) is None), names[-1])
        self._files.rename(path, free)
        self._note(f"{path} was replaced or became shorter on the node; what was here until then is {free}")

    # --- what may be written ---------------------------------------------------------------------------------------

    def _place(self, path: str) -> str:
        """Where a file of the node lies here."""
        return f"{self._facts}/run.json" if path == "run.json" else path

    def _is_allowed(self, path: str) -> bool:
        """Whether the node may write `path`; what it may not is noted once and never written."""
        if path in self._known:
            return True
        folder, _, name = path.rpartition("/")
        is_own = folder in (self._logs, self._facts) and _NAME.fullmatch(name) and not _is_ours(name)
        is_own = is_own or _TRACE.fullmatch(path) is not None
        is_leads = path in _LEAD_FILES or (folder == "tensorboard" and _NAME.fullmatch(name) and not _is_ours(name))
        if not is_own and not (self._lead and is_leads):
            self._note(f"refused, for a node may not write it: {one_line(path, 200)!r}")
            return False
        if len(self._known) >= self._limits.files:
            self._note(f"refused, for there are {self._limits.files} files already: {path}")
            return False
        self._known.add(path)
        return True

    def _is_log(self, path: str) -> bool:
        """Whether `path` grows by offset; JSON files are replaced whole."""
        name = path.rpartition("/")[2]
        return not (name.endswith((".json", ".part")) or _is_ours(name))

    def _lock(self) -> None:
        """One process at a time may write: two would write everything twice."""
        if self._own_log is not None:
            return
        descriptor = self._files.open_append(f"{self._facts}/{_OWN_LOG}")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OSError(errno.EAGAIN, "another process of this machine mirrors this node") from None
        except OSError:
            pass  # a file system without locks
        self._own_log = descriptor

    def _note(self, text: str) -> None:
        """Leave a line in our own log, as long as that is short."""
        if self._own_log is None or os.fstat(self._own_log).st_size > self._limits.own_log_bytes:
            return
        with contextlib.suppress(OSError):
            os.write(self._own_log, f"{utc_now()} {text}\n".encode())


def _is_ours(name: str) -> bool:
    """Whether only the mirror itself makes files of this name."""
    return name == _OWN_LOG or _ASIDE.fullmatch(name) is not None
