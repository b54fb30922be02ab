"""Errors that a user can cause, in one tree.

    BurstError                 exit code 1
    ├── ConfigError            exit code 2: the configuration is wrong; `problems` lists every mistake
    ├── DataError              a data file or tokenizer is unusable; the text names file and position
    └── RunError               a run failed while it ran

Every message names the failure, the given and the expected value, and the next step.
"""

from __future__ import annotations

from collections.abc import Sequence


class BurstError(Exception):
    """Base of all errors with a message for the user; `exit_code` is that of the process."""

    exit_code = 1


class ConfigError(BurstError):
    """The configuration cannot be used; `problems` has one sentence per mistake."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(BurstError):
    """A data file, shard or tokenizer is unusable."""


class RunError(BurstError):
    """A run ended before it was complete."""


def legal_sizes(number: int) -> str:
    """Return the divisors of a number as a list in words."""
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
