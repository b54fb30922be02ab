"""A `Connection` without SSH and without processes: its commands are threads at the other end of their streams."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Sequence

from cluster.errors import SshError, SshFailure
from cluster.ssh.connection import CommandResult, Connection, RemoteProcess
from cluster.ssh.hosts import Host

Serve = Callable[[socket.socket], None]  # what a command does with its streams, until it ends


class FakeProcess(RemoteProcess):
    """What `serve` is, on the node `name`. cut_after: bytes that come out of it before the line is cut (None: all)."""

    def __init__(
        self,
        name: str,
        serve: Serve,
        *,
        exit_code: int | None = 0,
        stderr: bytes = b"",
        cut_after: int | None = None,
    ) -> None:
        self._line, there = socket.socketpair()
        self._name, self._exit_code, self._stderr, self._left = name, exit_code, stderr, cut_after
        self.is_cut = False

        def work() -> None:
            with there, contextlib.suppress(OSError):
                serve(there)

        threading.Thread(target=work, name="fake command", daemon=True).start()

    def write(self, data: bytes) -> None:
        try:
            self._line.sendall(data)
        except OSError:
            raise lost(self._name) from None

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)

    def read(self, max_bytes: int, timeout_s: float) -> bytes:
        if self._left == 0:
            self.cut()
        if not select.select([self._line], [], [], timeout_s)[0]:
            raise SshError(self._name, SshFailure.COMMAND_TIMEOUT, "a command did not end")
        data = b""
        with contextlib.suppress(ConnectionResetError):  # it ended before it had read all
            data = self._line.recv(max_bytes if self._left is None else min(max_bytes, self._left))
        if self.is_cut and not data:
            raise lost(self._name)
        if self._left is not None:
            self._left -= len(data)
        return data

    def wait(self, timeout_s: float) -> CommandResult:
        stdout = b"".join(iter(lambda: self.read(1 << 16, timeout_s), b""))
        return CommandResult(self._exit_code, stdout, self._stderr)

    def cut(self) -> None:
        """The network is gone: both sides see it."""
        self.is_cut = True
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    close = cut

    def __del__(self) -> None:
        self._line.close()


class FakeConnection(Connection):
    """One to `host`, whose every command is what `process` makes of it."""

    def __init__(self, host: Host, process: Callable[[Sequence[str]], FakeProcess]) -> None:
        self.host, self._process = host, process
        self.commands: list[Sequence[str]] = []
        self.processes: list[FakeProcess] = []
        self.is_closed = False

    def start(self, argv: Sequence[str]) -> FakeProcess:
        if self.is_closed:
            raise lost(self.host.name)
        self.commands.append(argv)
        self.processes.append(self._process(argv))
        return self.processes[-1]

    def close(self) -> None:
        self.is_closed = True
        self.cut()

    def cut(self) -> None:
        """Cut what runs."""
        for process in self.processes:
            process.cut()


def lost(name: str) -> SshError:
    """What every use of a connection ends with that is no more."""
    return SshError(name, SshFailure.LOST, "the connection ended while a command ran")
