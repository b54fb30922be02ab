"""Connections over SSH, by name, socket, host key and log-in, each within the one deadline of the host; and commands
that run there: streams with timeouts, in bounded memory.

What several connections of a verb share lies in an `SshPool` that is handed around: jump hosts, keys, known hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, Self
from weakref import WeakSet

import paramiko

from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.ssh.connection import OUTPUT_BYTES, CommandResult, Connection, Deadline, RemoteProcess, begin, within
from cluster.ssh.hosts import Host
from cluster.ssh.shell import COMMAND_LINE, NOISE_BYTES, MarkedStream, encode_command, new_mark
from cluster.ssh.transport import WINDOW_BYTES, HostKeys, KeyFiles, ShownKey, SshTransport, log_in, words

# A server with many strangers at its door (MaxStartups 10:30:100) drops some: these come again.
_ATTEMPTS = 5
_PAUSE_S = 0.1
_JUMP_RETRY_S = 5.0


class SshPool:
    """The connections of one verb and what they share. A context manager; its end closes them all.

    Each jump host is logged in to once, whatever number of targets lies behind it; one that failed is tried again by
    who needs it _JUMP_RETRY_S later. patience_s: a link on which nothing is acknowledged for so long is dead, and so is
    a command that reads nothing. Behind a jump host or a ProxyCommand it is these that acknowledge: there, and where an
    sshd has stopped, who asks ends it by the limit of `read` or `wait`: an agent by `LinkTiming.silence_s`, a pull by
    `cluster.image.push.STALL_S`.
    """

    def __init__(self, *, patience_s: float = 30.0) -> None:
        self._patience_s, self._lock, self._files = patience_s, threading.Lock(), KeyFiles()
        self._gates: dict[Host, tuple[float, futures.Future[SshTransport]]] = {}
        self._known: dict[tuple[str, ...], HostKeys] = {}
        self._opened = WeakSet[SshConnection]()

    def connect(self, host: Host) -> SshConnection:
        """A logged-in connection to `host`. Raises SshError with the kind that says which step failed."""
        connection = SshConnection(host, self._log_in(host), self._patience_s)
        with self._lock:
            self._opened.add(connection)
        return connection

    def show_key(self, host: Host) -> ShownKey:
        """The key that the server at `host` shows, of a type that is known where it has one, without logging in."""
        with contextlib.closing(self._greet(host, Deadline.after(host.connect_timeout_s))) as transport:
            shown = transport.key_shown()
            return ShownKey(host, shown.plain, self._known_keys(host).state_of(host, shown))

    def close(self) -> None:
        """End all connections, those to jump hosts last."""
        with self._lock:
            opened, gates = list(self._opened), list(self._gates.values())
        for connection in opened:
            connection.close()
        for _, gate in gates:
            if gate.done() and gate.exception() is None:
                gate.result().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log_in(self, host: Host) -> SshTransport:
        """A transport whose server has proven its key and has let us in."""
        deadline = Deadline.after(host.connect_timeout_s)
        transport = self._greet(host, deadline)
        try:
            self._known_keys(host).check(host, transport.key_shown())
            log_in(host, transport, self._files, deadline)
        except BaseException:
            transport.close()
            raise
        transport.set_keepalive(max(1, int(self._patience_s / 3)))
        return transport

    def _greet(self, host: Host, deadline: Deadline) -> SshTransport:
        """A transport whose server has proven the key that it shows. One that drops us at its door is asked again."""
        for attempt in itertools.count(1):
            sock = self._open(host, deadline)
            transport = SshTransport(sock)
            try:
                transport.shake_hands(host, self._known_keys(host), deadline)
                break
            except BaseException as error:
                transport.close()
                wait_s = _PAUSE_S * 2**attempt * random.uniform(0.5, 1.5)
                was_dropped = isinstance(error, SshError) and error.kind is SshFailure.PROTOCOL
                if not was_dropped or attempt == _ATTEMPTS or 3 * wait_s >= deadline.left_s:
                    if isinstance(sock, CommandSocket) and isinstance(error, SshError) and (said := sock.complaints()):
                        text = f"{error.detail}; the ProxyCommand says: {said}"
                        raise SshError(host.name, error.kind, text, error.remedy) from error
                    raise
            time.sleep(wait_s)
        return transport

    def _open(self, host: Host, deadline: Deadline) -> socket.socket | paramiko.Channel:
        """A connection to the host itself, over which nothing has been said."""
        if host.jump is not None:
            return self._tunnel(host, host.jump, deadline)
        if host.proxy_command is not None:
            return CommandSocket(host.proxy_command)
        sock = open_socket(host, deadline)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel ends it when what was sent, a keepalive at least, is not acknowledged for so long.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._patience_s))
        return sock

    def _tunnel(self, host: Host, gate: Host, deadline: Deadline) -> paramiko.Channel:
        """A channel through the one connection to `gate`, which is made by whoever needs it first."""
        with self._lock:
            tried_at, found = self._gates.get(gate, (0.0, None))
            is_old = time.monotonic() > tried_at + gate.connect_timeout_s + _JUMP_RETRY_S
            if found is None or (found.done() and (is_old if found.exception() else not found.result().is_active())):
                found = begin(lambda: self._log_in(gate))
                self._gates[gate] = time.monotonic(), found
        name, place = f"jump host {gate.name}", (host.address, host.port)
        try:
            way = found.result(deadline.left_s)
            return way.open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=deadline.left_s)
        except SshError as error:
            raise SshError(host.name, error.kind, f"{name}: {error.detail}", error.remedy) from error
        except (paramiko.SSHException, OSError, EOFError) as error:
            kind = SshFailure.TIMEOUT if deadline.is_over else SshFailure.UNREACHABLE
            text = f"{name} gives no way to {host.address} port {host.port}: {words(error)}"
            raise SshError(host.name, kind, text, "is the node up? does the jump host AllowTcpForwarding?") from error

    def _known_keys(self, host: Host) -> HostKeys:
        """What the files of `host` say of its key; each set of files is read once."""
        # Two threads may read the same files at the same time; both get the same keys.
        if host.known_hosts not in self._known:
            self._known[host.known_hosts] = HostKeys.load(host.known_hosts)
        return self._known[host.known_hosts]


class CommandSocket(socket.socket):
    """What a ProxyCommand reads and writes. Closing it ends the command with all that it started.

    Its stderr is read to its end in bounded memory, for errors alone: a proxy says there why there is no way.
    """

    def __init__(self, command: str) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(fileno=ours.detach())
        with theirs:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self._complaints = b""
        self._drain = begin(self._read_stderr)

    def complaints(self) -> str:
        """The end of what it wrote to stderr, in one line; the command is over or about to end."""
        futures.wait([self._drain], _LAST_WORDS_S)
        return one_line(self._complaints, _COMPLAINT_BYTES)

    def close(self) -> None:
        """Close our end, and end the command."""
        super().close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            while data := os.read(stream.fileno(), _WRITE_BYTES):
                self._complaints = (self._complaints + data)[-_COMPLAINT_BYTES:]


def open_socket(host: Host, deadline: Deadline) -> socket.socket:
    """A connected socket. Raises SshError: DNS, REFUSED, TIMEOUT or UNREACHABLE."""
    try:
        # By a thread of its own: a name server that is silent would be waited for longer.
        found = within(deadline, lambda: socket.getaddrinfo(host.address, host.port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:
        late = "which a name server told in time" if isinstance(error, TimeoutError) else "that is known here"
        remedy = "check the name, /etc/hosts, /etc/resolv.conf and your SSH configuration"
        raise SshError(host.name, SshFailure.DNS, f"{host.address} has no address {late}", remedy) from error
    return reach(host, [address[:2] for *_, address in found], deadline)


def reach(host: Host, addresses: Sequence[tuple[Any, ...]], deadline: Deadline) -> socket.socket:
    """A socket to the first of the addresses of `host` that answers. Raises as `open_socket`."""
    failures: list[OSError] = []
    for number, address in enumerate(addresses):
        try:
            return socket.create_connection(address, deadline.left_s / (len(addresses) - number))
        except OSError as error:
            failures.append(error)
    where, failure = f"{host.address} port {host.port}", min(failures, key=lambda failure: type(failure) is OSError)
    if isinstance(failure, TimeoutError):
        raise SshError(host.name, SshFailure.TIMEOUT, f"{where} does not answer", "is the node up?")
    if isinstance(failure, ConnectionRefusedError):
        raise SshError(host.name, SshFailure.REFUSED, f"{where} refuses connections", "is sshd running?")
    raise SshError(host.name, SshFailure.UNREACHABLE, f"{where}: {words(failure)}", "is the network up?")


_WRITE_BYTES = 32_768
_STDERR_BYTES = 1 << 20
_LAST_WORDS_S = 1.0
_COMPLAINT_BYTES = 300
_BROKEN = (OSError, EOFError, paramiko.SSHException)


class SshProcess(RemoteProcess):
    """A command on `channel`, its output between `mark`s; writing fails when it reads nothing for patience_s."""

    def __init__(self, connection: SshConnection, channel: paramiko.Channel, mark: str, patience_s: float) -> None:
        self._connection, self._channel = connection, channel
        self._stdout, self._stderr = MarkedStream(mark), MarkedStream(mark)
        self._unread, self._errors, self._is_cut, self._is_closed = b"", bytearray(), False, False
        # The timeout of a channel is its writer's; its reader waits for this.
        channel.settimeout(patience_s)
        self._is_readable = threading.Event()
        channel.in_buffer.set_event(self._is_readable)
        # stderr has its own reader: both streams share one window, and a full one would stop the other.
        self._drain = begin(self._read_stderr)

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
        code = self._stdout.exit_code if self._stdout.is_over else self._channel_code(deadline)
        futures.wait([self._drain], deadline.left_s)
        return CommandResult(code, bytes(stdout), bytes(self._errors), self._is_cut)

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(*_BROKEN):
            self._channel.close()

    def _channel_code(self, deadline: Deadline) -> int | None:
        """The exit code of a shell that did not live to report that of the command."""
        if not self._channel.status_event.wait(deadline.left_s):
            raise self._connection.command_timeout(deadline)
        code = self._channel.exit_status
        if code == -1:
            # A signal ended it; or the connection did, which closes its channels first and says so a moment later.
            self._connection.transport.join(0.05)
            self._connection.refuse_lost()
        return None if code == -1 else code

    def _read(self, max_bytes: int, deadline: Deadline) -> bytes:
        while not self._unread and not self._stdout.is_over:
            received = self._receive(deadline)
            self._unread = self._stdout.feed(received) if received else self._stdout.rest()
            if not self._stdout.has_started and self._stdout.noise_bytes > NOISE_BYTES:
                raise self._not_run(f"more than {NOISE_BYTES >> 20} MiB came before the output of the command")
            if not received:
                if not self._stdout.has_started and not self._is_closed:
                    futures.wait([self._drain], min(_LAST_WORDS_S, deadline.left_s))
                    raise self._not_run("the command did not run")
                break
        data, self._unread = self._unread[:max_bytes], self._unread[max_bytes:]
        return data

    def _receive(self, deadline: Deadline) -> bytes:
        """What came of stdout, marks included; b"" at its end."""
        if not self._is_readable.wait(deadline.left_s):
            raise self._connection.command_timeout(deadline)
        data = b""
        with contextlib.suppress(*_BROKEN):  # paramiko tells the server what was read, on a connection that has ended
            data = self._channel.recv(WINDOW_BYTES)
        if not data and not self._channel.eof_received:
            self._connection.transport.join(0.05)
            self._connection.refuse_lost()
        return data

    def _not_run(self, text: str) -> SshError:
        """The log-in shell, its start-up files or a forced command did something else than running the command."""
        said = one_line(self._stdout.noise + b" " + self._stderr.noise, 300)
        host = self._connection.host
        remedy = (
            f"`ssh {host.name} true` must print nothing else and end with 0: look at the log-in shell of {host.user}"
        )
        return SshError(host.name, SshFailure.SHELL, f"{text}{f'; its shell says: {said}' if said else ''}", remedy)

    def _keep(self, kept: bytearray, data: bytes, limit: int) -> None:
        room = max(0, limit - len(kept))
        self._is_cut = self._is_cut or len(data) > room
        kept += data[:room]

    def _read_stderr(self) -> None:
        data = b"."
        while data and not self._stderr.is_over:
            try:
                data = self._channel.recv_stderr(_WRITE_BYTES)
                self._keep(self._errors, self._stderr.feed(data) if data else self._stderr.rest(), _STDERR_BYTES)
            except TimeoutError:
                continue
            except _BROKEN:
                return


class SshConnection(Connection):
    """See `Connection`; made by `cluster.ssh.session.SshPool`."""

    def __init__(self, host: Host, transport: SshTransport, patience_s: float) -> None:
        self.host, self.transport, self._patience_s = host, transport, patience_s

    def start(self, argv: Sequence[str]) -> SshProcess:
        mark = new_mark()
        asking = self._asking("start a command", "too many at once (MaxSessions of its sshd)?")
        with asking as deadline, contextlib.ExitStack() as stack:
            channel = self.transport.open_session(timeout=deadline.left_s)
            stack.callback(channel.close)
            within(deadline, lambda: channel.exec_command(COMMAND_LINE))
            channel.settimeout(deadline.left_s)
            try:
                channel.sendall(encode_command(argv, mark))
            except _BROKEN as error:
                if isinstance(error, TimeoutError):
                    raise  # else its shell has ended, and who reads is told why
            stack.pop_all()
        return SshProcess(self, channel, mark, self._patience_s)

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
