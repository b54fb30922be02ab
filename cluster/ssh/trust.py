"""burst's own known_hosts: the host keys that `burst hosts trust` has accepted. Written whole or not at all."""

from __future__ import annotations

import base64
import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.ssh.certificates import fingerprint, key_type
from cluster.ssh.hosts import Host
from cluster.ssh.known_hosts import HostKeys, trust_file
from cluster.ssh.pool import SshPool
from engine.runs.files import replace_file


@dataclass(frozen=True)
class ShownKey:
    """A key that the server of `host` showed, by nothing proven yet.

    state: `known`, `new`, `changed` or `revoked`.
    """

    host: Host
    blob: bytes
    state: str

    @property
    def kind(self) -> str:
        """Its type, such as ssh-ed25519."""
        return key_type(self.blob)

    @property
    def fingerprint(self) -> str:
        """SHA256:..., as ssh-keygen -l prints it."""
        return fingerprint(self.blob)

    @property
    def line(self) -> str:
        """The line of known_hosts that trusts it."""
        return f"{self.host.key_name} {self.kind} {base64.b64encode(self.blob).decode()}"


def fetch_key(host: Host, pool: SshPool) -> ShownKey:
    """The key that the server shows, of a type that is known where it has one. Raises SshError if it shows none."""
    return judge_key(host, pool.show_key(host), pool.known_keys(host))


def judge_key(host: Host, blob: bytes, known: HostKeys) -> ShownKey:
    """The key that a server showed with what `known` says of it."""
    trusted = [entry.blob for entry in known.find(host.key_name)]
    if blob in [entry.blob for entry in known.keys if entry.marker == "@revoked"]:
        state = "revoked"
    elif blob in trusted:
        state = "known"
    else:
        state = "changed" if trusted else "new"
    return ShownKey(host, blob, state)


def add_keys(keys: Sequence[ShownKey]) -> None:
    """Add `keys` to the trust store; those already there are left alone."""
    with _rewriting() as lines:
        lines += [line for line in dict.fromkeys(key.line for key in keys) if line not in lines]


def forget_names(names: Sequence[str]) -> None:
    """Take the lines that are about one of `names` alone, as ours are, out of the trust store."""
    with _rewriting() as lines:
        lines[:] = [line for line in lines if line.split(" ")[0] not in names]


@contextlib.contextmanager
def _rewriting() -> Iterator[list[str]]:
    """The lines of the trust store, to be changed by one writer at a time; readers see the old ones or the new ones.

    The lock is a file beside, for the store itself is replaced.
    """
    path = trust_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        old = path.read_bytes() if path.exists() else b""
        lines = old.decode(errors="surrogateescape").splitlines()
        yield lines
        new = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
        if new != old:
            replace_file(path, new)
