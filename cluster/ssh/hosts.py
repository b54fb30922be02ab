"""One node as SSH must know it, and how a name becomes that: OpenSSH's own configuration decides (`ssh -G`)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

_NAME = re.compile(r"(?:::|[A-Za-z0-9_])[A-Za-z0-9_.:-]{0,252}")


@dataclass(frozen=True)
class Host:
    """One node. Nothing here connects.

    name: what people and reports call it. address: what the socket connects to (a name or an IP address).
    key_names: under which known_hosts lists its key, in order of preference (`[address]:port` where port is not 22).
    identity_files: private keys to offer. known_hosts: files with trusted keys; only these count.
    jump: the host to go through. proxy_command: instead of a socket, what a shell runs (OpenSSH's ProxyCommand, its
    %-words filled in). identities_only: of the agent's keys offer those that identity_files name, too.
    agent_socket: of the SSH agent; None: that of SSH_AUTH_SOCK, empty: none.
    reached_by: the overrides with which a command reaches it: the name alone may mean nothing.
    """

    name: str
    address: str
    port: int = 22
    user: str = "root"
    key_names: tuple[str, ...] = ()
    identity_files: tuple[str, ...] = ()
    known_hosts: tuple[str, ...] = ()
    jump: Host | None = None
    proxy_command: str | None = None
    connect_timeout_s: float = 10.0
    identities_only: bool = False
    agent_socket: str | None = None
    reached_by: tuple[str, ...] = ()

    def command(self, *verb: str) -> str:
        """`burst VERB` for this node, as one types it."""
        return node_command(self.name, *verb, reached_by=self.reached_by)

    def with_name(self, name: str) -> Host:
        """The same machine under another name."""
        return replace(self, name=name)


def node_command(node: str, *verb: str, reached_by: Sequence[str]) -> str:
    """`burst VERB` for a node of which no more than the name is known, as one types it."""
    return shlex.join(["burst", *verb, *reached_by, "--hosts", node])


def reaching(overrides: Iterable[str]) -> tuple[str, ...]:
    """Those of the overrides that say how nodes are reached."""
    return tuple(word for word in overrides if word.startswith(("cluster=", "cluster.ssh.")))


def is_host_name(text: str) -> bool:
    """Whether `text` may name a host: letters, digits and `_ . : -`, never starting with a dash."""
    return _NAME.fullmatch(text) is not None
