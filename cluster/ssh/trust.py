"""burst's own known_hosts: the host keys that `burst hosts trust` has accepted. Written whole or not at all."""

from __future__ import annotations

import base64
import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError, SshError, SshFailure
from cluster.ssh.certificates import fingerprint, key_type
from cluster.ssh.hosts import Host
from cluster.ssh.known_hosts import HostKeys, is_name, parse_line, trust_file
from cluster.ssh.pool import SshPool
from engine.runs.files import replace_file

# What is asked for in turn; a server shows one key at a time, the first that it has of what is asked for.
_FAMILIES = (("ssh-ed25519",), ("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"), ("ssh-rsa",))


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


def fetch_keys(host: Host, pool: SshPool) -> tuple[ShownKey, ...]:
    """Every key that the server shows, at least one, compared with what is known. Raises SshError if it shows none."""
    known = pool.known_keys(host)
    shown: list[bytes] = []
    failure: SshError | None = None
    for family in _FAMILIES:
        try:
            key = pool.show_key(host, family)
        except SshError as error:
            if error.kind is not SshFailure.PROTOCOL:
                raise
            failure = error
            continue
        shown.append(key)
    if not shown:
        assert failure is not None
        raise failure
    return judge_keys(host, shown, known)


def judge_keys(host: Host, shown: Sequence[bytes], known: HostKeys) -> tuple[ShownKey, ...]:
    """The keys that a server showed with what `known` says of each."""
    found = known.find(host.key_name)
    trusted = {entry.blob for entry in found}
    revoked = {entry.blob for entry in known.keys if entry.marker == "@revoked"}
    # A server of which keys are known and that shows none of them is another one, whatever types its keys have.
    is_stranger = bool(found) and trusted.isdisjoint(shown)
    kinds = {entry.kind for entry in found}

    def state(blob: bytes) -> str:
        if blob in revoked:
            return "revoked"
        if blob in trusted:
            return "known"
        return "changed" if is_stranger or key_type(blob) in kinds else "new"

    return tuple(ShownKey(host, blob, state(blob)) for blob in shown)


def add_keys(keys: Sequence[ShownKey], file: Path | None = None) -> int:
    """How many of `keys` were added to the trust store; those already there are left alone.

    Raises ClusterError, and adds nothing, when the store holds another key of the same type for one of the names.
    """
    path = file or trust_file()
    with _locked(path):
        lines = _lines(path)
        present = HostKeys.load([str(path)])
        added = []
        for key in keys:
            same = [known for known in present.find(key.host.key_name) if known.kind == key.kind]
            if any(known.blob != key.blob for known in same):
                raise ClusterError(
                    f"{key.host.name}: {path} holds another {key.kind} key; nothing was added. If the node was "
                    f"installed anew: `{key.host.command('hosts', 'forget')}`"
                )
            if not same and key.line not in added:
                added.append(key.line)
        if added:
            _write(path, [*lines, *added])
    return len(added)


def forget_names(names: Sequence[str], file: Path | None = None) -> int:
    """How many entries of the trust store no longer name any of `names`; lines that name others keep those."""
    path = file or trust_file()
    if not path.exists():
        return 0
    with _locked(path):
        kept: list[str] = []
        changed = 0
        for line in _lines(path):
            left = _without(line, names)
            changed += left != line
            kept += [left] if left is not None else []
        if changed:
            _write(path, kept)
    return changed


def _without(line: str, names: Sequence[str]) -> str | None:
    """`line` without these names; None when no other is left. Patterns with * stay: they stand for others, too."""
    known = parse_line(line, "")
    if known is None or known.marker:
        return line
    kept = [pattern for pattern in known.patterns if not any(is_name(pattern, name) for name in names)]
    if len(kept) == len(known.patterns):
        return line
    if not any(not pattern.startswith("!") for pattern in kept):
        return None
    return " ".join([",".join(kept), *line.split(None, 1)[1:]])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return []


def _write(path: Path, lines: Sequence[str]) -> None:
    """Replace the file by these lines at once, so that a reader sees the old ones or the new ones."""
    replace_file(path, "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time; the lock is a file beside, for the store itself is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (path.parent / f".{path.name}.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
