"""Errors of the cluster tooling, in one tree below `engine.config.errors.BurstError`.

ClusterError               exit code 1
├── SshError               one host could not be reached or used; `kind` says how it failed
└── HostsError             exit code 2: a node list, hostfile or SSH setting is wrong
"""

from __future__ import annotations

import enum

from engine.config.errors import BurstError, ConfigError


class ClusterError(BurstError):
    """A node or a tool of the cluster did not do what it was asked for."""


class HostsError(ConfigError):
    """The list of nodes, or how to reach one of them, makes no sense."""


class SshFailure(enum.StrEnum):
    """The different answers to "why can I not use this host?"; each has its own remedy."""

    DNS = "dns"  # the name has no address
    REFUSED = "refused"  # the machine answers, nobody listens on the port
    UNREACHABLE = "unreachable"  # no route
    TIMEOUT = "timeout"  # nobody answers, or sshd is silent
    HOST_KEY_UNKNOWN = "host_key_unknown"
    HOST_KEY_CHANGED = "host_key_changed"
    AUTH = "auth"  # no key of ours is accepted
    PROTOCOL = "protocol"  # what answers is no SSH server, or it broke off in the handshake
    SHELL = "shell"  # logged in, and the user's log-in shell does not run what it is given
    LOST = "lost"  # the connection ended while it was used
    COMMAND_TIMEOUT = "command_timeout"  # the command ran longer than it may


class SshError(ClusterError):
    """Host `host` failed with `kind`; the text says what to do."""

    def __init__(self, host: str, kind: SshFailure, detail: str, remedy: str = "") -> None:
        self.host, self.kind, self.detail, self.remedy = host, kind, detail, remedy
        super().__init__(f"{host}: {detail}{f'; {remedy}' if remedy else ''}")
