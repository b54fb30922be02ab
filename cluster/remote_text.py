"""What comes from another machine, made harmless: remote output is never trusted.

Everything that a node printed passes through `clean_text` before a person, a file of ours or a parser sees it. Values
out of records that anybody may have written are of the kind that is asked for, or None; reading one never raises.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

# CSI, strings such as OSC (one that is never ended must not swallow more than its line), other escapes.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?")
# Every control character that is no tab or line end (C1 too), other line ends of Unicode, marks that turn the direction
# of text, halves of characters.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_TEXT_CHARS = 64 << 10


def clean_text(raw: bytes | str, *, limit: int | None = None) -> str:
    """`raw` as text without escape sequences and control characters; tabs and line ends stay.

    Bytes that are no UTF-8 become U+FFFD. `limit` cuts the text, in characters, and says so with an ellipsis.
    """
    text = raw.decode("utf-8", errors="replace") if isinstance(raw, bytes) else raw
    text = _CONTROLS.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n")))
    return text if limit is None or len(text) <= limit else text[:limit] + "…"


def one_line(raw: bytes | str, limit: int = 200) -> str:
    """`raw` cleaned and folded into one line of at most `limit` characters."""
    return clean_text(" ".join(clean_text(raw, limit=20 * limit).split()), limit=limit)


def plain_path(value: Any) -> str:
    """An absolute path that a command line and a file of ours can hold. Raises ValueError for anything else."""
    if (
        not isinstance(value, str)
        or not value.startswith("/")
        or one_line(value, 400) != value
        or ".." in value.split("/")
    ):
        raise ValueError(f"no absolute path: {value!r:.200}")
    return value


def clean_value(value: Any, depth: int = 12) -> Any:
    """A JSON value with its texts cleaned and its numbers finite. Raises ValueError when it nests deeper than that."""
    if not depth:
        raise ValueError("nests too deep")
    if isinstance(value, str):
        return clean_text(value, limit=_TEXT_CHARS)
    if isinstance(value, dict):
        return {clean_text(key, limit=200): clean_value(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [clean_value(item, depth - 1) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
