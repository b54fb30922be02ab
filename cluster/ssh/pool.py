"""`Connection` over SSH: name, socket, host key, log-in, each within the one deadline of the host.

What several connections of a verb share lies in an `SshPool` that is handed around: jump hosts, keys, known hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import paramiko

from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.ssh.connection import Deadline
from cluster.ssh.hosts import Host
from cluster.ssh.known_hosts import HostKeys, ShownKey
from cluster.ssh.login import log_in
from cluster.ssh.session import STALL_S, SshConnection
from cluster.ssh.transport import KEEPALIVE_S, DroppedError, SshTransport, shake_hands, words

# A server with many strangers at its door (MaxStartups 10:30:100) drops some: these come again.
_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.2
# Of several addresses that fail differently, the answer that says most.
_TELLING = (SshFailure.REFUSED, SshFailure.TIMEOUT, SshFailure.UNREACHABLE)
# (family, type, protocol, name, address) of every address of a name, best first: `socket.getaddrinfo`.
NameService = Callable[[str, int], Sequence[tuple[Any, ...]]]
_REFUSALS = (
    ("refused", SshFailure.REFUSED, "is sshd running there?"),
    ("timed out", SshFailure.TIMEOUT, "is the node up?"),
    ("not known|resol", SshFailure.DNS, "check the name; the jump host looks it up"),
)
JUMP_RETRY_S = 30.0


@dataclass
class _Jump:
    """A jump host of a pool. found: its one connection, or why there is none, as it was at `tried_at`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    found: SshTransport | SshError | None = None
    tried_at: float = 0.0


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

    def connect(self, host: Host) -> SshConnection:
        """A logged-in connection to `host`. Raises SshError with the kind that says which step failed."""
        transport = self._log_in(host, Deadline.after(host.connect_timeout_s))
        return SshConnection(host, transport, self._stall_s)

    def show_key(self, host: Host) -> ShownKey:
        """The key that the server at `host` shows, of a type that is known where it has one, without logging in."""
        known = self._known_keys(host)
        transport = self._greet(host, Deadline.after(host.connect_timeout_s), wants_certificate=False)
        with contextlib.closing(transport):
            blob, _ = transport.host_key_shown()
            return ShownKey(host, blob, known.state_of(host, blob))

    def close(self) -> None:
        """End the connections to jump hosts, and with them all that go through."""
        for jump in self._jumps.values():
            if isinstance(jump.found, SshTransport):
                jump.found.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log_in(self, host: Host, deadline: Deadline) -> SshTransport:
        """A transport whose server has proven its key and has let us in."""
        known = self._known_keys(host)
        transport = self._greet(host, deadline, wants_certificate=bool(known.authorities(host)))
        try:
            known.check(host, *transport.host_key_shown())
            log_in(host, transport, deadline)
            transport.watch()
        except BaseException:
            transport.close()
            raise
        return transport

    def _greet(self, host: Host, deadline: Deadline, *, wants_certificate: bool) -> SshTransport:
        """A transport whose server has proven the key that it shows. One that drops us at its door is asked again."""
        known = self._known_keys(host)
        for attempt in itertools.count(1):
            transport = SshTransport(self._open_socket(host, deadline), keepalive_s=self._keepalive_s)
            try:
                shake_hands(host, transport, deadline, known, wants_certificate=wants_certificate)
                break
            except DroppedError as dropped:
                transport.close()
                wait_s = _FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                if attempt == _ATTEMPTS or wait_s >= deadline.left_s:
                    text = f"no SSH handshake: {dropped}, tried {attempt} times"
                    remedy = "is it an SSH server? too many log-ins at once are dropped by its MaxStartups"
                    if host.proxy_command is not None:
                        remedy = "your SSH configuration reaches it by a ProxyCommand: does plain `ssh` reach it?"
                    raise SshError(host.name, SshFailure.PROTOCOL, text, remedy) from dropped
                time.sleep(wait_s)
            except BaseException:
                transport.close()
                raise
        return transport

    def _open_socket(self, host: Host, deadline: Deadline) -> socket.socket | paramiko.Channel:
        """A connection to the host itself, over which nothing has been said."""
        if host.jump is not None:
            return open_tunnel(host, host.jump, self._jump(host.jump, host.name, deadline), deadline)
        if host.proxy_command is not None:
            return CommandSocket(host.proxy_command)
        sock = open_socket(host, deadline)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel ends it when what was sent is not acknowledged for so long: a keepalive waits behind that.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(3000 * self._keepalive_s))
        return sock

    def _known_keys(self, host: Host) -> HostKeys:
        """What the files of `host` say of its key; each set of files is read once."""
        # Two threads may read the same files at the same time; both get the same keys.
        if host.known_hosts not in self._known:
            self._known[host.known_hosts] = HostKeys.load(host.known_hosts)
        return self._known[host.known_hosts]

    def _jump(self, gate: Host, target: str, deadline: Deadline) -> SshTransport:
        """The connection to jump host `gate`, made by whoever needs it first."""
        with self._lock:
            jump = self._jumps.setdefault(gate, _Jump())
        if not jump.lock.acquire(timeout=deadline.left_s):
            raise SshError(target, SshFailure.TIMEOUT, f"jump host {gate.name} cannot be reached in time")
        try:
            if isinstance(jump.found, SshTransport) and jump.found.is_active():
                return jump.found
            if not isinstance(jump.found, SshError) or time.monotonic() - jump.tried_at > self._jump_retry_s:
                try:
                    jump.found = self._log_in(gate, deadline.at_most(gate.connect_timeout_s))
                except SshError as error:
                    jump.found = error
                jump.tried_at = time.monotonic()
            found = jump.found
        finally:
            jump.lock.release()
        if isinstance(found, SshError):
            raise SshError(target, found.kind, f"jump host {found.host}: {found.detail}", found.remedy)
        return found


