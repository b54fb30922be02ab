"""Logging in by key: which keys and certificates are offered to a node. Never a password, never a question."""

from __future__ import annotations

import contextlib
import copy
import socket
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.pkey import PublicBlob

from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.ssh.certificates import certified_key, fingerprint, out_of_date, read_certificate
from cluster.ssh.connection import Deadline
from cluster.ssh.hosts import Host
from cluster.ssh.transport import SshTransport, words

_KEY_FILE_BYTES = 1 << 16


def log_in(host: Host, transport: SshTransport, deadline: Deadline) -> None:
    """Offer key after key until the server takes one. Raises SshError (AUTH, TIMEOUT, PROTOCOL)."""
    with _agent_of(host, deadline.left_s / 2) as held:
        offers, skipped = _offered_keys(host, held)
        if any(_accepts(host, transport, deadline, key) for key in offers.values()):
            return
    text = f"accepts none of our keys for user {host.user} (tried: {', '.join(offers) or 'none'}"
    text += f"; skipped: {', '.join(skipped)})" if skipped else ")"
    remedy = "add your public key to its authorized_keys, or set cluster.ssh.user or cluster.ssh.identity_file"
    raise SshError(host.name, SshFailure.AUTH, text, remedy)


def _offered_keys(host: Host, held: Sequence[AgentKey]) -> tuple[dict[str, paramiko.PKey], list[str]]:
    """(keys for `host` by what messages call them, in the order of trial: what is certified first, then its identity
    files, then the agent's; what cannot be offered, each with the reason).
    """
    plain: dict[str, paramiko.PKey] = {}
    certified: dict[str, paramiko.PKey] = {}
    skipped: list[str] = []
    for path in host.identity_files:
        found = _load(path)
        if isinstance(found, paramiko.PKey):
            plain[path] = found
        elif found:
            skipped.append(f"{path} ({found})")
    for key in _allowed(host, held):
        place, name = (plain, "") if key.blob == certified_key(key.blob) else (certified, "certificate ")
        if all(offer.asbytes() != key.asbytes() for offer in place.values()):
            place[f"agent's {name}{fingerprint(key.blob)}"] = key
    for path in _certificate_files(host):
        blob = _public_blob(path) or b""
        certificate = read_certificate(blob)
        if certificate is None:
            continue
        if fault := out_of_date(certificate):
            skipped.append(f"{path} ({fault})")
        else:
            certified.update(
                (path, _with_certificate(key, blob)) for key in plain.values() if key.asbytes() == certified_key(blob)
            )
    return certified | plain, skipped


def _accepts(host: Host, transport: SshTransport, deadline: Deadline, key: paramiko.PKey) -> bool:
    """Whether the server lets us in with `key`."""
    transport.auth_timeout = max(0.01, deadline.left_s)
    try:
        missing = transport.auth_publickey(host.user, key)
    except (paramiko.SSHException, OSError, EOFError) as error:
        if not deadline.left_s:
            text = f"the SSH server does not finish the log-in of user {host.user}"
            raise SshError(host.name, SshFailure.TIMEOUT, text, "is the node overloaded?") from error
        if transport.is_active():
            return False
        if "authentication" in transport.goodbye.lower():
            text, remedy = f"refused user {host.user}: {transport.goodbye}", "set cluster.ssh.identity_file"
            raise SshError(host.name, SshFailure.AUTH, text, remedy) from error
        text = f"the connection ended during the log-in: {transport.goodbye or words(error)}"
        raise SshError(host.name, SshFailure.PROTOCOL, text) from error
    if missing:
        text = f"wants more than a key from user {host.user}: {one_line(', '.join(missing))}"
        raise SshError(host.name, SshFailure.AUTH, text, "burst logs in by key alone")
    return True


@contextlib.contextmanager
def _agent_of(host: Host, timeout_s: float) -> Iterator[Sequence[AgentKey]]:
    """The keys of the agent of `host`, which sign until the end; none when there is no agent or it does not answer."""
    agent: Any = AgentSSH()
    with socket.socket(socket.AF_UNIX) as connection:
        with contextlib.suppress(OSError, paramiko.SSHException, ValueError):
            connection.settimeout(max(0.01, timeout_s))
            connection.connect(host.agent_socket)
            agent._connect(connection)
        yield agent.get_keys()


def _allowed(host: Host, held: Sequence[AgentKey]) -> Iterator[AgentKey]:
    """Those of the agent's keys that may be offered. One that is a certificate is sent and signed with as such."""
    files = [*host.identity_files, *(f"{path}.pub" for path in host.identity_files), *_certificate_files(host)]
    named = {certified_key(blob) for path in files if host.identities_only and (blob := _public_blob(path))}
    for key in held:
        if not host.identities_only or certified_key(key.blob) in named:
            if key.blob != certified_key(key.blob):
                key.inner_key = None  # type: ignore[attr-defined]  # paramiko would send the plain key in place of an RSA certificate
            yield key


def _certificate_files(host: Host) -> list[str]:
    """Those that the configuration names, and those that lie beside the keys."""
    return [*host.certificate_files, *(f"{path}-cert.pub" for path in host.identity_files)]


def _with_certificate(key: paramiko.PKey, blob: bytes) -> paramiko.PKey:
    kind = paramiko.Message(blob).get_text()
    certified = AgentKey(key.agent, key.blob) if isinstance(key, AgentKey) else copy.copy(key)
    certified.public_blob = PublicBlob(kind, blob)
    return certified


def _public_blob(path: str) -> bytes | None:
    """The public key or certificate in a file; None where there is none."""
    try:
        with Path(path).open("rb") as stream:
            return PublicBlob.from_string(stream.read(_KEY_FILE_BYTES).decode()).key_blob
    except (OSError, ValueError, paramiko.SSHException):
        return None


def _load(path: str) -> paramiko.PKey | str:
    """The key in a file, or in words why there is none; empty words when there is no such file."""
    try:
        return _read(path, Path(path).stat().st_mtime_ns)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error.strerror or error)
    except (TypeError, paramiko.PasswordRequiredException):
        return "encrypted; burst asks for no passphrase: ssh-add it"
    except Exception:  # a damaged or foreign file makes the libraries below stumble in many ways
        return "not a private key that can be read here"


@lru_cache(maxsize=64)  # hundreds of nodes take the same few
def _read(path: str, changed_ns: int) -> paramiko.PKey:
    key = paramiko.PKey.from_path(path)
    key.public_blob = None  # the certificate beside it: it is renewed more often than the key, and the key counts, too
    return key
