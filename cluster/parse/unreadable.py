"""The error of every parser: what a node printed cannot be believed."""

from __future__ import annotations


class UnreadableError(ValueError):
    """A section did not end well or does not read as it must.

    evidence: the first line that it holds. remedy: what to do about it, where that is known.
    """

    def __init__(self, text: str, evidence: str = "", remedy: str = "") -> None:
        self.evidence, self.remedy = evidence, remedy
        super().__init__(text)
