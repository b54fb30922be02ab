"""Lines of log files in bounded memory: from the end backwards, and as they grow.

Nothing here trusts a log: a line may have no end, a file may shrink, vanish or grow faster than anybody reads. Of every
line at most KEEP_BYTES are held; how much it has beyond is counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

TAIL_BYTES = 16 * 1024
BLOCK_BYTES = 64 * 1024


class Line(NamedTuple):
    """One line without its end; `cut_bytes` is what it has beyond KEEP_BYTES."""

    text: bytes
    cut_bytes: int = 0


class LogReader:
    """The lines of a log from `offset` on, as it grows; a file that was replaced or has shrunk begins anew.

    Only lines for which `matches` holds are given. Lines are cut as they are taken, block by block: a flood of short
    ones would need fifty times its bytes as a list. So all of them must be taken before the next call.
    """

    def __init__(self, path: Path, offset: int = 0, matches: Callable[[Line], bool] = lambda line: True) -> None:
        self._path, self._offset, self._matches = path, offset, matches
        self._inode: int | None = None
        self._rest, self._cut_bytes = b"", 0  # of a line that has no end yet
        self._is_torn = False  # the place is within a line whose beginning was passed over

    def poll(self, most: int | None = None) -> tuple[Iterator[Line], int]:
        """(the whole lines that are new, the bytes before them that were passed over): the last `most` bytes are read.

        Reads nothing while nothing has changed, and nothing of a file that is not there.
        """
        try:
            facts = self._path.stat()
        except OSError:
            return iter(()), 0
        before: list[Line] = []
        if self._inode not in (None, facts.st_ino) or facts.st_size < self._offset:
            before, self._offset, self._is_torn = self.flush(), 0, False
        self._inode = facts.st_ino
        skipped = 0 if most is None else max(0, facts.st_size - most - self._offset)
        if skipped:
            self._offset += skipped
            skipped += len(self._rest) + self._cut_bytes
            self._rest, self._cut_bytes, self._is_torn = b"", 0, True
        if self._is_torn:
            skipped += self._pass_torn(facts.st_size)
        return chain(before, self._lines(facts.st_size)), skipped

    def flush(self) -> list[Line]:
        """The last line, when the file ended without a line end."""
        line = Line(self._rest, self._cut_bytes)
        self._rest, self._cut_bytes = b"", 0
        return [line] if line.text and self._matches(line) else []

    def to_end(self) -> Iterator[Line]:
        """The lines that there are now, a last one without its end too."""
        yield from self.poll()[0]
        yield from self.flush()

    def _lines(self, end: int) -> Iterator[Line]:
        while block := self._block(end):
            self._offset += len(block)
            begin = 0
            while (stop := block.find(b"\n", begin)) >= 0:
                self._extend(block[begin:stop])
                line = Line(self._rest, self._cut_bytes)
                self._rest, self._cut_bytes, begin = b"", 0, stop + 1
                if self._matches(line):
                    yield line
            self._extend(block[begin:])

    def _pass_torn(self, end: int) -> int:
        """How much of the line whose beginning was passed over is passed over now."""
        begin = self._offset
        while self._is_torn and (block := self._block(end)):
            stop = block.find(b"\n") + 1
            self._is_torn = stop == 0
            self._offset += stop or len(block)
        return self._offset - begin

    def _block(self, end: int) -> bytes:
        """Up to `end`; the file is open only while a block is read, because there may be thousands."""
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(self._offset)
                return file.read(max(0, min(BLOCK_BYTES, end - self._offset)))
        except OSError:
            return b""

    def _extend(self, more: bytes) -> None:
        room = TAIL_BYTES - len(self._rest)
        self._rest += more[:room]
        self._cut_bytes += max(0, len(more) - room)


def tail_offset(path: Path, count: int) -> int:
    """Where the last `count` lines of a file begin, found from its end; 0 when it has fewer, or is not there."""
    try:
        with path.open("rb") as file:
            begin = size = file.seek(0, os.SEEK_END)
            if count == 0:
                return size
            while begin > 0:
                stop, begin = begin, max(0, begin - BLOCK_BYTES)
                file.seek(begin)
                block = file.read(stop - begin)
                place = len(block)
                while (place := block.rfind(b"\n", 0, place)) >= 0:
                    count -= begin + place + 1 != size  # behind the last line end no line begins
                    if count == 0:
                        return begin + place + 1
    except OSError:
        pass
    return 0
