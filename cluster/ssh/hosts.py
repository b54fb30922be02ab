"""One node as SSH must know it, and work on many of them at once. Nothing here connects."""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import re
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.config.errors import BurstError

T = TypeVar("T")
DEFAULT_WIDTH = 64

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")


@dataclass(frozen=True)
class Host:
    """One node.

    name: what people and reports call it. address: what the socket connects to (a name or an IP address).
    key_name: under which known_hosts lists its key (`[address]:port` where port is not 22).
    identity_files, certificate_files: private keys to offer, certificates of them. known_hosts: files with trusted
    keys; only these count.
    jump: the host to go through. proxy_command: instead of a socket, what a shell runs (OpenSSH's ProxyCommand, its
    %-words filled in). identities_only: of the agent's keys offer those that identity_files name, too.
    agent_socket: of the SSH agent; empty: none. overrides: what was typed, see `node_command`.
    """

    name: str
    address: str
    port: int = 22
    user: str = "root"
    key_name: str = ""
    identity_files: tuple[str, ...] = ()
    certificate_files: tuple[str, ...] = ()
    known_hosts: tuple[str, ...] = ()
    jump: Host | None = None
    proxy_command: str | None = None
    connect_timeout_s: float = 10.0
    identities_only: bool = False
    agent_socket: str = ""
    overrides: tuple[str, ...] = ()

    @property
    def way(self) -> tuple[Host, ...]:
        """The jump hosts before it, the outermost first."""
        return (*self.jump.way, self.jump) if self.jump is not None else ()

    def command(self, *verb: str) -> str:
        """`burst VERB` for this node, as one types it."""
        return node_command(self.name, *verb, overrides=self.overrides)


def node_command(node: str, *verb: str, overrides: Iterable[str]) -> str:
    """`burst VERB` for a node, as one types it, with those of `overrides` that say how nodes are reached."""
    words = [word for word in overrides if word.startswith(("cluster=", "cluster.ssh."))]
    return shlex.join(["burst", *verb, *words, "--hosts", node])


def is_host_name(text: str) -> bool:
    """Whether `text` may name a host: letters, digits and `_ . -`, never starting with a dash, or an IPv6 address."""
    if ":" not in text:
        return _NAME.fullmatch(text) is not None
    try:
        return not ipaddress.IPv6Address(text).scope_id
    except ValueError:
        return False


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of one host: `value`, or the error that says why there is none."""

    host: Host
    value: T | None
    error: BurstError | None
    elapsed_s: float


def fan_out(
    hosts: Sequence[Host],
    work: Callable[[Host], T],
    *,
    width: int = DEFAULT_WIDTH,
    on_outcome: Callable[[Outcome[T]], None] = lambda outcome: None,
) -> dict[str, Outcome[T]]:
    """The outcome of `work(host)` by host name, in the order of `hosts`; at most `width` run at the same time.

    `on_outcome` is told of every outcome as it comes, in this thread. A BurstError of one host is its outcome; any
    other exception is a bug and is raised. Every `work` must end by its own timeouts: threads cannot be killed. After
    an interrupt nothing more begins, and what runs does not hold the process: its threads are daemons.
    """
    waiting, done = deque(hosts), queue.SimpleQueue[Outcome[T] | BaseException]()

    def attempt(host: Host) -> Outcome[T] | BaseException:
        begin, value, error = time.monotonic(), None, None
        try:
            value = work(host)
        except BurstError as failure:
            error = failure
        except BaseException as bug:
            return bug
        return Outcome(host, value, error, time.monotonic() - begin)

    def serve() -> None:
        with contextlib.suppress(IndexError):  # none is left
            while True:
                done.put(attempt(waiting.popleft()))

    found: dict[str, Outcome[T]] = {}
    try:
        for number in range(min(max(1, width), len(hosts))):
            threading.Thread(target=serve, name=f"fan-out {number}", daemon=True).start()
        for _ in hosts:
            outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            found[outcome.host.name] = outcome
            on_outcome(outcome)
    finally:
        waiting.clear()
    return {host.name: found[host.name] for host in hosts}
