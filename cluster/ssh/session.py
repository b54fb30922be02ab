"""A connection to a node over SSH and the commands that run there: streams with timeouts, in bounded memory."""

from __future__ import annotations

import contextlib
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence

import paramiko

from cluster.errors import SshError, SshFailure
from cluster.ssh.connection import OUTPUT_BYTES, CommandResult, Connection, Deadline, RemoteProcess, begin, within
from cluster.ssh.hosts import Host
from cluster.ssh.transport import WINDOW_BYTES, SshTransport, words

_WRITE_BYTES = 1 << 15
_STDERR_BYTES = 1 << 20
_BROKEN = (OSError, EOFError, paramiko.SSHException)


class SshProcess(RemoteProcess):
    """A command on `channel`; writing fails when it reads nothing for patience_s."""

    def __init__(self, connection: SshConnection, channel: paramiko.Channel, patience_s: float) -> None:
        self._connection, self._channel = connection, channel
        self._stderr, self._is_cut = bytearray(), False
        # The timeout of a channel is its writer's; its reader waits for this.
        channel.settimeout(patience_s)
        self._is_readable = threading.Event()
        channel.in_buffer.set_event(self._is_readable)
        # stderr has its own reader: both streams share one window, and a full one would stop the other.
        self._drain = threading.Thread(target=self._read_stderr, name="stderr", daemon=True)
        self._drain.start()

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                sent = self._channel.send(bytes(view[:_WRITE_BYTES]))
                if sent == 0:
                    raise EOFError
                view = view[sent:]
        except _BROKEN as error:
            stuck = f" (for {self._channel.gettimeout():.3g} s)" if isinstance(error, TimeoutError) else ""
            text = f"the command no longer reads its input{stuck}"
            raise SshError(self._connection.host.name, SshFailure.LOST, text) from error

    def close_stdin(self) -> None:
        with contextlib.suppress(*_BROKEN):
            self._channel.shutdown_write()

    def read(self, max_bytes: int, timeout_s: float) -> bytes:
        return self._read(max_bytes, Deadline.after(timeout_s))

    def wait(self, timeout_s: float) -> CommandResult:
        deadline, stdout = Deadline.after(timeout_s), bytearray()
        while data := self._read(WINDOW_BYTES, deadline):
            self._keep(stdout, data, OUTPUT_BYTES)
        if not self._channel.status_event.wait(deadline.left_s):
            raise self._connection.command_timeout(deadline)
        self._drain.join(deadline.left_s)
        code = self._channel.exit_status
        if code == -1:
            # A signal ended it; or the connection did, which closes its channels first and says so a moment later.
            self._connection.transport.join(0.05)
            self._connection.refuse_lost()
        return CommandResult(None if code == -1 else code, bytes(stdout), bytes(self._stderr), self._is_cut)

    def close(self) -> None:
        with contextlib.suppress(*_BROKEN):
            self._channel.close()

    def _read(self, max_bytes: int, deadline: Deadline) -> bytes:
        if not self._is_readable.wait(deadline.left_s):
            raise self._connection.command_timeout(deadline)
        data = b""
        with contextlib.suppress(*_BROKEN):  # paramiko tells the server what was read, on a connection that has ended
            data = self._channel.recv(max_bytes)
        if not data and not self._channel.eof_received:
            self._connection.transport.join(0.05)
            self._connection.refuse_lost()
        return data

    def _keep(self, kept: bytearray, data: bytes, limit: int) -> None:
        room = max(0, limit - len(kept))
        self._is_cut = self._is_cut or len(data) > room
        kept += data[:room]

    def _read_stderr(self) -> None:
        data = b"."
        while data:
            try:
                data = self._channel.recv_stderr(_WRITE_BYTES)
                self._keep(self._stderr, data, _STDERR_BYTES)
            except TimeoutError:
                continue
            except _BROKEN:
                return


class SshConnection(Connection):
    """See `Connection`; made by `cluster.ssh.pool.SshPool`."""

    def __init__(self, host: Host, transport: SshTransport, patience_s: float) -> None:
        self.host, self.transport, self._patience_s = host, transport, patience_s

    def start(self, argv: Sequence[str]) -> SshProcess:
        command = shlex.join(argv).encode("utf-8", errors="surrogateescape")
        asking = self._asking("start a command", "too many at once (MaxSessions of its sshd)?")
        with asking as deadline, contextlib.ExitStack() as stack:
            channel = self.transport.open_session(timeout=deadline.left_s)
            stack.callback(channel.close)
            within(deadline, lambda: channel.exec_command(command))
            stack.pop_all()
        return SshProcess(self, channel, self._patience_s)

    def forward(self, serve: Callable[[paramiko.Channel], None]) -> int:
        """A port on the loopback of the host; `serve` gets what connects to it there, each in a thread of its own."""

        def handle(channel: paramiko.Channel, *_: object) -> None:
            begin(lambda: serve(channel))

        with self._asking("forward a port", "AllowTcpForwarding in its sshd_config?") as deadline:
            return within(deadline, lambda: self.transport.request_port_forward("127.0.0.1", 0, handle))

    def close(self) -> None:
        self.transport.close()

    def command_timeout(self, deadline: Deadline) -> SshError:
        """A command that did not end by `deadline`."""
        text = f"a command did not end within {deadline.limit_s:.3g} s"
        return SshError(self.host.name, SshFailure.COMMAND_TIMEOUT, text)

    def refuse_lost(self) -> None:
        """Raise SshError (LOST) where the connection has ended."""
        if not self.transport.is_active():
            goodbye = f" ({self.transport.goodbye})" if self.transport.goodbye else ""
            raise SshError(self.host.name, SshFailure.LOST, f"the connection ended{goodbye}")

    @contextlib.contextmanager
    def _asking(self, what: str, remedy: str) -> Iterator[Deadline]:
        """For the time in which the server is asked for something; until when it has to answer."""
        deadline = Deadline.after(self.host.connect_timeout_s)
        try:
            yield deadline
        except _BROKEN as error:
            self.refuse_lost()
            kind = SshFailure.COMMAND_TIMEOUT if deadline.is_over else SshFailure.PROTOCOL
            said = "the server does not answer" if deadline.is_over else words(error)
            raise SshError(self.host.name, kind, f"cannot {what}: {said}", remedy) from error
