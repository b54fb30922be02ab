"""Errors that a user can cause, in one tree.

    BurstError                 exit code 1
    ├── ConfigError            exit code 2: the configuration is wrong; `problems` lists every mistake
    ├── DataError              a data file or tokenizer is unusable; the text names file and place
    └── RunError               a run failed while it ran

Every message says what failed, what was given, what was expected and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence


class BurstError(Exception):
    """Base of all errors whose text is meant for a person; `exit_code` is what the process returns."""

    exit_code = 1


class ConfigError(BurstError):
    """The configuration cannot be used; `problems` holds one sentence per mistake, all of them at once."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(BurstError):
    """A data file, shard or tokenizer is unusable."""


class RunError(BurstError):
    """A run ended before it was done."""


def legal_sizes(number: int) -> str:
    """The divisors of a number as a list in words: what a size that must divide it may be."""
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
