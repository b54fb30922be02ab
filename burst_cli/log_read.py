"""Lines of log files in bounded memory: from the end backwards, and as they grow.

Nothing here trusts a log: a line may have no end, a file may shrink, vanish or grow faster than anybody reads. Of every
line at most KEEP_BYTES are held; how much it has beyond is counted.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

KEEP_BYTES = 16 * 1024
BLOCK_BYTES = 256 * 1024
LINE_BLOCK_BYTES = 32 * 1024  # where lines are cut: one block of every file may be held at once
# Lines that are passed over are counted up to here; beyond, bytes are all that is said.
COUNT_BYTES = 256 * 2**20


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

    def _extend(self, more: bytes) -> None:
        room = KEEP_BYTES - len(self._rest)
        self._rest += more[:room]
        self._cut_bytes += max(0, len(more) - room)


def tail_offset(path: Path, count: int) -> int:
    """Where the last `count` lines of a file begin, found from its end; 0 when it has fewer, or is not there."""
    try:
        with path.open("rb") as file:
            return _tail_offset(file, count)
    except OSError:
        return 0


def match_offset(path: Path, count: int, matches: Callable[[Line], bool]) -> int:
    """Where the last `count` lines that match begin; the end of the file when none does."""
    found: deque[int] = deque(maxlen=max(count, 1))
    offset = 0
    for line in read_lines(path):
        if matches(line):
            found.append(offset)
        offset += len(line.text) + line.cut_bytes + 1
    return found[0] if found and count > 0 else offset


def read_lines(path: Path, offset: int = 0, end: int | None = None) -> Iterator[Line]:
    """The lines of a file from `offset` to `end` (None: to where it ends now); none when it cannot be read."""
    cutter = LineCutter()
    for block in _blocks(path, offset, end, LINE_BLOCK_BYTES):
        yield from cutter.feed(block)
    yield from cutter.flush()


def complete_end(path: Path) -> int:
    """The offset behind the last line end; 0 when there is none."""
    try:
        with path.open("rb") as file:
            position = file.seek(0, os.SEEK_END)
            while position > 0:
                begin = max(0, position - BLOCK_BYTES)
                file.seek(begin)
                found = file.read(position - begin).rfind(b"\n")
                if found >= 0:
                    return begin + found + 1
                position = begin
    except OSError:
        pass
    return 0


@dataclass(frozen=True)
class Budget:
    """How much of one file one look may bring."""

    size: int
    lines: int


@dataclass(frozen=True)
class Arrived:
    """What one look at a growing file gave: its newest lines, and how much before them was passed over.

    skipped_lines is None where so much was passed over that nobody counted.
    """

    lines: tuple[Line, ...] = ()
    skipped_lines: int | None = 0
    skipped_bytes: int = 0


class LogFollower:
    """A log from `offset` on, as it grows; a file that was replaced or has shrunk begins anew.

    Only lines for which `matches` holds are given; among those that are passed over unread nobody looks.
    """

    def __init__(
        self,
        path: Path,
        offset: int = 0,
        matches: Callable[[Line], bool] = lambda line: True,
        count_bytes: int = COUNT_BYTES,
    ) -> None:
        self.path, self.offset = path, offset
        self._matches, self._count_bytes = matches, count_bytes
        self._cutter = LineCutter()
        self._inode: int | None = None
        self._is_torn = False  # the place is within a line whose beginning was passed over

    def poll(self, budget: Budget) -> Arrived:
        """What is new, of which the last lines if it exceeds `budget`. Reads nothing while nothing has changed."""
        try:
            facts = self.path.stat()
        except OSError:
            return Arrived()
        lines: deque[Line] = deque(maxlen=budget.lines)
        if (self._inode is not None and facts.st_ino != self._inode) or facts.st_size < self.offset:
            lines.extend(self.flush())
            self.offset, self._is_torn = 0, False
        self._inode = facts.st_ino
        count: int | None = 0
        size = 0
        if self._is_torn or facts.st_size - self.offset > budget.size:
            count, size = self._skip_to(max(self.offset, facts.st_size - budget.size))
        arrived = len(lines)
        for block in _blocks(self.path, self.offset, facts.st_size):
            self.offset += len(block)
            for line in filter(self._matches, self._cutter.feed(block)):
                arrived += 1
                if len(lines) == budget.lines:
                    size += len(lines[0].text) + lines[0].cut_bytes + 1
                lines.append(line)
        return Arrived(tuple(lines), None if count is None else count + arrived - len(lines), size)

    def flush(self) -> tuple[Line, ...]:
        """The last line, when the file ended without a line end."""
        return tuple(filter(self._matches, self._cutter.flush()))

    def _skip_to(self, target: int) -> tuple[int | None, int]:
        """Move to the first line that begins behind `target`; (lines, bytes) that are passed over."""
        begin, self._cutter, self._is_torn = self.offset, LineCutter(), True
        is_counted = target - begin <= self._count_bytes
        count = sum(block.count(b"\n") for block in _blocks(self.path, begin, target)) if is_counted else 0
        self.offset = target
        for block in _blocks(self.path, target, None):
            end = block.find(b"\n")
            self.offset += len(block) if end < 0 else end + 1
            if end >= 0:
                count += 1
                self._is_torn = False
                break
        return count if is_counted else None, self.offset - begin


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


def _tail_offset(file: BinaryIO, count: int) -> int:
    end = file.seek(0, os.SEEK_END)
    if count <= 0:
        return end
    position, wanted = end, count
    while position > 0:
        begin = max(0, position - BLOCK_BYTES)
        file.seek(begin)
        block = file.read(position - begin)
        # The line end behind the last line begins no line.
        scan = len(block) - 1 if position == end and block.endswith(b"\n") else len(block)
        in_block = block.count(b"\n", 0, scan)
        if in_block < wanted:
            wanted -= in_block
            position = begin
            continue
        for _ in range(wanted):
            scan = block.rfind(b"\n", 0, scan)
        return begin + scan + 1
    return 0
