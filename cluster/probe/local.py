"""A command on this machine behind the interface of a remote one, so that probing has one way of reading."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

from cluster.access.connection import CommandResult
from cluster.errors import SshError, SshFailure


class LocalProcess:
    """See `cluster.access.connection.RemoteProcess`; stderr goes into stdout."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._begin = time.monotonic()
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )

    def write(self, data: bytes) -> None:
        """Send all of `data` to stdin."""
        assert self._process.stdin is not None
        view = memoryview(data)
        try:
            while view:
                view = view[self._process.stdin.write(view) :]
        except (OSError, ValueError) as error:
            raise self._error(SshFailure.LOST, "the command no longer reads its input") from error

    def close_stdin(self) -> None:
        """Send end of file."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def read(self, max_bytes: int, timeout_s: float | None = None) -> bytes:
        """Up to `max_bytes` of stdout; b"" at its end."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready:
            raise self._error(SshFailure.COMMAND_TIMEOUT, f"a command did not end within {timeout_s:.3g} s")
        return os.read(self._process.stdout.fileno(), max_bytes)

    def wait(self, timeout_s: float) -> CommandResult:
        """The end of the command; what it still prints is not read."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise self._error(SshFailure.COMMAND_TIMEOUT, f"a command did not end within {timeout_s:.3g} s") from error
        return CommandResult(code if code >= 0 else None, b"", b"", time.monotonic() - self._begin)

    def close(self) -> None:
        """Kill the command if it still runs. What it started under `timeout` ends by its own limit."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.close_stdin()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _error(self, kind: SshFailure, text: str) -> SshError:
        return SshError(socket.gethostname(), kind, text)
