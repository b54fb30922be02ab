"""`Connection` over SSH: name, socket, host key, log-in, each within the one deadline of the host.

What several connections of a verb share lies in an `SshPool` that is handed around: jump hosts, keys, known hosts.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import paramiko

from cluster.errors import SshError, SshFailure
from cluster.ssh.connection import DEFAULT_OUTPUT_BYTES, CommandResult, quote_command
from cluster.ssh.deadline import Deadline
from cluster.ssh.handshake import DroppedError, log_in, open_tunnel, shake_hands, words
from cluster.ssh.hosts import Host
from cluster.ssh.known_hosts import HostKeys
from cluster.ssh.process import STALL_S, SshProcess
from cluster.ssh.sockets import open_socket
from cluster.ssh.transport import KEEPALIVE_S, SshTransport, keep_alive

# One sshd lets few strangers in at the same time (MaxStartups 10:30:100) and drops the others.
STRANGERS = 8
_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.2
JUMP_RETRY_S = 30.0


def connect(host: Host) -> SshConnection:
    """A logged-in connection to `host`, with a way of its own through its jump host. Raises SshError with the kind that
    says which step failed.
    """
    pool = SshPool()
    try:
        return pool.connect(host, is_own=True)
    except BaseException:
        pool.close()
        raise


class SshConnection:
    """See `cluster.ssh.connection.Connection`; made by `connect`."""

    def __init__(
        self, host: Host, transport: SshTransport, *, stall_s: float = STALL_S, pool: SshPool | None = None
    ) -> None:
        self._host, self._transport, self._stall_s, self._own_pool = host, transport, stall_s, pool

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

    def start(self, argv: Sequence[str], *, max_output_bytes: int = DEFAULT_OUTPUT_BYTES) -> SshProcess:
        """Start a command; see `Connection.start`."""
        return self._start(argv, max_output_bytes, Deadline.after(self._host.connect_timeout_s))

    def forward(self, serve: Callable[[paramiko.Channel], None]) -> int:
        """A port on the loopback of the host; `serve` gets what connects to it there, each in a thread of its own."""

        def handle(channel: paramiko.Channel, origin: tuple[str, int], server: tuple[str, int]) -> None:
            threading.Thread(target=serve, args=(channel,), name=f"port of {self._host.name}", daemon=True).start()

        try:
            return self._transport.request_port_forward("127.0.0.1", 0, handle)
        except (paramiko.SSHException, OSError, EOFError) as error:
            text = f"cannot forward a port: {words(error)}"
            raise SshError(
                self._host.name, SshFailure.PROTOCOL, text, "AllowTcpForwarding in its sshd_config?"
            ) from error

    def close(self) -> None:
        """End the connection, and the way to it if nobody else uses that."""
        self._transport.close()
        if self._own_pool is not None:
            self._own_pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        return SshProcess(self._host, channel, max_output_bytes, stall_s=self._stall_s)

    def _cannot_start(self, error: Exception, deadline: Deadline, limit_s: float) -> SshError:
        if not self._transport.is_active():
            said = f" ({self._transport.goodbye})" if self._transport.goodbye else ""
            return SshError(self._host.name, SshFailure.LOST, f"the connection has ended{said}")
        if deadline.is_over or isinstance(error, TimeoutError):
            return _command_timeout(self._host, limit_s)
        text, remedy = f"cannot start a command: {words(error)}", "too many at once (MaxSessions of its sshd)?"
        return SshError(self._host.name, SshFailure.PROTOCOL, text, remedy)


@dataclass
class _Jump:
    """A jump host of a pool: its one connection, or why there is none."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    transport: SshTransport | None = None
    error: SshError | None = None
    failed_at: float = 0.0


