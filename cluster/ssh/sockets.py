"""Connections to nodes within a deadline: every address of a name is tried, and the reason of a failure is told."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

from cluster.errors import SshError, SshFailure
from cluster.ssh.deadline import Deadline
from cluster.ssh.hosts import Host

# Of several addresses that fail differently, the answer that says most.
_TELLING = (SshFailure.REFUSED, SshFailure.TIMEOUT, SshFailure.UNREACHABLE)


# (family, type, protocol, name, address) of every address of a name, best first: `socket.getaddrinfo`.
NameService = Callable[[str, int], Sequence[tuple[Any, ...]]]


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
    if host.proxy_command is not None:
        return CommandSocket(host.proxy_command)
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


def _look_up(host: Host, deadline: Deadline, ask: NameService) -> list[tuple[Any, ...]]:
    """Addresses in the system's order of preference, without waiting longer than the deadline for a name server."""
    try:
        return socket.getaddrinfo(
            host.address, host.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError):
        pass
    answers: queue.SimpleQueue[list[tuple[Any, ...]] | Exception] = queue.SimpleQueue()

    def wait() -> None:
        try:
            answers.put(list(ask(host.address, host.port)))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    threading.Thread(target=wait, name=f"look up {host.address}", daemon=True).start()
    try:
        answer = answers.get(timeout=max(0.01, deadline.left_s))
    except queue.Empty:
        text = f"no name server told the address of {host.address} in time"
        raise SshError(host.name, SshFailure.DNS, text, "check /etc/resolv.conf of this machine") from None
    if isinstance(answer, Exception) or not answer:
        text = f"{host.address} has no address"
        raise SshError(host.name, SshFailure.DNS, text, "check the name, /etc/hosts and your SSH configuration")
    return answer


def _failure(host: Host, address: str, error: OSError) -> SshError:
    where = f"{address} port {host.port}" if address == host.address else f"{host.address} ({address}) port {host.port}"
    if isinstance(error, TimeoutError):
        return SshError(host.name, SshFailure.TIMEOUT, f"{where} does not answer", "is the node up?")
    if isinstance(error, ConnectionRefusedError):
        return SshError(host.name, SshFailure.REFUSED, f"{where} refuses connections", "is sshd running?")
    return SshError(host.name, SshFailure.UNREACHABLE, f"{where}: {error.strerror or error}", "is the network up?")
