"""What was planned for a run and what is seen of it now, read from its folder alone; cheap enough for hundreds of runs.

Everything in the folder may be damaged, half written or hostile (nodes wrote some of it): what cannot be read is None.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from cluster.control.busy import LOCK_FILE, find_controller
from cluster.control.link import NodeStatus, Phase
from cluster.remote_text import one_line
from engine.run.records import read_json_object
from engine.runs import RunFolder

MAX_FILE_BYTES = 8 * 2**20
_PHASES: tuple[Phase, ...] = ("none", "starting", "running", "stopping", "ended", "lost")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # what `RunFolder.log_dir` makes of any name
_TAIL_BYTES = 256 * 1024  # of metrics.jsonl: many rows, whatever the length of the run


@dataclass(frozen=True)
class PlannedNode:
    """One node of the plan and the ranks it has. rdma_ports: whether NCCL is told which InfiniBand or RoCE to use."""

    name: str
    first_rank: int
    local_ranks: int
    rdma_ports: bool = False

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.local_ranks)


@dataclass(frozen=True)
class RunFacts:
    """What a run was asked to do; None is not known."""

    steps: int | None = None
    seq_len: int | None = None
    preset: str | None = None
    world_size: int | None = None
    log_interval: int = 1
    hang_timeout_s: float | None = None
    launcher: str | None = None
    nodes: tuple[PlannedNode, ...] = ()

    @property
    def shape(self) -> str:
        """`2 x 4` for two nodes of four ranks; `8 ranks` where nodes are not known."""
        if not self.nodes:
            return "" if self.world_size is None else ranks_text(self.world_size)
        sizes = {node.local_ranks for node in self.nodes}
        each = str(sizes.pop()) if len(sizes) == 1 else f"{min(sizes)}-{max(sizes)}"
        return f"{len(self.nodes)} x {each}"


def read_facts(run: RunFolder) -> RunFacts:
    """From launch.json; for a run without one, from config.yaml and the nodes that have written logs."""
    plan = _json(run.path / "launch.json")
    config = _mapping(plan.get("config")) or _config(run.path / "config.yaml")
    train, cluster = _mapping(config.get("train")), _mapping(config.get("cluster"))
    entries = plan.get("nodes")
    nodes = tuple(_planned(entry) for entry in entries if isinstance(entry, dict)) if isinstance(entries, list) else ()
    launcher = plan.get("launcher")
    return RunFacts(
        steps=_whole(train.get("steps")),
        seq_len=_whole(train.get("seq_len")),
        preset=_word(_mapping(config.get("attention")).get("preset")),
        world_size=_whole(plan.get("world_size")) or _whole(cluster.get("ranks_per_node")),
        log_interval=_whole(train.get("log_interval_steps")) or 1,
        hang_timeout_s=number(cluster, "hang_timeout_s"),
        launcher=launcher if isinstance(launcher, str) else None,
        nodes=nodes,
    )


def read_nodes(run: RunFolder, facts: RunFacts, now: float | None = None) -> list[NodeStatus]:
    """What the nodes last left in the run folder; `heard_s` is the age of the newest of it. Asks nobody."""
    now = time.time() if now is None else now
    names = [node.name for node in facts.nodes]
    folders = {path.name: path for path in (run.path / "nodes").glob("*") if _NAME.fullmatch(path.name)}
    known = {run.log_dir(name).name for name in names}
    return [
        read_node(folders.get(run.log_dir(name).name), name, run, now)
        for name in [*names, *sorted(set(folders) - known)]
    ]


def read_node(folder: Path | None, name: str, run: RunFolder, now: float) -> NodeStatus:
    """One node, by its files in `folder`."""
    if folder is None:
        return NodeStatus(name, heard_s=_age(run.log_dir(name), now))
    supervisor, outcome, health = (_json(folder / f"{part}.json") for part in ("supervisor", "outcome", "health"))
    phase = supervisor.get("phase")
    known: Phase = "ended" if outcome else next((word for word in _PHASES if word == phase), "none")
    heard = min(_age(folder, now), _age(run.log_dir(name), now))
    return NodeStatus(name, known, outcome or None, health or None, heard, supervisor=supervisor)


def last_rows(run: RunFolder) -> list[dict[str, Any]]:
    """The newest rows of metrics.jsonl, oldest first, without reading all of a long file."""
    from engine.run.records import parse_line, read_json_lines

    path = run.path / "metrics.jsonl"
    try:
        size = path.stat().st_size
    except OSError:
        return []
    if size <= _TAIL_BYTES:
        return read_json_lines(path)
    with path.open("rb") as file:
        file.seek(size - _TAIL_BYTES)
        lines = file.read(_TAIL_BYTES).split(b"\n")[1:]
    return [row for line in lines if (row := parse_line(line)) is not None]


def is_lost(run: RunFolder, document: Mapping[str, Any]) -> bool:
    """Whether a run has begun and not ended, and the process that should see to it is gone.

    A run that was started without a launcher has no lock; the process in run.json speaks for it, where it can be seen.
    """
    if document.get("state") not in ("starting", "running") or find_controller(run) is not None:
        return False
    is_alive = run.is_alive()
    return is_alive is False or (is_alive is None and (run.path / LOCK_FILE).exists())


def number(values: Any, name: str) -> float | None:
    """A figure of a record, None when it is no number."""
    value = values.get(name) if isinstance(values, Mapping) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def word(values: Any, name: str, limit: int = 200) -> str | None:
    """A text of a record in one safe line, None when it is none."""
    value = values.get(name) if isinstance(values, Mapping) else None
    return one_line(value, limit) if isinstance(value, str) and value else None


def seconds_between(begin: Any, end: Any = None) -> float | None:
    """Seconds from one ISO time to another, or to now; None when one of them is no time."""
    try:
        first = datetime.fromisoformat(begin)
        last = datetime.now(UTC) if end is None else datetime.fromisoformat(end)
        return (last - first).total_seconds()
    except (TypeError, ValueError):
        return None


def ranks_text(count: int) -> str:
    """1 rank, 8 ranks."""
    return f"{count} rank{'' if count == 1 else 's'}"


def _planned(entry: Mapping[str, Any]) -> PlannedNode:
    name = entry.get("name", entry.get("hostname"))
    environment = _mapping(entry.get("environment"))
    return PlannedNode(
        one_line(name, 100) if isinstance(name, str) else "?",
        _whole(entry.get("first_rank")) or 0,
        _whole(entry.get("local_ranks")) or 0,
        "NCCL_IB_HCA" in environment and environment.get("NCCL_IB_DISABLE", "0") == "0",
    )


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty when there is none that can be read."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return {}
        return read_json_object(path) or {}
    except (OSError, ValueError, RecursionError):
        return {}


def _config(path: Path) -> dict[str, Any]:
    """config.yaml without the checks of `load_config`, which takes ten times as long."""
    from engine.config import load_yaml

    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return {}
        document = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return document if isinstance(document, dict) else {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _word(value: Any) -> str | None:
    return one_line(value, 40) if isinstance(value, str) else None


def _age(folder: Path, now: float) -> float:
    """Seconds since anything in a folder was written; infinite when there is nothing."""
    newest = float("-inf")
    try:
        for path in folder.iterdir():
            if path.name not in ("lease", "spec.json", "stop.json", "stacks.json"):  # what the launcher writes
                newest = max(newest, path.stat().st_mtime)
    except OSError:
        pass
    return max(0.0, now - newest)
