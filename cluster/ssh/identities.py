"""Which private keys are offered to a node: identity files and the agent's keys. Never a password, never a question."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import cast

import paramiko
from paramiko.agent import AgentSSH

from cluster.ssh.hosts import Host
from cluster.ssh.known_hosts import fingerprint

_AGENT_TIMEOUT_S = 5.0


class Agent(AgentSSH):
    """The keys of an SSH agent that answers within seconds; its socket closes with it."""

    # paramiko's own, unknown to its type stubs.
    _connect: Callable[[socket.socket], None]
    _close: Callable[[], None]

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__()
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(max(timeout_s, 0.01))
        try:
            connection.connect(path)
            self._connect(connection)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Leave the agent."""
        self._close()


def offered_keys(host: Host, agent: Agent | None) -> tuple[dict[str, paramiko.PKey], list[str]]:
    """(keys for `host` by what messages call them, in the order of trial: its identity files, then the agent's; what
    cannot be offered, each with the reason).
    """
    offers: dict[str, paramiko.PKey] = {}
    skipped: list[str] = []
    for path in host.identity_files:
        found = _load(path)
        if isinstance(found, paramiko.PKey):
            offers[path] = found
        elif found:
            skipped.append(f"{path} ({found})")
    for key in _agent_keys(host, agent):
        if all(offer.asbytes() != key.asbytes() for offer in offers.values()):
            offers[f"agent's {fingerprint(key.asbytes())}"] = key
    return offers, skipped


def open_agent(host: Host, timeout_s: float = _AGENT_TIMEOUT_S) -> Agent | None:
    """A connection to the agent that `host` names; None when there is none or it does not answer."""
    path = os.environ.get("SSH_AUTH_SOCK", "") if host.agent_socket is None else host.agent_socket
    if not path:
        return None
    try:
        return Agent(path, min(timeout_s, _AGENT_TIMEOUT_S))
    except (OSError, paramiko.SSHException, ValueError):
        return None


def _agent_keys(host: Host, agent: Agent | None) -> Iterator[paramiko.PKey]:
    if agent is None:
        return
    named = {blob for path in host.identity_files if (blob := _public_blob(path))} if host.identities_only else None
    for key in cast("tuple[paramiko.PKey, ...]", agent.get_keys()):
        if named is None or key.asbytes() in named:
            yield key


def _public_blob(path: str) -> bytes | None:
    """The key in PATH.pub, or in PATH itself: OpenSSH takes a public key there to say which of the agent's to use."""
    for name in (f"{path}.pub", path):
        try:
            with Path(name).open("rb") as stream:
                return paramiko.pkey.PublicBlob.from_string(stream.read(1 << 16).decode()).key_blob
        except (OSError, ValueError, paramiko.SSHException):
            continue
    return None


def _load(path: str) -> paramiko.PKey | str:
    """The key in a file, or in words why there is none; empty words when there is no such file."""
    try:
        return _read(path, Path(path).stat().st_mtime_ns)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error.strerror or error)


@lru_cache(maxsize=64)  # hundreds of nodes take the same few
def _read(path: str, changed_ns: int) -> paramiko.PKey | str:
    try:
        return paramiko.PKey.from_path(path)
    except (TypeError, paramiko.PasswordRequiredException):
        return "encrypted; burst asks for no passphrase: ssh-add it"
    except OSError:
        raise
    except Exception:  # a damaged or foreign file makes the libraries below stumble in many ways
        return "not a private key that can be read here"
