"""Which files hold what a run says: logs of ranks, or of what started them; chosen by node and rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from burst_cli.logs.read import Line
from cluster.remote_text import clean_text, one_line
from engine.config.errors import ConfigError
from engine.runs.folder import RunFolder

MAX_RANK = 10**6
REPLACEMENT = "\ufffd"
_BINARY = re.compile(r"[\x00-\x06\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]")
_RANK_LOG = re.compile(r"rank(\d{4,7})\.log")
_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


@dataclass(frozen=True)
class LogFile:
    """One log: of rank `rank` on `node`, or, with rank None, what `name` says there (torchrun, supervisor)."""

    path: Path
    node: str
    rank: int | None
    name: str

    @property
    def order(self) -> tuple[int, str, str]:
        """By rank; of those without one by node and name."""
        return (self.rank or 0, self.node, self.name)

    @property
    def label(self) -> str:
        """tb1:0 for a rank; tb1:torchrun, controller for others."""
        what = self.name if self.rank is None else str(self.rank)
        return f"{self.node}:{what}" if self.node else what


@dataclass(frozen=True)
class LogRequest:
    """What is wanted of which logs; None: all.

    ranks, nodes: what belongs to no rank or node is left out for none. launcher: what started the ranks says, in place
    of the ranks. tail: the last lines of each log.
    """

    ranks: frozenset[int] | None = None
    nodes: frozenset[str] | None = None
    launcher: bool = False
    grep: re.Pattern[str] | None = None
    tail: int | None = None

    def wants(self, log: LogFile) -> bool:
        """Whether the log is one of these."""
        is_of_rank = self.ranks is None or log.rank is None or log.rank in self.ranks
        return is_of_rank and (self.nodes is None or not log.node or log.node in self.nodes)

    def matches(self, line: Line) -> bool:
        """Whether the line, as it is shown, holds the pattern."""
        return self.grep is None or self.grep.search(visible_text(line.text)) is not None


def find_logs(run: RunFolder, wanted: LogRequest) -> list[LogFile]:
    """The logs that there are now, in order of ranks; new ones may appear while a run lives."""
    found = _launcher_logs(run) if wanted.launcher else _rank_logs(run)
    return sorted(filter(wanted.wants, found), key=lambda log: log.order)


def visible_text(raw: bytes) -> str:
    """A line as text that is safe to print: escapes are gone, what is no text is a replacement mark.

    Of a line that redraws itself by carriage returns the last drawing is left, as on a terminal.
    """
    if raw.isascii():
        text = raw.decode("ascii")
        if text.isprintable():
            return text
    else:
        text = raw.decode("utf-8", errors="replace")
    text = text.rstrip("\r")
    text = text[text.rfind("\r") + 1 :]
    return clean_text(_BINARY.sub(REPLACEMENT, text).replace("\t", "    "))


def parse_ranks(text: str) -> frozenset[int]:
    """Ranks as in 0,3-5. Raises ConfigError."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first or last > MAX_RANK:
            raise ConfigError(f"--ranks {text}: {part.strip()!r} is no rank; expected numbers and ranges such as 0,3-5")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def _rank_logs(run: RunFolder) -> Iterator[LogFile]:
    for path in run.path.glob("logs/*/rank*.log"):
        if match := _RANK_LOG.fullmatch(path.name):
            yield LogFile(path, one_line(path.parent.name, 100), int(match[1]), path.stem)


def _launcher_logs(run: RunFolder) -> Iterator[LogFile]:
    for pattern in ("controller.log", "logs/*/torchrun.log", "nodes/*/supervisor.log"):
        for path in run.path.glob(pattern):
            yield LogFile(path, one_line(path.parent.name, 100) if "/" in pattern else "", None, path.stem)
