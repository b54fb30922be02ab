"""Text that came from another machine, made harmless: remote output is never trusted.

Everything that a node printed passes through `clean_text` before a person, a file of ours or a parser sees it.
"""

from __future__ import annotations

import math
import re
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
