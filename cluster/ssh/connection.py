"""The seam between what burst wants done on a node and how it gets there.

`Connection` is what checks, image distribution and launches use. `cluster.ssh.session` implements it over SSH; tests
implement it in a few lines.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self, TypeVar

from cluster.errors import SshError
from cluster.ssh.hosts import Host

T = TypeVar("T")
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


class RemoteProcess(ABC):
    """A running command whose streams are used by hand; its user closes it. Safe for one reader and one writer."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Send all of `data` to stdin. Raises SshError (LOST) when the command no longer reads."""

    @abstractmethod
    def close_stdin(self) -> None:
        """Send end of file."""

    @abstractmethod
    def read(self, max_bytes: int, timeout_s: float) -> bytes:
        """Up to `max_bytes` of stdout as soon as there are any; b"" at its end.

        Raises SshError: COMMAND_TIMEOUT after `timeout_s`, LOST when the connection ends first.
        """

    @abstractmethod
    def wait(self, timeout_s: float) -> CommandResult:
        """The end of the command: exit code, what was not yet read of stdout, and stderr (capped). Raises as `read`."""

    @abstractmethod
    def close(self) -> None:
        """Drop the channel. The remote command is not killed by that: it must end when stdin ends."""

    def feed(self, data: bytes) -> None:
        """Send `data` and end of file, as far as the command takes them, while the caller reads; returns at once."""

        def send() -> None:
            with contextlib.suppress(SshError):
                self.write(data)
            self.close_stdin()

        threading.Thread(target=send, name="stdin", daemon=True).start()


class Connection(ABC):
    """A logged-in connection to `host`; a context manager. Several commands may run at once, from several threads."""

    host: Host

    @abstractmethod
    def start(self, argv: Sequence[str]) -> RemoteProcess:
        """Start `argv`, quoted word by word so that nothing in it is interpreted. Raises SshError."""

    @abstractmethod
    def close(self) -> None:
        """End the connection; remote commands see end of file."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> CommandResult:
        """Run `argv` with `stdin`, and wait for its end at most `timeout_s`. Raises SshError as `RemoteProcess`."""
        process = self.start(argv)
        try:
            process.feed(stdin)
            return process.wait(timeout_s)
        finally:
            process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Connect = Callable[[Host], Connection]  # where connections come from; raises SshError


@dataclass(frozen=True)
class Deadline:
    """When something must be over, on the monotonic clock, and after how many seconds that is."""

    at: float
    limit_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """`seconds` from now."""
        return cls(time.monotonic() + seconds, seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then; never 0, which would mean for ever to sockets."""
        return max(0.001, self.at - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether it is later."""
        return time.monotonic() >= self.at


def within(deadline: Deadline, work: Callable[[], T]) -> T:
    """What `work` returns or raises, in a thread of its own; TimeoutError when it does neither until `deadline`."""
    answer = begin(work)
    return answer.result(deadline.left_s)


def begin(work: Callable[[], T]) -> Future[T]:
    """What will come of `work`, which is done in a thread that nobody needs to wait for."""
    future = Future[T]()

    def serve() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=serve, daemon=True).start()
    return future
