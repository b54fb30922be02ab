"""A point in time that several steps share, so that together they never take longer than one limit."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    """When something must be over, on the monotonic clock."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """`seconds` from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then; never less than 0."""
        return max(0.0, self.at - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return self.left_s <= 0.0

    def at_most(self, seconds: float) -> Deadline:
        """This one, or `seconds` from now if that is earlier."""
        return Deadline(min(self.at, time.monotonic() + seconds))
