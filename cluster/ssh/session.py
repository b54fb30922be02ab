"""A connection to a node and the commands that run there: streams with timeouts, in bounded memory."""

from __future__ import annotations

import contextlib
import shlex
import threading
from collections.abc import Callable, Sequence
from typing import Self

import paramiko

from cluster.errors import SshError, SshFailure
from cluster.ssh.connection import OUTPUT_BYTES, CommandResult, Deadline
from cluster.ssh.hosts import Host
from cluster.ssh.transport import WINDOW_BYTES, Answer, SshTransport, words

STALL_S = 120.0
_WRITE_BYTES = 1 << 15
_STDERR_BYTES = 1 << 20
_BROKEN = (OSError, EOFError, paramiko.SSHException)


class SshProcess:
    """See `cluster.ssh.connection.RemoteProcess`.

    stall_s: writing fails when the command reads nothing for so long.
    """

    def __init__(self, host: Host, transport: SshTransport, channel: paramiko.Channel, stall_s: float) -> None:
        self._host, self._transport, self._channel, self._stall_s = host, transport, channel, stall_s
        self._stderr, self._is_cut = bytearray(), False
        # The timeout of a channel is its writer's; its reader waits for this.
        channel.settimeout(stall_s)
        self._is_readable = threading.Event()
        channel.in_buffer.set_event(self._is_readable)
        # stderr has its own reader: both streams share one window, and a full one would stop the other.
        self._drain = threading.Thread(target=self._read_stderr, name=f"stderr {host.name}", daemon=True)
        self._drain.start()

    def feed(self, data: bytes) -> None:
        """Send `data` and end of file from a thread, while the caller reads."""
        if data:
            threading.Thread(target=self._feed, args=(data,), name=f"stdin {self._host.name}", daemon=True).start()
        else:
            self.close_stdin()

    def write(self, data: bytes) -> None:
        """Send all of `data` to stdin. Raises SshError: LOST when nobody reads or nothing moves for stall_s."""
        view = memoryview(data)
        try:
            while view:
                sent = self._channel.send(bytes(view[:_WRITE_BYTES]))
                if sent == 0:
                    raise EOFError
                view = view[sent:]
        except TimeoutError as error:
            text = f"the command has read nothing for {self._stall_s:.3g} s"
            raise SshError(self._host.name, SshFailure.LOST, text) from error
        except _BROKEN as error:
            raise SshError(self._host.name, SshFailure.LOST, "the command no longer reads its input") from error

    def close_stdin(self) -> None:
        """Send end of file."""
        with contextlib.suppress(*_BROKEN):
            self._channel.shutdown_write()

    def read(self, max_bytes: int, timeout_s: float) -> bytes:
        """Up to `max_bytes` of stdout; b"" at its end. SshError: COMMAND_TIMEOUT, or LOST with the connection."""
        data = self._receive(max_bytes, timeout_s, timeout_s)
        if not data and self._is_lost():
            raise self._lost()
        return data

    def wait(self, timeout_s: float) -> CommandResult:
        """The end of the command; reads both streams until then."""
        deadline = Deadline.after(timeout_s)
        stdout = bytearray()
        while data := self._receive(WINDOW_BYTES, deadline.left_s, timeout_s):
            self._keep(stdout, data, OUTPUT_BYTES)
        if not self._channel.status_event.wait(deadline.left_s):
            raise _command_timeout(self._host, timeout_s)
        self._drain.join(deadline.left_s)
        if self._is_lost():
            raise self._lost()
        code = self._channel.exit_status
        return CommandResult(None if code == -1 else code, bytes(stdout), bytes(self._stderr), self._is_cut)

    def close(self) -> None:
        """Drop the channel; from any thread, which ends reads and writes of others."""
        with contextlib.suppress(*_BROKEN):
            self._channel.close()

    def _receive(self, max_bytes: int, wait_s: float, limit_s: float) -> bytes:
        """Some of stdout, b"" at its end; within wait_s, which are what is left of limit_s."""
        if not self._is_readable.wait(wait_s):
            raise _command_timeout(self._host, limit_s)
        try:
            return self._channel.recv(max_bytes)
        except _BROKEN as error:
            # paramiko tells the server what was read, on a connection that has ended meanwhile.
            raise self._lost() from error

    def _keep(self, kept: bytearray, data: bytes, limit: int) -> None:
        room = max(0, limit - len(kept))
        self._is_cut = self._is_cut or len(data) > room
        kept += data[:room]

    def _is_lost(self) -> bool:
        """Whether the connection, and not the command, ended the output: then it may be cut anywhere."""
        if self._channel.eof_received and self._channel.exit_status != -1:
            return False
        if self._channel.exit_status == -1 and self._transport.is_active() and not self._channel.eof_received:
            # A dying connection closes its channels first and says a moment later that it is dead.
            self._transport.join(0.05)
        return not self._transport.is_active()

    def _feed(self, data: bytes) -> None:
        with contextlib.suppress(SshError):
            self.write(data)
        self.close_stdin()

    def _read_stderr(self) -> None:
        data = b"."
        while data:
            try:
                data = self._channel.recv_stderr(_WRITE_BYTES)
            except TimeoutError:
                continue
            except _BROKEN:
                return
            self._keep(self._stderr, data, _STDERR_BYTES)

    def _lost(self) -> SshError:
        text = f"the connection ended while a command ran{self._transport.last_words}"
        return SshError(self._host.name, SshFailure.LOST, text)


