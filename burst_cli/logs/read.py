"""Lines of log files in bounded memory: from the end backwards, and as they grow.

Nothing here trusts a log: a line may have no end, a file may shrink, vanish or grow faster than anybody reads. Of every
line at most KEEP_BYTES are held; how much it has beyond is counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

KEEP_BYTES = 16 * 1024
BLOCK_BYTES = 256 * 1024
LINE_BLOCK_BYTES = 32 * 1024  # where lines are cut: one block of every file may be held at once


class Line(NamedTuple):
    """One line without its end; `cut_bytes` is what it has beyond KEEP_BYTES."""

    text: bytes
    cut_bytes: int = 0


class LineCutter:
    """Cuts blocks into lines; what follows the last line end waits for the next block."""

    def __init__(self) -> None:
        self._rest = b""
        self._cut_bytes = 0

    def feed(self, block: bytes) -> Iterator[Line]:
        """The lines that `block` completes, one by one; all of them must be taken before the next block."""
        begin = 0
        while (end := block.find(b"\n", begin)) >= 0:
            if self._rest:
                self._extend(block[begin:end])
                yield from self.flush()
            else:
                yield _kept(block[begin:end])
            begin = end + 1
        self._extend(block[begin:])

    def flush(self) -> list[Line]:
        """The last line when it has no end; nothing else."""
        line = Line(self._rest, self._cut_bytes)
        self._rest, self._cut_bytes = b"", 0
        return [line] if line.text else []

    @property
    def held_bytes(self) -> int:
        """How long the line is so far that waits for its end."""
        return len(self._rest) + self._cut_bytes

    def _extend(self, more: bytes) -> None:
        room = KEEP_BYTES - len(self._rest)
        self._rest += more[:room]
        self._cut_bytes += max(0, len(more) - room)


def tail_offset(path: Path, count: int) -> int:
    """Where the last `count` lines of a file begin, found from its end; 0 when it has fewer, or is not there."""
    size = path.stat().st_size if path.is_file() else 0
    begins = (end for end in _line_ends(path) if end != size)  # the line end behind the last line begins no line
    return next(islice(begins, count - 1, None), 0) if count > 0 else size


def complete_end(path: Path) -> int:
    """The offset behind the last line end; 0 when there is none."""
    return next(_line_ends(path), 0)


def read_lines(path: Path, offset: int = 0, end: int | None = None) -> Iterator[Line]:
    """The lines of a file from `offset` to `end` (None: to where it ends now); none when it cannot be read."""
    cutter = LineCutter()
    for block in _blocks(path, offset, end, LINE_BLOCK_BYTES):
        yield from cutter.feed(block)
    yield from cutter.flush()


class LogFollower:
    """A log from `offset` on, as it grows; a file that was replaced or has shrunk begins anew.

    Only lines for which `matches` holds are given; among those that are passed over unread nobody looks.
    """

    def __init__(self, path: Path, offset: int = 0, matches: Callable[[Line], bool] = lambda line: True) -> None:
        self.path, self.offset = path, offset
        self._matches = matches
        self._cutter = LineCutter()
        self._inode: int | None = None
        self._is_torn = False  # the place is within a line whose beginning was passed over

    def poll(self, most: int) -> tuple[Iterator[Line], int]:
        """(the lines that are new, the bytes before them that were passed over): the last `most` bytes are read.

        Reads nothing while nothing has changed. All lines must be taken before the next call: a flood of short ones is
        cut as it is taken, because as a list it would need fifty times its bytes.
        """
        try:
            facts = self.path.stat()
        except OSError:
            return iter(()), 0
        before: list[Line] = []
        if (self._inode is not None and facts.st_ino != self._inode) or facts.st_size < self.offset:
            before = self.flush()
            self.offset, self._is_torn = 0, False
        self._inode = facts.st_ino
        skipped = max(0, facts.st_size - most - self.offset)
        if skipped:
            self.offset += skipped
            skipped += self._cutter.held_bytes
            self._cutter, self._is_torn = LineCutter(), True
        new = b"".join(_blocks(self.path, self.offset, facts.st_size))
        self.offset += len(new)
        if self._is_torn:
            end = new.find(b"\n") + 1
            self._is_torn = end == 0
            skipped += end or len(new)
            new = new[end:] if end else b""
        return filter(self._matches, chain(before, self._cutter.feed(new))), skipped

    def flush(self) -> list[Line]:
        """The last line, when the file ended without a line end."""
        return list(filter(self._matches, self._cutter.flush()))


def _kept(text: bytes) -> Line:
    return Line(text) if len(text) <= KEEP_BYTES else Line(text[:KEEP_BYTES], len(text) - KEEP_BYTES)


def _blocks(path: Path, offset: int, end: int | None, size: int = BLOCK_BYTES) -> Iterator[bytes]:
    """The bytes from `offset` to `end`; the file is open only while a block is read, because there may be thousands."""
    while end is None or offset < end:
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                block = file.read(size if end is None else min(size, end - offset))
        except OSError:
            return
        if not block:
            return
        offset += len(block)
        yield block


def _line_ends(path: Path) -> Iterator[int]:
    """The offsets behind the line ends of a file, the last one first."""
    try:
        with path.open("rb") as file:
            position = file.seek(0, os.SEEK_END)
            while position > 0:
                begin = max(0, position - BLOCK_BYTES)
                file.seek(begin)
                block = file.read(position - begin)
                position, place = begin, len(block)
                while (place := block.rfind(b"\n", 0, place)) >= 0:
                    yield begin + place + 1
    except OSError:
        return
