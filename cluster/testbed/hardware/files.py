"""One file of a node's fake hardware."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FakeFile:
    """A file with `text`, or a symbolic link to `link_to` (then text and mode mean nothing)."""

    text: str = ""
    mode: int = 0o644
    link_to: str | None = None

    def write(self, path: Path) -> None:
        """Lay it there, with the folders above."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.link_to is not None:
            path.symlink_to(self.link_to)
        else:
            path.write_text(self.text, encoding="utf-8")
            path.chmod(self.mode)
