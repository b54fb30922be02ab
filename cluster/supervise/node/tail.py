"""What is new in the files of one node's run folder, in pieces of bounded size.

Logs only grow: they are followed by offset. Other files are replaced as a whole: they are read again when time stamp,
size or inode changed. What is neither a plain file nor of a known kind is not looked at.
"""

import os
import re
import stat
from typing import Any, Optional, Union

from cluster.supervise.node.folder import NodeFiles

PIECE_BYTES = 64 << 10
_MAX_FILES = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_LOGS = (".log", ".stacks")
_LEAD_LOGS = ("metrics.jsonl", "events.jsonl")
_LEAD_WHOLE = ("run.json", "summary.json", "tokenizer.json")
_TRACES, _CURVES = "profile/", "tensorboard/"
_STATE_WHOLE = ("supervisor.json", "health.json", "stacks_done.json", "outcome.json")

# {path, offset, bytes} of a piece; anew: a log that was begun anew; size: of a file that is replaced, when it is whole.
Piece = tuple[dict[str, Any], bytes]


class GrowingFile:
    """A log: what was sent is its beginning, up to `offset`."""

    def __init__(self, root: str, path: str, offset: int) -> None:
        self._path, self._offset = path, offset
        self._full = os.path.join(root, path)
        self._inode: Optional[int] = None

    def next(self, size: int) -> Optional[Piece]:
        """The next piece, empty where a file begins so; None when there is nothing new."""
        opened = open_plain(self._full)
        if opened is None:
            return None
        descriptor, status = opened
        try:
            anew = status.st_size < self._offset or self._inode not in (None, status.st_ino)
            offset = 0 if anew else self._offset
            if status.st_size == offset and not (anew or (self._inode is None and not offset)):
                self._inode = status.st_ino
                return None
            data = os.pread(descriptor, size, offset)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        self._inode, self._offset = status.st_ino, offset + len(data)
        return {"path": self._path, "offset": offset, "bytes": len(data), **({"anew": True} if anew else {})}, data


class ReplacedFile:
    """A file that others replace, sent in pieces from one open descriptor, so that they fit together."""

    def __init__(self, root: str, path: str) -> None:
        self._path, self._full = path, os.path.join(root, path)
        self._stamp: Any = None
        self._open: Optional[int] = None
        self._offset = self._size = 0

    def next(self, size: int) -> Optional[Piece]:
        """The next piece of its present content; None when all of that was sent."""
        if self._open is None and not self._look():
            return None
        assert self._open is not None
        try:
            data = os.pread(self._open, min(size, self._size - self._offset), self._offset)
        except OSError:
            data = b""
        head = {"path": self._path, "offset": self._offset, "bytes": len(data), "size": self._size}
        self._offset += len(data)
        if not data or self._offset >= self._size:
            os.close(self._open)
            self._open = None
        return head, data

    def _look(self) -> bool:
        """Whether it changed; then it is open."""
        opened = open_plain(self._full)
        if opened is None:
            return False
        descriptor, status = opened
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp == self._stamp:
            os.close(descriptor)
            return False
        self._stamp, self._open, self._offset, self._size = stamp, descriptor, 0, status.st_size
        return True


class NodeTail:
    """All files of node `node` that a launcher copies. `lead`: also those that rank 0 writes."""

    def __init__(self, folder: str, node: str, lead: bool, offsets: dict[str, int]) -> None:
        self._files, self._lead, self._offsets = NodeFiles(folder, node), lead, offsets
        self._known: dict[str, Union[GrowingFile, ReplacedFile]] = {}
        self._served = 0

    def take(self, budget: int) -> tuple[list[dict[str, Any]], bytes]:
        """Heads and data of what is new, at most `budget` bytes. No file holds up another: each goes on in its turn."""
        self._discover()
        files = list(self._known.values())
        waiting = files[self._served :] + files[: self._served]
        heads: list[dict[str, Any]] = []
        parts: list[bytes] = []
        while waiting and budget > 0:
            more = []
            for file in waiting:
                if budget <= 0:
                    break
                piece = file.next(min(PIECE_BYTES, budget))
                self._served = (self._served + 1) % len(files)
                if piece is not None:
                    heads.append(piece[0])
                    parts.append(piece[1])
                    budget -= len(piece[1])
                    more.append(file)
            waiting = more
        return heads, b"".join(parts)

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
        for path in replaced:
            if path not in self._known and len(self._known) < _MAX_FILES:
                self._known[path] = ReplacedFile(files.folder, path)
        for path in growing:
            if path not in self._known and len(self._known) < 2 * _MAX_FILES:
                self._known[path] = GrowingFile(files.folder, path, self._offsets.get(path, 0))


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
