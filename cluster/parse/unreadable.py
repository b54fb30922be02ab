"""The error of every parser: what a node printed cannot be believed."""

from __future__ import annotations


class UnreadableError(ValueError):
    """A section did not end well or does not read as it must; `evidence` is the first line that it holds."""

    def __init__(self, text: str, evidence: str = "") -> None:
        self.evidence = evidence
        super().__init__(text)
