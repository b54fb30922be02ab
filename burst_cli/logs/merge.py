"""Lines of many logs as one stream in which what several ranks say alike appears once. Pure, in bounded memory.

The order within each log is kept. Logs carry no common clock, so the order between them is free, and it is chosen such
that equal lines meet: a line waits while another log has the same line further down. Otherwise the stream stays with
the log it is in, so that a traceback is not torn apart.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from burst_cli.logs.read import Line

WINDOW_LINES = 128
WINDOW_BYTES = 64 * 1024


def merge_folded(logs: Sequence[Iterable[Line]]) -> Iterator[tuple[Line, tuple[int, ...]]]:
    """Every line of `logs` with the positions of the logs that say it here, ascending.

    At most WINDOW_LINES lines or WINDOW_BYTES of each log (one line at least) are held, so equal lines that are further
    apart than this are not folded.
    """
    windows = [_Window(log) for log in logs]
    shared: Counter[Line] = Counter()  # line -> in how many windows it is
    heads: dict[Line, set[int]] = {}  # line -> the logs that it is next in
    alive = [index for index, window in enumerate(windows) if _advance(index, window, shared, heads)]
    current = alive[0] if alive else -1
    while alive:
        line = _next_line(windows, alive, current, shared, heads)
        group = tuple(sorted(heads.pop(line)))
        yield line, group
        ended = set()
        for index in group:
            windows[index].pop(shared)
            if not _advance(index, windows[index], shared, heads):
                ended.add(index)
        if ended:
            alive = [index for index in alive if index not in ended]
        if current not in group or current in ended:
            current = next((index for index in group if index not in ended), alive[0] if alive else -1)


def _next_line(
    windows: Sequence[_Window], alive: Sequence[int], current: int, shared: Counter[Line], heads: dict[Line, set[int]]
) -> Line:
    """The head that no other log says later; if there is none, the one that most logs say now."""
    line = windows[current].head
    if shared[line] == len(heads[line]):
        return line
    for index in alive:
        line = windows[index].head
        if shared[line] == len(heads[line]):
            return line
    return max(heads, key=lambda line: (len(heads[line]), -min(heads[line])))


def _advance(index: int, window: _Window, shared: Counter[Line], heads: dict[Line, set[int]]) -> bool:
    """Fill the window and register its head; False when the log has ended."""
    window.fill(shared)
    if not window.lines:
        return False
    heads.setdefault(window.head, set()).add(index)
    return True


class _Window:
    """The next lines of one log."""

    def __init__(self, log: Iterable[Line]) -> None:
        self._log = iter(log)
        self._has_more = True
        self._bytes = 0
        self._own: Counter[Line] = Counter()
        self.lines: deque[Line] = deque()

    @property
    def head(self) -> Line:
        return self.lines[0]

    def fill(self, shared: Counter[Line]) -> None:
        """Read ahead as far as the bounds allow; half a window is enough, so that it is not read line by line."""
        if len(self.lines) > WINDOW_LINES // 2 or (self.lines and self._bytes > WINDOW_BYTES // 2):
            return
        while self._has_more and len(self.lines) < WINDOW_LINES and (not self.lines or self._bytes < WINDOW_BYTES):
            line = next(self._log, None)
            if line is None:
                self._has_more = False
                return
            self.lines.append(line)
            self._bytes += len(line.text)
            self._own[line] += 1
            if self._own[line] == 1:
                shared[line] += 1

    def pop(self, shared: Counter[Line]) -> None:
        line = self.lines.popleft()
        self._bytes -= len(line.text)
        self._own[line] -= 1
        if not self._own[line]:
            del self._own[line]
            shared[line] -= 1
            if not shared[line]:
                del shared[line]
