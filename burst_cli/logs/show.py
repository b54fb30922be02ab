"""Lines of logs as people read them: `host:rank | line`, one colour per rank, nothing that a terminal would obey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from burst_cli.figures import binary_bytes, fold_names, fold_numbers
from burst_cli.logs.files import LogFile, visible_text
from burst_cli.logs.read import Line

SCREEN_CHARACTERS = 400  # of one line on a terminal
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_DIM, _RESET = "\x1b[2m", "\x1b[0m"


def label(logs: Sequence[LogFile]) -> str:
    """tb[1-2]:0-3 for the logs of four ranks on two nodes; tb1:torchrun, controller for others."""
    nodes = fold_names([log.node for log in logs if log.node])
    ranks = [log.rank for log in logs if log.rank is not None]
    what = fold_numbers(ranks) if ranks else ",".join(dict.fromkeys(log.name for log in logs))
    return f"{nodes}:{what}" if nodes else what


class LogPrinter:
    """Writes folded lines of `logs`, which may grow while it lives; positions in it are what `line` is given."""

    def __init__(self, out: TextIO, logs: list[LogFile], *, is_terminal: bool, has_colour: bool) -> None:
        self._out, self.logs = out, logs
        self._is_terminal, self._has_colour = is_terminal, has_colour
        self._labels: dict[tuple[int, ...], str] = {}
        self._width = max((len(label([log])) for log in logs), default=0)

    def line(self, line: Line, positions: tuple[int, ...]) -> None:
        """One line that the logs at `positions` say."""
        text, cut_bytes = visible_text(line.text), line.cut_bytes
        if self._is_terminal and len(text) > SCREEN_CHARACTERS:
            more = len(text) - SCREEN_CHARACTERS + cut_bytes
            text = f"{text[:SCREEN_CHARACTERS]}… (+{more:,} characters)"
        elif cut_bytes:
            text = f"{text}… (+{binary_bytes(cut_bytes)})"
        self._out.write(f"{self._prefix(positions)} {text}\n")

    def skipped(self, size: int, position: int) -> None:
        """Say how much of a log was left out, and where it is."""
        text = f"... {binary_bytes(size)} not shown, see {self.logs[position].path}"
        self._out.write(f"{self._prefix((position,))} {f'{_DIM}{text}{_RESET}' if self._has_colour else text}\n")

    def flush(self) -> None:
        """Have all of it reach the reader."""
        self._out.flush()

    def _prefix(self, positions: tuple[int, ...]) -> str:
        if positions not in self._labels:
            if len(self._labels) > 1000:
                self._labels.clear()
            self._labels[positions] = self._painted(positions)
        return self._labels[positions]

    def _painted(self, positions: tuple[int, ...]) -> str:
        logs = [self.logs[position] for position in positions]
        text = label(logs)
        text = f"{text:<{self._width}} |"
        if not self._has_colour:
            return text
        first = logs[0].rank if logs[0].rank is not None else positions[0]
        colour = f"\x1b[{_COLOURS[first % len(_COLOURS)]}m" if len(positions) == 1 else "\x1b[1m"
        return f"{colour}{text}{_RESET}"
