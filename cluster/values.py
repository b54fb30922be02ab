"""Values out of records that anybody may have written: of the kind that is asked for, or None. Nothing here raises."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from cluster.remote_text import one_line

_LARGEST = 1e100  # a sum of squares beyond it is infinite
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")
_AGE_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def number(record: Any, name: str) -> float | None:
    """A number; None for what is missing, no number, a truth value, NaN, infinity, or too large to reckon with."""
    value = record.get(name) if isinstance(record, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < _LARGEST else None


def whole(record: Any, name: str) -> int | None:
    """A whole number above 0."""
    value = number(record, name)
    return int(value) if value is not None and value > 0 and value == int(value) else None


def integer(record: Any, name: str) -> int | None:
    """A whole number of any sign; None for what was not written as one."""
    value = record.get(name) if isinstance(record, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def word(record: Any, name: str, limit: int = 200) -> str | None:
    """A text that is not empty, in one line that is safe to show."""
    value = record.get(name) if isinstance(record, Mapping) else None
    return one_line(value, limit) if isinstance(value, str) and value else None


def text(record: Any, name: str) -> str | None:
    """Anything but a list or a table, in one line that is safe to show."""
    value = record.get(name) if isinstance(record, Mapping) else None
    return None if value is None or isinstance(value, Mapping | list) else one_line(str(value))


def table(record: Any, name: str) -> Mapping[str, Any]:
    """A table; an empty one where there is none."""
    value = record.get(name) if isinstance(record, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def rows(record: Any, name: str) -> list[Mapping[str, Any]]:
    """The tables of a list."""
    value = record.get(name) if isinstance(record, Mapping) else None
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def seconds_between(begin: Any, end: Any = None) -> float | None:
    """Seconds from one ISO time to another, or to now; None when one of them is no time."""
    try:
        first = datetime.fromisoformat(begin)
        last = datetime.now(UTC) if end is None else datetime.fromisoformat(end)
        return (last - first).total_seconds()
    except (TypeError, ValueError):
        return None


def age_s(text: str) -> float | None:
    """Seconds of 90, 90s, 15m, 2h, 7d or 2w; None for anything else."""
    found = _AGE.fullmatch(text.strip())
    return None if found is None else float(found[1]) * _AGE_S[found[2]]
