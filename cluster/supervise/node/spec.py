"""What a supervisor is told, checked: `cluster.control.link.NodeSpec` as it arrives."""

import math
import os
import re
from typing import Any, NamedTuple, Optional

RUN_ID_VARIABLE = "BURST_RUN_ID"
NODE_VARIABLE = "BURST_NODE"
RANK_LOGS_VARIABLE = "BURST_RANK_LOGS"
MAX_GRACE_S = 86400.0
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}")
_CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
_MAX_FILES = 1000


class SpecError(ValueError):
    """What arrived cannot be done; the text is for people."""


class Spec(NamedTuple):
    """See `NodeSpec`; the same names and units."""

    run_id: str
    node: str
    node_rank: int
    num_nodes: int
    first_rank: int
    local_ranks: int
    folder: str
    argv: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    files: tuple[tuple[str, str], ...]
    container: Optional[str]
    engine: tuple[str, ...]
    lease_s: Optional[float]
    stop_grace_s: float
    exclusive: bool
    start_id: str = ""  # of the request to start it: the same when it is asked for again

    def to_dict(self) -> dict[str, Any]:
        """As JSON, without the files, which lie beside it."""
        return {**self._asdict(), "files": []}


def parse_spec(message: Any) -> Spec:
    """The checked spec. Raises SpecError naming the field."""
    if not isinstance(message, dict):
        raise SpecError("the spec is no object")
    lease = message.get("lease_s", 60.0)
    container = message.get("container")
    environment = message.get("environment", {})
    if not isinstance(environment, dict):
        raise SpecError("environment is no object")
    for name, value in environment.items():
        if not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
            raise SpecError(f"environment: {str(name)[:60]!r} cannot be set")
    return Spec(
        run_id=checked_run_id(message.get("run_id")),
        node=checked_node(message.get("node")),
        node_rank=_count(message, "node_rank"),
        num_nodes=_count(message, "num_nodes"),
        first_rank=_count(message, "first_rank"),
        local_ranks=_count(message, "local_ranks"),
        folder=checked_folder(message.get("folder")),
        argv=_words(message.get("argv"), "argv"),
        cwd=checked_folder(message.get("cwd"), "cwd"),
        environment=dict(environment),
        files=_files(message.get("files") or ()),
        container=None if container is None else _match(_CONTAINER, container, "container"),
        engine=_words(message.get("engine", ["docker"]), "engine"),
        lease_s=None if lease is None else seconds(lease, "lease_s"),
        stop_grace_s=seconds(message.get("stop_grace_s", 12.0), "stop_grace_s"),
        exclusive=bool(message.get("exclusive", True)),
        start_id=checked_run_id(message.get("start_id") or "none"),
    )


def checked_run_id(value: Any) -> str:
    """A run id, which becomes part of file names and of an environment."""
    return _match(_RUN_ID, value, "run_id")


def checked_node(value: Any) -> str:
    """A node's name."""
    return _match(_NODE, value, "node")


def checked_folder(value: Any, name: str = "folder") -> str:
    """An absolute path without "..", normalised."""
    if not isinstance(value, str) or not os.path.isabs(value) or "\0" in value or ".." in value.split("/"):
        raise SpecError(f"{name} is no absolute path: {value if value is None else str(value)[:200]!r}")
    return os.path.normpath(value)


def seconds(value: Any, name: str) -> float:
    """A finite number of seconds from 0 to a day."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise SpecError(f"{name} is no number of seconds: {str(value)[:60]!r}")
    return min(float(value), MAX_GRACE_S)


def relative_path(value: Any) -> str:
    """A path below the run folder. Raises SpecError for one that would lead out of it."""
    parts = value.split("/") if isinstance(value, str) and len(value) < 1000 else [""]
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise SpecError(f"not a path below the run folder: {str(value)[:200]!r}")
    return str(value)


def _files(value: Any) -> tuple[tuple[str, str], ...]:
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, (list, tuple)) or len(pairs) > _MAX_FILES:
        raise SpecError("files is no list of (path, text)")
    checked: list[tuple[str, str]] = []
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[1], str):
            raise SpecError("files is no list of (path, text)")
        checked.append((relative_path(pair[0]), pair[1]))
    return tuple(checked)


def _words(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value or not value[0]:
        raise SpecError(f"{name} is no command")
    if any(not isinstance(word, str) or "\0" in word for word in value):
        raise SpecError(f"{name} holds what is no word")
    return tuple(value)


def _match(pattern: Any, value: Any, name: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value) or value in (".", ".."):
        raise SpecError(f"{name} is no name: {value if value is None else str(value)[:100]!r}")
    return value


def _count(message: dict[str, Any], name: str) -> int:
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 24:
        raise SpecError(f"{name} is no number: {str(value)[:60]!r}")
    return value
