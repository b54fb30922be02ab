"""The seam between what burst wants done on a node and how it gets there.

`Connection` is what checks, image distribution and launches use. `cluster.ssh.pool` implements it over SSH; tests
implement it in a few lines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from cluster.ssh.hosts import Host

OUTPUT_BYTES = 4 << 20  # so much of what a command says is kept


@dataclass(frozen=True)
class CommandResult:
    """What a command on a node did. Output is raw: pass it through `cluster.remote_text.clean_text`.

    exit_code: None when the command was killed by a signal. truncated: more than OUTPUT_BYTES of one stream came;
    the rest was read and thrown away.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool = False

    @property
    def ok(self) -> bool:
        """Whether the exit code is 0 and nothing was cut off."""
        return self.exit_code == 0 and not self.truncated


class RemoteProcess(Protocol):
    """A running command whose streams are used by hand; its user closes it. Safe for one reader and one writer."""

    def write(self, data: bytes) -> None:
        """Send all of `data` to stdin. Raises SshError (LOST) when the command no longer reads."""

    def close_stdin(self) -> None:
        """Send end of file."""

    def read(self, max_bytes: int, timeout_s: float) -> bytes:
        """Up to `max_bytes` of stdout as soon as there are any; b"" at its end. Raises SshError after `timeout_s`."""

    def wait(self, timeout_s: float) -> CommandResult:
        """The end of the command: exit code, what was not yet read of stdout, and stderr (capped)."""

    def close(self) -> None:
        """Drop the channel. The remote command is not killed by that: it must end when stdin ends."""


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

    def at_most(self, seconds: float) -> Deadline:
        """This one, or `seconds` from now if that is earlier."""
        return Deadline(min(self.at, time.monotonic() + seconds))


class Connection(Protocol):
    """A logged-in connection to one host; a context manager. Several commands may run at once, from several threads."""

    @property
    def host(self) -> Host:
        """The host that this connection leads to."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> CommandResult:
        """Run `argv` (quoted word by word, so nothing in it is interpreted) with `stdin`, and wait for its end.

        Raises SshError: COMMAND_TIMEOUT after `timeout_s`, LOST when the connection ends first.
        """

    def start(self, argv: Sequence[str]) -> RemoteProcess:
        """Start `argv`, quoted likewise, with open streams."""

    def close(self) -> None:
        """End the connection; remote commands see end of file."""

    def __enter__(self) -> Self:
        """This connection."""

    def __exit__(self, *_: object) -> None:
        """Close it."""
