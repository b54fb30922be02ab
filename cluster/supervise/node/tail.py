"""What is new in the files of one node's run folder, in pieces of bounded size.

Logs only grow: they are followed by offset. Other files are replaced as a whole: they are read again when time stamp,
size or inode changed. What is neither a plain file nor of a known kind is not looked at.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

from cluster.supervise.node.folder import NodeFiles

PIECE_BYTES = 64 << 10
WHOLE_BYTES = 1 << 20  # a replaced file up to this size travels as one text
_MAX_FILES = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_LOGS = (".log", ".stacks")
_LEAD_LOGS = ("metrics.jsonl", "events.jsonl")
_LEAD_WHOLE = ("run.json", "summary.json", "tokenizer.json")
_TRACES, _CURVES = "profile/", "tensorboard/"
_STATE_WHOLE = ("supervisor.json", "health.json", "stacks_done.json", "outcome.json")


class Piece(NamedTuple):
    """Bytes of a followed file. begins: they are the first of a new stream `number`.

    replace: the stream stands in the place of what was there (`size`: its length, None for a log that goes on).
    """

    path: str
    number: int
    offset: int
    data: bytes
    begins: bool
    replace: bool
    size: Optional[int]


class Whole(NamedTuple):
    """A small file as it is now."""

    path: str
    data: bytes


class Streams:
    """Hands out numbers of streams, each once."""

    def __init__(self) -> None:
        self.next = 0

    def new(self) -> int:
        """A number that was never used."""
        self.next += 1
        return self.next - 1


class GrowingFile:
    """A log: what was sent is its beginning, up to `offset`."""

    def __init__(self, root: str, path: str, offset: int, streams: Streams) -> None:
        self.path, self.offset = path, offset
        self._full, self._streams = os.path.join(root, path), streams
        self._number: Optional[int] = None
        self._inode: Optional[int] = None
        self._replace = False

    @property
    def exists(self) -> bool:
        """Whether it was ever seen."""
        return self._inode is not None

    def next(self) -> Optional[Piece]:
        """The next piece; None when there is nothing new."""
        opened = open_plain(self._full)
        if opened is None:
            return None
        descriptor, status = opened
        try:
            if status.st_size < self.offset or self._inode not in (None, status.st_ino):
                self.offset, self._number, self._replace = 0, None, True  # begun anew, by another attempt
            self._inode = status.st_ino
            if status.st_size <= self.offset and not (self._replace and self._number is None):
                return None
            data = os.pread(descriptor, PIECE_BYTES, self.offset)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        begins = self._number is None
        number = self._number = self._streams.new() if self._number is None else self._number
        piece = Piece(self.path, number, self.offset, data, begins, begins and self._replace, None)
        self._replace = self._replace and not begins
        self.offset += len(data)
        return piece


class ReplacedFile:
    """A file that others replace. A big one is sent in pieces from one open descriptor, so that they fit together."""

    def __init__(self, root: str, path: str, streams: Streams) -> None:
        self.path = path
        self._full, self._streams = os.path.join(root, path), streams
        self._stamp: Any = None
        self._open: Optional[int] = None
        self._number = self._offset = self._size = 0

    def next(self) -> "Optional[Any]":
        """A `Whole`, or the next `Piece` of a big file; None when it is as it was."""
        if self._open is None:
            whole = self._look()
            if whole is not None or self._open is None:
                return whole
        descriptor = self._open
        assert descriptor is not None
        with contextlib.suppress(OSError):
            data = os.pread(descriptor, min(PIECE_BYTES, self._size - self._offset), self._offset)
            piece = Piece(self.path, self._number, self._offset, data, self._offset == 0, True, self._size)
            self._offset += len(data)
            if not data or self._offset >= self._size:
                self.close()
            return piece
        self.close()
        return None

    def close(self) -> None:
        """Let go of the file."""
        if self._open is not None:
            os.close(self._open)
            self._open = None

    def _look(self) -> Optional[Whole]:
        """The file if it changed and is small; a big one is opened for `next`."""
        opened = open_plain(self._full)
        if opened is None:
            return None
        descriptor, status = opened
        try:
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            if status.st_size <= WHOLE_BYTES:
                return Whole(self.path, os.pread(descriptor, WHOLE_BYTES, 0))
            self._open, self._number, self._offset, self._size = descriptor, self._streams.new(), 0, status.st_size
            descriptor = -1
            return None
        except OSError:
            return None
        finally:
            if descriptor >= 0:
                os.close(descriptor)


class NodeTail:
    """All files of node `node` that a launcher mirrors. `lead`: also those that rank 0 writes."""

    def __init__(self, folder: str, node: str, lead: bool, offsets: dict[str, int]) -> None:
        self._files, self._lead, self._offsets = NodeFiles(folder, node), lead, offsets
        self._streams = Streams()
        self._growing: dict[str, GrowingFile] = {}
        self._replaced: dict[str, ReplacedFile] = {}

    def round(self) -> Iterator[Any]:
        """At most one `Piece` or `Whole` of every file that has something new: no file holds up another."""
        self._discover()
        files: list[Any] = [*self._replaced.values(), *self._growing.values()]
        for file in files:
            item = file.next()
            if item is not None:
                yield item

    def sizes(self) -> dict[str, int]:
        """How far each log was sent, of those that there are."""
        return {path: file.offset for path, file in self._growing.items() if file.exists}

    def streams_used(self) -> int:
        """How many streams were begun."""
        return self._streams.next

    def _discover(self) -> None:
        files = self._files
        log_dir, state_dir = "logs/" + files.name, "nodes/" + files.name
        growing = [log_dir + "/" + name for name in _names(files.log_dir) if name.endswith(_LOGS)]
        growing.append(state_dir + "/supervisor.log")
        replaced = [log_dir + "/" + name for name in _names(files.log_dir) if name.endswith(".json")]
        replaced += [state_dir + "/" + name for name in _STATE_WHOLE]
        replaced += [_TRACES + name for name in _names(os.path.join(files.folder, _TRACES))]
        if self._lead:
            growing += [_CURVES + name for name in _names(os.path.join(files.folder, _CURVES))]
            growing, replaced = [*_LEAD_LOGS, *growing], [*_LEAD_WHOLE, *replaced]
        for path in growing:
            if path not in self._growing and len(self._growing) < _MAX_FILES:
                offset = self._offsets.get(path, 0)
                self._growing[path] = GrowingFile(files.folder, path, offset, self._streams)
        for path in replaced:
            if path not in self._replaced and len(self._replaced) < _MAX_FILES:
                self._replaced[path] = ReplacedFile(files.folder, path, self._streams)


def open_plain(path: str) -> "Optional[tuple[int, os.stat_result]]":
    """Descriptor and status of a plain file, which its user closes; None for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status
    os.close(descriptor)
    return None


def _names(folder: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
    except OSError:
        return []
