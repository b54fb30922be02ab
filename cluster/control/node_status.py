"""What a node says of its part of a run, as checked values: it is never believed in shape, size or characters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from cluster.control.link import Phase
from cluster.control.node_copy import CopyError
from cluster.remote_text import clean_text

PHASES: tuple[str, ...] = get_args(Phase)
_TEXT_CHARS = 64 << 10
_MAX_VALUES = 1 << 16
_MAX_DEPTH = 12
_MAX_PIDS = 1 << 12

Facts = Mapping[str, Any]


def as_status(said: Any) -> dict[str, Any]:
    """Fields of a `NodeStatus`: phase, supervisor, outcome and health. Raises CopyError."""
    if not isinstance(said, dict) or said.get("phase") not in PHASES:
        raise CopyError("it names a phase that does not exist")
    supervisor, outcome, health = (_facts(said.get(name)) for name in ("supervisor", "outcome", "health"))
    return {"phase": said["phase"], "supervisor": supervisor or {}, "outcome": outcome, "health": health}


def as_integer(value: Any) -> int:
    """`value` as a number of at most 64 bits; -1 for anything else."""
    is_integer = isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63
    return int(value) if is_integer else -1


def as_pids(value: Any) -> tuple[int, ...]:
    """The process ids in a list."""
    found = value if isinstance(value, list) else []
    return tuple(pid for pid in map(as_integer, found[:_MAX_PIDS]) if pid > 0)


def _facts(value: Any) -> Facts | None:
    """An object with its texts cleaned; None for None."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise CopyError("its status makes no sense")
    cleaned = _Cleaner().clean(value, 0)
    return cleaned if isinstance(cleaned, dict) else None


class _Cleaner:
    """Copies JSON values with harmless texts; counts them."""

    def __init__(self) -> None:
        self._seen = 0

    def clean(self, value: Any, depth: int) -> Any:
        self._seen += 1
        if self._seen > _MAX_VALUES or depth > _MAX_DEPTH:
            raise CopyError("its status is too large")
        if isinstance(value, str):
            return clean_text(value, limit=_TEXT_CHARS)
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return {clean_text(key, limit=200): self.clean(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [self.clean(item, depth + 1) for item in value]
        return value
