"""A command running on a node: its streams with timeouts, in bounded memory."""

from __future__ import annotations

import contextlib
import threading
import time

import paramiko

from cluster.errors import SshError, SshFailure
from cluster.ssh.connection import CommandResult
from cluster.ssh.deadline import Deadline
from cluster.ssh.hosts import Host
from cluster.ssh.transport import WINDOW_BYTES, SshTransport

STALL_S = 120.0
_WRITE_BYTES = 1 << 15
_STDERR_BYTES = 1 << 20
# The timeout of a channel is shared by its readers and writers: each looks at its own deadline this often.
_POLL_S = 0.25


class SshProcess:
    """See `cluster.ssh.connection.RemoteProcess`.

    stall_s: writing fails when the command reads nothing for so long.
    """

    def __init__(
        self, host: Host, channel: paramiko.Channel, max_output_bytes: int, *, stall_s: float = STALL_S
    ) -> None:
        self._host, self._channel, self._limit, self._stall_s = host, channel, max_output_bytes, stall_s
        self._begin = time.monotonic()
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
            raise self._timeout(timeout_s or 0.0)
        if not data and self._is_lost():
            raise self._lost()
        return data

    def wait(self, timeout_s: float) -> CommandResult:
        """The end of the command; reads both streams until then."""
        deadline = Deadline.after(timeout_s)
        stdout, cut = bytearray(), False
        while (data := self._receive(WINDOW_BYTES, deadline)) != b"":
            if data is None:
                raise self._timeout(timeout_s)
            room = self._limit - len(stdout)
            cut = cut or len(data) > room
            stdout += data[: max(0, room)]
        if not self._channel.status_event.wait(deadline.left_s):
            raise self._timeout(timeout_s)
        self._drain.join(deadline.left_s)
        if self._is_lost():
            raise self._lost()
        code = self._channel.exit_status
        return CommandResult(
            None if code == -1 else code,
            bytes(stdout),
            bytes(self._stderr),
            time.monotonic() - self._begin,
            cut or self._stderr_cut,
        )

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

    def _timeout(self, timeout_s: float) -> SshError:
        return SshError(self._host.name, SshFailure.COMMAND_TIMEOUT, f"a command did not end within {timeout_s:.3g} s")

    def _lost(self) -> SshError:
        transport = self._channel.get_transport()
        said = f" ({transport.goodbye})" if isinstance(transport, SshTransport) and transport.goodbye else ""
        return SshError(self._host.name, SshFailure.LOST, f"the connection ended while a command ran{said}")

    def _reads_no_more(self) -> SshError:
        return SshError(self._host.name, SshFailure.LOST, "the command no longer reads its input")