class SshConnection:
    """See `cluster.ssh.connection.Connection`; made by `cluster.ssh.pool.SshPool`. transport: paramiko's."""

    def __init__(self, host: Host, transport: SshTransport, stall_s: float) -> None:
        self.host, self.transport, self._stall_s = host, transport, stall_s

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> CommandResult:
        """Run a command and wait for its end; see `Connection.run`."""
        deadline = Deadline.after(timeout_s)
        process = self._start(argv, deadline)
        try:
            process.feed(stdin)
            return process.wait(deadline.left_s)
        except SshError as error:
            if error.kind is SshFailure.COMMAND_TIMEOUT:
                raise _command_timeout(self.host, timeout_s) from error
            raise
        finally:
            process.close()

    def start(self, argv: Sequence[str]) -> SshProcess:
        """Start a command; see `Connection.start`."""
        return self._start(argv, Deadline.after(self.host.connect_timeout_s))

    def forward(self, serve: Callable[[paramiko.Channel], None]) -> int:
        """A port on the loopback of the host; `serve` gets what connects to it there, each in a thread of its own."""

        def handle(channel: paramiko.Channel, origin: tuple[str, int], server: tuple[str, int]) -> None:
            threading.Thread(target=serve, args=(channel,), name=f"port of {self.host.name}", daemon=True).start()

        try:
            return self.transport.forward_port(handle, self.host.connect_timeout_s)
        except _BROKEN as error:
            text, remedy = f"cannot forward a port: {words(error)}", "AllowTcpForwarding in its sshd_config?"
            raise SshError(self.host.name, SshFailure.PROTOCOL, text, remedy) from error

    def close(self) -> None:
        """End the connection."""
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, argv: Sequence[str], deadline: Deadline) -> SshProcess:
        command, limit_s = shlex.join(argv).encode("utf-8", errors="surrogateescape"), deadline.left_s
        channel: paramiko.Channel | None = None
        try:
            channel = self.transport.open("session", limit_s)
            channel.event = Answer(deadline.left_s)  # to what follows: paramiko waits for it without an end
            channel.exec_command(command)
        except _BROKEN as error:
            if channel is not None:
                channel.close()
            raise self._cannot_start(error, deadline, limit_s) from error
        return SshProcess(self.host, self.transport, channel, self._stall_s)

    def _cannot_start(self, error: Exception, deadline: Deadline, limit_s: float) -> SshError:
        if not self.transport.is_active():
            return SshError(self.host.name, SshFailure.LOST, f"the connection has ended{self.transport.last_words}")
        if not deadline.left_s or isinstance(error, TimeoutError):
            return _command_timeout(self.host, limit_s)
        text, remedy = f"cannot start a command: {words(error)}", "too many at once (MaxSessions of its sshd)?"
        return SshError(self.host.name, SshFailure.PROTOCOL, text, remedy)


def _command_timeout(host: Host, timeout_s: float) -> SshError:
    return SshError(host.name, SshFailure.COMMAND_TIMEOUT, f"a command did not end within {timeout_s:.3g} s")
