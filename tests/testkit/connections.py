"""Connections as tests want them: over SSH by themselves, to this machine without SSH, and to threads.

What is no SSH has a pair of sockets as the streams of its commands.
"""

from __future__ import annotations

import abc
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cluster.errors import SshError, SshFailure
from cluster.ssh.connection import CommandResult, Connection, RemoteProcess
from cluster.ssh.hosts import Host
from cluster.ssh.session import SshConnection, SshPool
from cluster.testbed.testbed import Testbed

# Of this very Python: one behind a version manager takes ten times as long to start.
AT_HAND = Path(sys.executable).parent
Serve = Callable[[socket.socket], None]  # what a command does with its streams, until it ends


def connect(host: Host) -> SshConnection:
    """A logged-in connection to `host`, which needs no jump host; verbs share an `SshPool`. Raises SshError."""
    assert host.jump is None, "a pool has to close the way through it"
    return SshPool().connect(host)


def run_on(testbed: Testbed, node: str, *argv: str, stdin: bytes = b"") -> str:
    """What a command on a node prints, without blanks around it; raises when it fails."""
    with connect(testbed.host(node)) as connection:
        result = connection.run(argv, stdin=stdin)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


class _SocketProcess(RemoteProcess):
    """A command of the node `name` that has `there` for stdin and stdout. Closing it closes them and kills nothing.

    cut_after: bytes that come out of it before the line is cut (None: all).
    """

    def __init__(self, name: str, cut_after: int | None = None) -> None:
        self._name, self._left, self.is_cut = name, cut_after, False
        self._line, self.there = socket.socketpair()

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
            raise SshError(self._name, SshFailure.COMMAND_TIMEOUT, f"a command did not end within {timeout_s} s")
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
        code, stderr = self._end(timeout_s)
        return CommandResult(code, stdout, stderr)

    def cut(self) -> None:
        """The network is gone: both sides see it."""
        self.is_cut = True
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    close = cut

    def __del__(self) -> None:
        self._line.close()

    @abc.abstractmethod
    def _end(self, timeout_s: float) -> tuple[int | None, bytes]:
        """Exit code and stderr of a command of which all was read."""


class LocalProcess(_SocketProcess):
    """A process of this machine."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(name)
        self._stderr = os.memfd_create("stderr")
        # A shell as sshd uses one: it answers 127 for a command that is not there.
        command = ["/bin/sh", "-c", 'exec "$@"', "sh", *argv]
        with self.there as there:
            self.popen = subprocess.Popen(
                command, stdin=there, stdout=there, stderr=self._stderr, env=dict(environment), start_new_session=True
            )

    def end(self) -> None:
        """For the end of a test: kill whatever is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def _end(self, timeout_s: float) -> tuple[int | None, bytes]:
        code = self.popen.wait(timeout_s)
        return code if code >= 0 else None, os.pread(self._stderr, 1 << 22, 0)

    def __del__(self) -> None:
        super().__del__()
        os.close(self._stderr)


class LocalConnection(Connection):
    """One whose node is this machine: commands run as they are, with `environment` on top of this one's.

    given: what a command reads instead of what it was given, or an error.
    """

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str] | None = None,
        given: Callable[[bytes], bytes] = lambda stdin: stdin,
    ) -> None:
        self.host, self._given = Host(name, "127.0.0.1"), given
        self._environment = {**os.environ, "PATH": f"{AT_HAND}:{os.environ['PATH']}", **(environment or {})}
        self.processes: list[LocalProcess] = []

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> CommandResult:
        return super().run(argv, stdin=self._given(stdin), timeout_s=timeout_s)

    def start(self, argv: Sequence[str]) -> LocalProcess:
        self.processes.append(LocalProcess(self.host.name, argv, self._environment))
        return self.processes[-1]

    def close(self) -> None:
        for process in self.processes:
            process.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(5.0)
            process._line.close()  # an error in a cycle of references may hold the process for longer


class FakeProcess(_SocketProcess):
    """What `serve` is, in a thread."""

    def __init__(
        self,
        name: str,
        serve: Serve,
        *,
        exit_code: int | None = 0,
        stderr: bytes = b"",
        cut_after: int | None = None,
    ) -> None:
        super().__init__(name, cut_after)
        self._ends = exit_code, stderr

        def work(there: socket.socket) -> None:
            with there, contextlib.suppress(OSError):
                serve(there)

        threading.Thread(target=work, args=(self.there,), name="fake command", daemon=True).start()

    def _end(self, timeout_s: float) -> tuple[int | None, bytes]:
        return self._ends


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
