"""Answers of `cluster/survey/host.sh`: sections of lines, each a word and the rest. All raise UnreadableError."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from cluster.survey.section import Section, UnreadableError

_SAMPLE_CHARACTERS = 160


@dataclass(frozen=True)
class Filesystem:
    """Room of the file system that holds a folder. inodes: 0 where they are made as needed (btrfs, some NFS)."""

    size_bytes: int
    free_bytes: int
    inodes: int
    inodes_free: int
    kind: str


class Answer:
    """One section that ended well. Raises UnreadableError for any other."""

    def __init__(self, section: Section) -> None:
        self.section = section
        self.lines = self.section.output.splitlines()
        if self.section.tool_missing:
            text = f"a tool of the probe is missing ({section.name})"
            raise UnreadableError(text, self._sample(), "install coreutils and awk on the node")
        if not self.section.ok:
            raise UnreadableError(self.section.trouble(), self._sample())

    @property
    def last(self) -> str:
        """The last line."""
        return self.lines[-1] if self.lines else ""

    def values(self, key: str) -> list[str]:
        """The rest of every line that begins with the word `key`."""
        pairs = (line.split(" ", 1) for line in self.lines)
        return [pair[1] for pair in pairs if len(pair) == 2 and pair[0] == key]

    def value(self, key: str) -> str:
        """The rest of the only such line."""
        found = self.values(key)
        if len(found) != 1 or not found[0]:
            raise self.unreadable(f"no {key}" if not found else f"more than one {key}")
        return found[0]

    def pairs(self, key: str) -> dict[str, str]:
        """The lines that begin with the word `key` as first word -> rest."""
        return {name: rest for name, _, rest in (line.partition(" ") for line in self.values(key))}

    def number(self, key: str, unlimited: float | None = None) -> float:
        """The first word after `key` as a number that is not negative; `unlimited` where it says so."""
        text = self.value(key).split(" ")[0]
        if text == "unlimited" and unlimited is not None:
            return unlimited
        if re.fullmatch(r"\d{1,18}(\.\d{1,9})?", text) is None:
            raise self.unreadable(f"{key} is no number: {text[:40]!r}")
        return float(text)

    def json(self, key: str) -> Any:
        """What follows `key`, as JSON."""
        try:
            return json.loads(self.value(key))
        except json.JSONDecodeError as error:
            raise self.unreadable(f"{key} is no JSON") from error

    def filesystem(self, key: str) -> Filesystem | None:
        """The figures of `stat -f`; None where the node says that there is none."""
        if key in self.values("absent"):
            return None
        match = re.fullmatch(r"(\d{1,12}) (\d{1,18}) (\d{1,18}) (\d{1,20}) (\d{1,20}) (.+)", self.value(key))
        if match is None or int(match[1]) == 0:
            raise self.unreadable(f"no figures of {key}")
        block, size, free, inodes, inodes_free = (int(match[at]) for at in range(1, 6))
        return Filesystem(block * size, block * free, inodes, inodes_free, match[6])

    def unreadable(self, why: str) -> UnreadableError:
        """The error that says so of this section."""
        return UnreadableError(f"{self.section.name}: {why}", self._sample())

    def _sample(self) -> str:
        return next((line.strip() for line in self.lines if line.strip()), "")[:_SAMPLE_CHARACTERS]
