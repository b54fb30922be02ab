"""One file of a node's fake hardware."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FakeFile:
    """A file with `text`, or a symbolic link to `link_to` (then text and mode mean nothing)."""

    text: str = ""
    mode: int = 0o644
    link_to: str | None = None
