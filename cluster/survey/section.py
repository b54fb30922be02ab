"""What a node answered, section by section, and what it means that a section is missing, late or cut off."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.remote_text import clean_value, one_line


class SectionState(enum.StrEnum):
    """How a section ended. Only ENDED has an exit code that means anything; nothing else may count as healthy."""

    ENDED = "ended"
    TIMED_OUT = "timed out"  # its own time limit stopped it
    CUT_OFF = "cut off"  # its end never came, or more came than is kept
    MISSING = "missing"  # the node did not answer it at all


@dataclass(frozen=True)
class Question:
    """One part of the probe: a script for POSIX shells (dash, busybox), and how many seconds it may take.

    A file that it reads lies below $root. after: it is not asked when that other one came to the end of its time: what
    hangs once hangs again.
    """

    name: str
    limit_s: int
    script: str
    after: str = ""


@dataclass(frozen=True)
class Section:
    """Output (stdout and stderr, cleaned) of one part of the probe.

    exit_code: of the part's script; None unless state is ENDED. 127 says that the tool is not installed. elapsed_s: how
    long it ran on the node; 0 when the node did not tell.
    """

    name: str
    output: str = ""
    exit_code: int | None = None
    state: SectionState = SectionState.MISSING
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the part ran to its end with exit code 0: the only case in which its output may be believed."""
        return self.state is SectionState.ENDED and self.exit_code == 0

    @property
    def tool_missing(self) -> bool:
        """Whether the tool that this part needs is not installed."""
        return self.state is SectionState.ENDED and self.exit_code == 127

    def trouble(self) -> str:
        """Why the output cannot be believed, in words; empty when it can."""
        if self.state is not SectionState.ENDED:
            return f"{self.name}: {self.state.value}"
        return "" if self.exit_code == 0 else f"{self.name}: exit code {self.exit_code}"

    def document(self) -> Any:
        """The output as JSON, every text in it cleaned. Raises UnreadableError."""
        if not self.ok:
            raise UnreadableError(self.trouble())
        try:
            return clean_value(json.loads(self.output))
        except (ValueError, RecursionError):
            raise UnreadableError(f"{self.name}: no whole JSON", one_line(self.output)) from None


@dataclass(frozen=True)
class NodeProbe:
    """Everything one node answered.

    clock_offset_s: the node's clock minus ours, by the middle of the round trip; None when the node told no time.
    clock_error_s: by how much that may be wrong. trouble: why the answer as a whole is not complete, in words; empty
    when it is.
    """

    node: str
    sections: Mapping[str, Section] = field(default_factory=dict)
    clock_offset_s: float | None = None
    clock_error_s: float = 0.0
    trouble: str = ""

    def section(self, name: str) -> Section:
        """The section of that name; one in state MISSING when the node did not answer it."""
        return self.sections.get(name, Section(name))


class UnreadableError(ValueError):
    """A section did not end well or does not read as it must.

    evidence: the first line that it holds. remedy: what to do about it, where that is known.
    """

    def __init__(self, text: str, evidence: str = "", remedy: str = "") -> None:
        self.evidence, self.remedy = evidence, remedy
        super().__init__(text)
