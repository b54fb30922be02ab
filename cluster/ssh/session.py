"""A connection to a node and the commands that run there: streams with timeouts, in bounded memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

import paramiko

from cluster.errors import SshError, SshFailure
from cluster.ssh.connection import DEFAULT_OUTPUT_BYTES, CommandResult, Deadline, quote_command
from cluster.ssh.hosts import Host
from cluster.ssh.transport import WINDOW_BYTES, SshTransport, words

STALL_S = 120.0
_WRITE_BYTES = 1 << 15
_STDERR_BYTES = 1 << 20
# The timeout of a channel is shared by its readers and writers: each looks at its own deadline this often.
_POLL_S = 0.25


class SshProcess:
    """See `cluster.ssh.connection.RemoteProcess`.

    stall_s: writing fails when the command reads nothing for so long.
    """

    def __init__(self, host: Host, channel: paramiko.Channel, max_output_bytes: int, stall_s: float) -> None:
        self._host, self._channel, self._limit, self._stall_s = host, channel, max_output_bytes, stall_s
        self._stderr = bytearray()
        self._stderr_cut = False
        channel.settimeout(_POLL_S)
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
        view, moved = memoryview(data), time.monotonic()
        while view:
            try:
                sent = self._channel.send(bytes(view[:_WRITE_BYTES]))
            except TimeoutError as error:
                if time.monotonic() - moved > self._stall_s:
                    text = f"the command has read nothing for {self._stall_s:.3g} s"
                    raise SshError(self._host.name, SshFailure.LOST, text) from error
                continue
            except (OSError, EOFError, paramiko.SSHException) as error:
                raise self._reads_no_more() from error
            if sent == 0:
                raise self._reads_no_more()
            view, moved = view[sent:], time.monotonic()

    def close_stdin(self) -> None:
        """Send end of file."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.shutdown_write()

    def read(self, max_bytes: int, timeout_s: float | None = None) -> bytes:
        """Up to `max_bytes` of stdout; b"" at its end. SshError: COMMAND_TIMEOUT, or LOST with the connection."""
        deadline = Deadline.after(timeout_s) if timeout_s is not None else None
        data = self._receive(max_bytes, deadline)
        if data is None:
            raise _command_timeout(self._host, timeout_s or 0.0)
        if not data and self._is_lost():
            raise self._lost()
        return data

    def wait(self, timeout_s: float) -> CommandResult:
        """The end of the command; reads both streams until then."""
        deadline = Deadline.after(timeout_s)
        stdout, cut = bytearray(), False
        while (data := self._receive(WINDOW_BYTES, deadline)) != b"":
            if data is None:
                raise _command_timeout(self._host, timeout_s)
            room = self._limit - len(stdout)
            cut = cut or len(data) > room
            stdout += data[: max(0, room)]
        if not self._channel.status_event.wait(deadline.left_s):
            raise _command_timeout(self._host, timeout_s)
        self._drain.join(deadline.left_s)
        if self._is_lost():
            raise self._lost()
        code = self._channel.exit_status
        is_cut = cut or self._stderr_cut
        return CommandResult(None if code == -1 else code, bytes(stdout), bytes(self._stderr), is_cut)

    def close(self) -> None:
        """Drop the channel; from any thread, which ends reads and writes of others."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()

    def _receive(self, max_bytes: int, deadline: Deadline | None) -> bytes | None:
        """Some of stdout, b"" at its end, None when the deadline is over."""
        while True:
            left_s = _POLL_S if deadline is None else min(_POLL_S, deadline.left_s)
            self._channel.settimeout(max(left_s, 0.001))
            try:
                return self._channel.recv(max_bytes)
            except TimeoutError:
                if deadline is not None and deadline.is_over:
                    return None
            except (OSError, EOFError, paramiko.SSHException) as error:
                # paramiko tells the server what was read, on a connection that has ended meanwhile.
                raise self._lost() from error

    def _is_lost(self) -> bool:
        """Whether the connection, and not the command, ended the output: then it may be cut anywhere."""
        if self._channel.eof_received and self._channel.exit_status != -1:
            return False
        transport = self._channel.get_transport()
        if self._channel.exit_status == -1 and transport.is_active() and not self._channel.eof_received:
            # A dying connection closes its channels first and says a moment later that it is dead.
            transport.join(0.05)
        return not transport.is_active()

    def _feed(self, data: bytes) -> None:
        with contextlib.suppress(SshError):
            self.write(data)
        self.close_stdin()

    def _read_stderr(self) -> None:
        while True:
            try:
                data = self._channel.recv_stderr(_WRITE_BYTES)
            except TimeoutError:
                continue
            except (OSError, EOFError, paramiko.SSHException):
                return
            if not data:
                return
            room = _STDERR_BYTES - len(self._stderr)
            self._stderr_cut = self._stderr_cut or len(data) > room
            self._stderr += data[: max(0, room)]

    def _lost(self) -> SshError:
        transport = self._channel.get_transport()
        said = f" ({transport.goodbye})" if isinstance(transport, SshTransport) and transport.goodbye else ""
        return SshError(self._host.name, SshFailure.LOST, f"the connection ended while a command ran{said}")

    def _reads_no_more(self) -> SshError:
        return SshError(self._host.name, SshFailure.LOST, "the command no longer reads its input")


class SshConnection:
    """See `cluster.ssh.connection.Connection`; made by `cluster.ssh.pool.SshPool`."""

    def __init__(self, host: Host, transport: SshTransport, stall_s: float) -> None:
        self._host, self._transport, self._stall_s = host, transport, stall_s

    @property
    def host(self) -> Host:
        """The host that this connection leads to."""
        return self._host

    @property
    def transport(self) -> SshTransport:
        """paramiko's transport, for channels of other kinds."""
        return self._transport

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
    ) -> CommandResult:
        """Run a command and wait for its end; see `Connection.run`."""
        deadline = Deadline.after(timeout_s)
        process = self._start(argv, max_output_bytes, deadline)
        try:
            process.feed(stdin)
            return process.wait(deadline.left_s)
        except SshError as error:
            if error.kind is SshFailure.COMMAND_TIMEOUT:
                raise _command_timeout(self._host, timeout_s) from error
            raise
        finally:
            process.close()

    def start(self, argv: Sequence[str]) -> SshProcess:
        """Start a command; see `Connection.start`."""
        return self._start(argv, DEFAULT_OUTPUT_BYTES, Deadline.after(self._host.connect_timeout_s))

    def forward(self, serve: Callable[[paramiko.Channel], None]) -> int:
        """A port on the loopback of the host; `serve` gets what connects to it there, each in a thread of its own."""

        def handle(channel: paramiko.Channel, origin: tuple[str, int], server: tuple[str, int]) -> None:
            threading.Thread(target=serve, args=(channel,), name=f"port of {self._host.name}", daemon=True).start()

        try:
            return self._transport.forward_port(handle, self._host.connect_timeout_s)
        except (paramiko.SSHException, OSError, EOFError) as error:
            text = f"cannot forward a port: {words(error)}"
            raise SshError(
                self._host.name, SshFailure.PROTOCOL, text, "AllowTcpForwarding in its sshd_config?"
            ) from error

    def close(self) -> None:
        """End the connection."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, argv: Sequence[str], max_output_bytes: int, deadline: Deadline) -> SshProcess:
        command = quote_command(argv)
        limit_s = deadline.left_s
        channel: paramiko.Channel | None = None
        try:
            channel = self._transport.open("session", limit_s)
            self._transport.exec(channel, command, deadline.left_s)
        except (paramiko.SSHException, OSError, EOFError) as error:
            if channel is not None:
                channel.close()
            raise self._cannot_start(error, deadline, limit_s) from error
        return SshProcess(self._host, channel, max_output_bytes, self._stall_s)

    def _cannot_start(self, error: Exception, deadline: Deadline, limit_s: float) -> SshError:
        if not self._transport.is_active():
            said = f" ({self._transport.goodbye})" if self._transport.goodbye else ""
            return SshError(self._host.name, SshFailure.LOST, f"the connection has ended{said}")
        if deadline.is_over or isinstance(error, TimeoutError):
            return _command_timeout(self._host, limit_s)
        text, remedy = f"cannot start a command: {words(error)}", "too many at once (MaxSessions of its sshd)?"
        return SshError(self._host.name, SshFailure.PROTOCOL, text, remedy)


def _command_timeout(host: Host, timeout_s: float) -> SshError:
    return SshError(host.name, SshFailure.COMMAND_TIMEOUT, f"a command did not end within {timeout_s:.3g} s")
