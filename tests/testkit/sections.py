"""Configurations that differ from a given one in some settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def changed(base: Any, **changes: Any) -> Any:
    """A dataclass with other fields; a dict changes only its keys in what the field holds."""
    fields = {
        name: changed(getattr(base, name), **value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return replace(base, **fields)