class CommandSocket(socket.socket):
    """What a ProxyCommand reads and writes. Closing it ends the command with all that it started."""

    def __init__(self, command: str) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(fileno=ours.detach())
        with theirs:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def close(self) -> None:
        """Close our end, and end the command."""
        super().close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def open_socket(host: Host, deadline: Deadline, ask: NameService | None = None) -> socket.socket:
    """A connected socket. Raises SshError: DNS, REFUSED, TIMEOUT or UNREACHABLE. ask: the name service."""
    addresses = _look_up(host, deadline, ask or _ask_system)
    failures: list[SshError] = []
    for number, (family, kind, protocol, _, address) in enumerate(addresses):
        share = deadline.at_most(deadline.left_s / (len(addresses) - number))
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(max(0.01, share.left_s))
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            failures.append(_failure(host, str(address[0]), error))
            continue
        return sock
    raise min(failures, key=lambda failure: _TELLING.index(failure.kind))


def _ask_system(name: str, port: int) -> Sequence[tuple[Any, ...]]:
    return socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)


def _look_up(host: Host, deadline: Deadline, ask: NameService) -> Sequence[tuple[Any, ...]]:
    """Addresses in the system's order of preference, without waiting longer than the deadline for a name server."""
    answers: queue.SimpleQueue[Sequence[tuple[Any, ...]]] = queue.SimpleQueue()

    def wait() -> None:
        try:
            answers.put(ask(host.address, host.port))
        except (OSError, UnicodeError):
            answers.put(())

    threading.Thread(target=wait, name=f"look up {host.address}", daemon=True).start()
    try:
        answer = answers.get(timeout=max(0.01, deadline.left_s))
    except queue.Empty:
        text = f"no name server told the address of {host.address} in time"
        raise SshError(host.name, SshFailure.DNS, text, "check /etc/resolv.conf of this machine") from None
    if not answer:
        text = f"{host.address} has no address"
        raise SshError(host.name, SshFailure.DNS, text, "check the name, /etc/hosts and your SSH configuration")
    return answer


def _failure(host: Host, address: str, error: OSError) -> SshError:
    where = f"{address} port {host.port}" if address == host.address else f"{host.address} ({address}) port {host.port}"
    if isinstance(error, TimeoutError):
        return SshError(host.name, SshFailure.TIMEOUT, f"{where} does not answer", "is the node up?")
    if isinstance(error, ConnectionRefusedError):
        return SshError(host.name, SshFailure.REFUSED, f"{where} refuses connections", "is sshd running?")
    return SshError(host.name, SshFailure.UNREACHABLE, f"{where}: {words(error)}", "is the network up?")


def open_tunnel(host: Host, gate: Host, jump: SshTransport, deadline: Deadline) -> paramiko.Channel:
    """A channel through `jump`, the connection to `gate`, to the port of `host`."""
    name = gate.name
    try:
        return jump.open("direct-tcpip", deadline.left_s, (host.address, host.port))
    except paramiko.ChannelException as error:
        detail = one_line(error.text) or "no reason given"
        text = f"jump host {name} cannot connect to {host.address} port {host.port}: {detail}"
        if error.code == 1:
            raise SshError(host.name, SshFailure.UNREACHABLE, text, "allow AllowTcpForwarding in its sshd") from error
        for word, kind, remedy in _REFUSALS:
            if re.search(word, detail.lower()):
                raise SshError(host.name, kind, text, remedy) from error
        raise SshError(host.name, SshFailure.UNREACHABLE, text) from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        if not jump.is_active():
            text = f"the connection to jump host {name} ended"
            raise SshError(host.name, SshFailure.LOST, text) from error
        text = f"jump host {name} gets no answer from {host.address} port {host.port}"
        raise SshError(host.name, SshFailure.TIMEOUT, text, "is the node up?") from error
