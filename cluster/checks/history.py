"""Which nodes were bad in earlier checks: one line per check in nodes.jsonl, so that a flapping node is seen as one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.access.nodes import fold_nodes, parse_nodes
from cluster.checks.finding import Verdict
from cluster.errors import HostsError
from engine.run.records import append_json_line, read_json_lines, utc_now

WINDOW = 5
MAX_BYTES = 1 << 20
_LOOK_BACK = 100  # checks of the same cluster: a node that was not part of these is new
_BAD = frozenset({Verdict.FAIL.value, Verdict.UNKNOWN.value})


@dataclass(frozen=True)
class Record:
    """How often a node was not usable (`failed`) in the last `of` checks that it was part of, the present one too."""

    failed: int
    of: int

    def __str__(self) -> str:
        return f"failed {self.failed} of the last {self.of} checks"


def history_path(environment: Mapping[str, str] = os.environ) -> Path:
    """~/.local/state/burst/nodes.jsonl; XDG_STATE_HOME moves it."""
    state = environment.get("XDG_STATE_HOME", "")
    base = Path(state) if Path(state).is_absolute() else Path("~/.local/state").expanduser()
    return base / "burst" / "nodes.jsonl"


def add_check(path: Path, cluster: str, verdicts: Mapping[str, Verdict], *, window: int = WINDOW) -> dict[str, Record]:
    """Append these verdicts to the history of `cluster`; the records of the nodes over the last `window` checks.

    Raises OSError when the file cannot be read or written. Two checks at once do not lose each other's lines.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(path):
        append_json_line(path, {"time": utc_now(), "cluster": cluster, "verdicts": _fold(verdicts)})
        if path.stat().st_size > MAX_BYTES:
            _halve(path)
        rows = read_json_lines(path)
    return records(rows, cluster, tuple(verdicts), window=window)


def records(
    rows: Sequence[Mapping[str, Any]], cluster: str, nodes: Sequence[str], *, window: int = WINDOW
) -> dict[str, Record]:
    """The record of each of `nodes` in `rows`, oldest first. Rows that make no sense are passed over."""
    wanted, failed, seen = set(nodes), dict.fromkeys(nodes, 0), dict.fromkeys(nodes, 0)
    ours = [row for row in rows if row.get("cluster") == cluster]
    for row in reversed(ours[-_LOOK_BACK:]):
        told = _unfold(row.get("verdicts"))
        for node in wanted & told.keys():
            if seen[node] < window:
                seen[node] += 1
                failed[node] += told[node] in _BAD
        if all(count >= window for count in seen.values()):
            break
    return {node: Record(failed[node], seen[node]) for node in nodes}


def _fold(verdicts: Mapping[str, Verdict]) -> dict[str, str]:
    folded: dict[str, list[str]] = {}
    for node, verdict in verdicts.items():
        folded.setdefault(verdict.value, []).append(node)
    return {verdict: fold_nodes(names) for verdict, names in folded.items()}


def _unfold(verdicts: object) -> dict[str, str]:
    if not isinstance(verdicts, dict):
        return {}
    told: dict[str, str] = {}
    for verdict, names in verdicts.items():
        with contextlib.suppress(HostsError):
            told |= dict.fromkeys(parse_nodes(str(names), "history").names, str(verdict))
    return told


def _halve(path: Path) -> None:
    """Keep the newer half of the lines."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = lines[len(lines) // 2 :]
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(kept)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Nobody else writes meanwhile. The lock is on the folder, for the file is replaced when it is cut."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Not by the umask: which nodes are bad is nobody else's business.
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        yield
    finally:
        os.close(descriptor)
