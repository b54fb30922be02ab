"""Which files hold what a run says: logs of ranks, or of what started them; chosen by node and rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.remote_text import one_line
from engine.errors import ConfigError
from engine.runs import RunFolder

_RANK_LOG = re.compile(r"rank(\d{4,7})\.log")
_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")
MAX_RANK = 10**6


@dataclass(frozen=True)
class LogFile:
    """One log: of rank `rank` on `node`, or, with rank None, what `name` says there (torchrun, supervisor)."""

    path: Path
    node: str
    rank: int | None
    name: str

    @property
    def order(self) -> tuple[int, str, str]:
        """Ranks first, by number; then by node and name."""
        return (MAX_RANK + 1 if self.rank is None else self.rank, self.node, self.name)


@dataclass(frozen=True)
class Selection:
    """Which logs are wanted; None: all. launcher: those of what started the ranks in place of the ranks'."""

    ranks: frozenset[int] | None = None
    nodes: frozenset[str] | None = None
    launcher: bool = False


def find_logs(run: RunFolder, wanted: Selection) -> list[LogFile]:
    """The logs that there are now, in order of ranks; new ones may appear while a run lives."""
    found = _launcher_logs(run) if wanted.launcher else _rank_logs(run)
    return sorted(
        (log for log in found if _is_wanted(log, wanted)),
        key=lambda log: log.order,
    )


def parse_ranks(text: str) -> frozenset[int]:
    """Ranks as in 0,3-5. Raises ConfigError."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if match is None or last < first or last > MAX_RANK:
            raise ConfigError(f"--ranks {text}: {part.strip()!r} is no rank; expected numbers and ranges such as 0,3-5")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def parse_node_names(text: str) -> frozenset[str]:
    """Names as in tb[1-2]. Raises ConfigError."""
    from cluster.access.nodes import parse_nodes

    return frozenset(parse_nodes(text, "--nodes").names)


def fold_numbers(numbers: Iterable[int]) -> str:
    """0,3-5 for 0 3 4 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def fold_names(names: Sequence[str]) -> str:
    """tb[1-4] for tb1 tb2 tb3 tb4; names that are no node names are listed."""
    unique = list(dict.fromkeys(names))
    if len(unique) < 2:
        return "".join(unique)
    from cluster.access.nodes import fold_nodes

    try:
        return fold_nodes(unique)
    except Exception:  # the library has no common error for names that it does not understand
        return ",".join(unique)


def _rank_logs(run: RunFolder) -> Iterable[LogFile]:
    for path in (run.path / "logs").glob("*/rank*.log"):
        match = _RANK_LOG.fullmatch(path.name)
        if match:
            yield LogFile(path, one_line(path.parent.name, 100), int(match[1]), path.stem)


def _launcher_logs(run: RunFolder) -> Iterable[LogFile]:
    if (run.path / "controller.log").is_file():
        yield LogFile(run.path / "controller.log", "", None, "controller")
    for pattern, name in (("logs/*/torchrun.log", "torchrun"), ("nodes/*/supervisor.log", "supervisor")):
        for path in run.path.glob(pattern):
            yield LogFile(path, one_line(path.parent.name, 100), None, name)


def _is_wanted(log: LogFile, wanted: Selection) -> bool:
    if wanted.ranks is not None and log.rank is not None and log.rank not in wanted.ranks:
        return False
    return wanted.nodes is None or not log.node or log.node in wanted.nodes