class SshPool:
    """What the connections of one verb share. A context manager; its end closes the jump hosts, not the targets.

    Each jump host is logged in to once, whatever number of targets lies behind it, and a dead one is waited for once.
    keepalive_s: a link that is silent for three times that while we ask for a sign of life is dead. stall_s: writing to
    a command fails when it reads nothing for so long. jump_retry_s: so long nobody tries a dead jump host again.
    """

    def __init__(
        self, *, keepalive_s: float = KEEPALIVE_S, stall_s: float = STALL_S, jump_retry_s: float = JUMP_RETRY_S
    ) -> None:
        self._keepalive_s, self._stall_s, self._jump_retry_s = keepalive_s, stall_s, jump_retry_s
        self._lock = threading.Lock()
        self._jumps: dict[Host, _Jump] = {}
        self._known: dict[tuple[str, ...], HostKeys] = {}
        self._doors: dict[tuple[str, int], threading.BoundedSemaphore] = {}

    def connect(self, host: Host, *, is_own: bool = False) -> SshConnection:
        """A logged-in connection to `host`; see `connect`. is_own: the pool ends with it."""
        deadline = Deadline.after(host.connect_timeout_s)
        transport = self._open(host, deadline, lambda transport: self._enter(host, transport, deadline))
        return SshConnection(host, transport, stall_s=self._stall_s, pool=self if is_own else None)

    def show_key(self, host: Host, types: Sequence[str]) -> paramiko.PKey:
        """The key of one of `types` that the server at `host` shows, trusted or not, without logging in."""
        deadline = Deadline.after(host.connect_timeout_s)

        def look(transport: SshTransport) -> None:
            shake_hands(host, transport, deadline, types, only_these=True)

        transport = self._open(host, deadline, look)
        try:
            return transport.get_remote_server_key()
        finally:
            transport.close()

    def close(self) -> None:
        """End the connections to jump hosts, and with them all that go through."""
        with self._lock:
            jumps, self._jumps = list(self._jumps.values()), {}
        for jump in jumps:
            if jump.transport is not None:
                jump.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, host: Host, deadline: Deadline, use: Callable[[SshTransport], None]) -> SshTransport:
        """A transport to `host` on which `use` succeeded. A server that drops us at its door is asked again."""
        pause_s = _FIRST_PAUSE_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._open_once(host, deadline, use)
            except DroppedError as dropped:
                wait_s = pause_s * random.uniform(0.5, 1.5)
                if attempt == _ATTEMPTS or wait_s >= deadline.left_s:
                    raise dropped.as_error(host, attempt) from dropped
                time.sleep(wait_s)
                pause_s *= 2
        raise AssertionError("unreachable")

    def _open_once(self, host: Host, deadline: Deadline, use: Callable[[SshTransport], None]) -> SshTransport:
        jump = self._jump(host, deadline) if host.jump is not None else None
        door = self._door(host) if jump is None else None
        if door is not None and not door.acquire(timeout=deadline.left_s):
            text = f"{STRANGERS} other log-ins to {host.address} port {host.port} did not end in time"
            raise SshError(host.name, SshFailure.TIMEOUT, text)
        try:
            if jump is None:
                sock = self._open_socket(host, deadline)
                keep_alive(sock, 3 * self._keepalive_s)
                transport = SshTransport(sock, keepalive_s=self._keepalive_s)
            else:
                transport = SshTransport(open_tunnel(host, jump, deadline), keepalive_s=self._keepalive_s)
            try:
                use(transport)
            except BaseException:
                transport.close()
                raise
            return transport
        finally:
            if door is not None:
                door.release()

    def _open_socket(self, host: Host, deadline: Deadline) -> socket.socket:
        """A connection to the host itself, over which nothing has been said."""
        return open_socket(host, deadline)

    def _enter(self, host: Host, transport: SshTransport, deadline: Deadline) -> None:
        """Prove the server's key, log in."""
        known = self.known_keys(host)
        shake_hands(host, transport, deadline, known.types(host.key_names))
        known.check(host, transport.get_remote_server_key().asbytes())
        log_in(host, transport, deadline)
        transport.watch()

    def known_keys(self, host: Host) -> HostKeys:
        """What the files of `host` say of its key; each set of files is read once."""
        # Two threads may read the same files at the same time; both get the same keys.
        if host.known_hosts not in self._known:
            self._known[host.known_hosts] = HostKeys.load(host.known_hosts)
        return self._known[host.known_hosts]

    def _door(self, host: Host) -> threading.BoundedSemaphore:
        with self._lock:
            return self._doors.setdefault((host.address, host.port), threading.BoundedSemaphore(STRANGERS))

    def _jump(self, host: Host, deadline: Deadline) -> SshTransport:
        """The connection to the jump host of `host`, made by whoever needs it first."""
        assert host.jump is not None
        with self._lock:
            jump = self._jumps.setdefault(host.jump, _Jump())
        if not jump.lock.acquire(timeout=deadline.left_s):
            raise SshError(host.name, SshFailure.TIMEOUT, f"jump host {host.jump.name} cannot be reached in time")
        try:
            if jump.transport is not None and jump.transport.is_active():
                return jump.transport
            if jump.error is None or time.monotonic() - jump.failed_at > self._jump_retry_s:
                self._log_in_to_jump(jump, host.jump, deadline)
            if jump.error is None and jump.transport is not None:
                return jump.transport
            error = jump.error
        finally:
            jump.lock.release()
        assert error is not None
        raise SshError(host.name, error.kind, f"jump host {error.host}: {error.detail}", error.remedy)

    def _log_in_to_jump(self, jump: _Jump, host: Host, deadline: Deadline) -> None:
        limit = deadline.at_most(host.connect_timeout_s)
        try:
            jump.transport = self._open(host, limit, lambda transport: self._enter(host, transport, limit))
            jump.error = None
        except SshError as error:
            jump.error, jump.failed_at = error, time.monotonic()


def _command_timeout(host: Host, timeout_s: float) -> SshError:
    return SshError(host.name, SshFailure.COMMAND_TIMEOUT, f"a command did not end within {timeout_s:.3g} s")
