"""Public keys and certificates as SSH sends them, and which of them are trusted for a host: known_hosts files.

A host's key counts when a line has it for one of the host's names, or when an authority that a line has for them
certified it. Files are read line by line, so that one damaged line spoils nothing. burst's own has what
`burst hosts trust` accepted; it is written whole or not at all.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.hazmat.primitives.serialization.ssh import (
    SSHCertificate,
    SSHCertificateType,
    SSHCertPublicKeyTypes,
    load_ssh_public_identity,
)

from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.ssh.hosts import Host, trust_file
from engine.runs.files import replace_file

_MARKERS = {"-": "", "@revoked": "@revoked", "@cert-authority": "@cert-authority"}
SUFFIX = "-cert-v01@openssh.com"


class PublicKey(bytes):
    """A public key, or a certificate of one, as SSH sends it; or bytes that should be one."""

    @property
    def kind(self) -> str:
        """The type that it names itself, such as ssh-ed25519; of what is no key, something else."""
        return self[4 : 4 + int.from_bytes(self[:4], "big")].decode(errors="replace")

    @property
    def text(self) -> str:
        """As it stands in files: its type, and itself in base64."""
        return f"{self.kind} {base64.b64encode(self).decode()}"

    @property
    def fingerprint(self) -> str:
        """SHA256:..., as ssh-keygen -l prints it."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self).digest()).decode().rstrip("=")

    @property
    def certificate(self) -> SSHCertificate | None:
        """What it certifies; None of a plain key, and of what cannot be read here."""
        with contextlib.suppress(ValueError, UnsupportedAlgorithm):
            if self.kind.endswith(SUFFIX):
                found = load_ssh_public_identity(self.text.encode())
                return found if isinstance(found, SSHCertificate) else None
        return None

    @property
    def plain(self) -> PublicKey:
        """The key that a certificate is about; a plain key, and what cannot be read, is returned as it is."""
        return _as_sent(self.certificate.public_key()) if self.certificate is not None else self

    @property
    def authority(self) -> PublicKey:
        """The key that signed a certificate; empty for what is none, or none that can be read."""
        with contextlib.suppress(ValueError, UnsupportedAlgorithm):
            if self.certificate is not None:
                return _as_sent(self.certificate.signature_key())
        return PublicKey()


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file.

    patterns: names, `[name]:port`, `*` and `?`, `!` in front of one that is left out, `|1|SALT|HASH`. marker: empty,
    @revoked or @cert-authority.
    """

    patterns: tuple[str, ...]
    key: PublicKey
    file: str
    marker: str = ""

    def matches(self, name: str) -> bool:
        """Whether the line speaks of `name`."""
        found = [pattern for pattern in self.patterns if _fits(pattern.removeprefix("!"), name.lower())]
        return bool(found) and not any(pattern.startswith("!") for pattern in found)


@dataclass(frozen=True)
class ShownKey:
    """A key that the server of `host` showed, by nothing proven yet; `state` as `HostKeys.state_of` has it."""

    host: Host
    key: PublicKey
    state: str


@dataclass(frozen=True)
class HostKeys:
    """Trusted and revoked keys of any number of files."""

    keys: tuple[KnownKey, ...]

    @classmethod
    def load(cls, files: Sequence[str]) -> HostKeys:
        """The keys in `files`; files that are not there are empty, lines that make no sense are passed over."""
        return cls(tuple(key for file in files for key in _read(file)))

    def find(self, name: str) -> tuple[KnownKey, ...]:
        """Trusted keys that `name` is known by."""
        return tuple(key for key in self.keys if not key.marker and key.matches(name))

    def authorities(self, host: Host) -> tuple[KnownKey, ...]:
        """Whose certificates count for `host`; as in OpenSSH, patterns need not know of its port."""
        names = {host.key_name, _without_port(host)}
        return tuple(key for key in self.keys if key.marker == "@cert-authority" and any(map(key.matches, names)))

    def state_of(self, host: Host, shown: PublicKey) -> str:
        """What a key or certificate is to us that `host` shows: `known`, `new`, `changed` or `revoked`."""
        found, signers = [known.key for known in self.find(host.key_name)], (shown.plain, shown.authority)
        if any(known.marker == "@revoked" and known.key in signers for known in self.keys):
            return "revoked"
        if shown.plain in found:
            return "known"
        if vouches(shown, _without_port(host), [known.key for known in self.authorities(host)]):
            return "known"
        return "changed" if found else "new"

    def check(self, host: Host, shown: PublicKey) -> None:
        """Raise SshError unless what `host` shows is trusted: the key itself, or the certificate that it is in."""
        if (state := self.state_of(host, shown)) == "known":
            return
        found, authorities = self.find(host.key_name), self.authorities(host)
        old = " or ".join(f"{known.key.kind} {known.key.fingerprint} (in {known.file})" for known in found)
        forget, trust = host.command("hosts", "forget"), host.command("hosts", "trust")
        text, remedy = {
            "new": ("is unknown", f"compare the fingerprint, then: `{trust}`"),
            "changed": (
                f"is not the one that is known, {old}",
                f"if it was installed anew: `{forget}`, then `{trust}`",
            ),
            "revoked": ("or the authority that certified it is revoked", "the node needs a new host key"),
        }[state]
        text = f"its host key {text}: it shows {shown.plain.kind} {shown.plain.fingerprint}"
        if shown.certificate is not None:
            text += f", and a certificate that does not count: {_in_words(shown, shown.certificate)}"
        elif authorities:
            text += f", and no certificate; {authorities[0].file} has a @cert-authority for it"
        kind = SshFailure.HOST_KEY_UNKNOWN if state == "new" else SshFailure.HOST_KEY_CHANGED
        raise SshError(host.name, kind, text, remedy)


def vouches(shown: PublicKey, name: str, authorities: Sequence[PublicKey]) -> bool:
    """Whether `shown` is a certificate that counts for the host `name` now."""
    found = shown.certificate
    return (
        found is not None
        and shown.authority in authorities
        and _is_signed(found, shown)
        and found.type is SSHCertificateType.HOST
        and any(_fits(pattern.decode(errors="replace"), name.lower()) for pattern in found.valid_principals)
        and not found.critical_options
        and counts_now(found)
    )


def counts_now(certificate: SSHCertificate) -> bool:
    """Whether a certificate counts by its dates."""
    return certificate.valid_after <= time.time() < certificate.valid_before


def _in_words(shown: PublicKey, certificate: SSHCertificate) -> str:
    begin, end = (time.ctime(min(at, 1 << 40)) for at in (certificate.valid_after, certificate.valid_before))
    names, demands = (
        one_line(b", ".join(texts)) for texts in (certificate.valid_principals, certificate.critical_options)
    )
    by = f"by {shown.authority.fingerprint} for a {certificate.type.name.lower()}, {names or 'of no name'}"
    return f"{by}, from {begin} until {end}{f', demanding {demands}' if demands else ''}"


def add_keys(keys: Sequence[ShownKey]) -> None:
    """Add `keys` to the trust store; those already there are left alone."""
    new = [f"{shown.host.key_name} {shown.key.text}" for shown in keys]
    _rewrite(lambda lines: [*lines, *dict.fromkeys(line for line in new if line not in lines)])


def forget_names(names: Sequence[str]) -> None:
    """Take the lines that are about one of `names` alone, as ours are, out of the trust store."""
    _rewrite(lambda lines: [line for line in lines if line.split(" ")[0] not in names])


def _rewrite(change: Callable[[Sequence[str]], Sequence[str]]) -> None:
    """Change the lines of the trust store, one writer at a time. The lock is a file beside: the store is replaced."""
    path = trust_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        old = path.read_bytes().decode(errors="surrogateescape").splitlines() if path.exists() else []
        if (new := list(change(old))) != old:
            replace_file(path, "".join(f"{line}\n" for line in new).encode(errors="surrogateescape"))


def _read(file: str) -> Iterator[KnownKey]:
    """The keys of a known_hosts file; passes over comments and lines that make no sense."""
    try:
        lines = Path(file).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return
    for line in map(str.strip, lines):
        with contextlib.suppress(ValueError):
            marker, names, kind, encoded, *_ = (line if line.startswith("@") else f"- {line}").split()
            key = PublicKey(base64.b64decode(encoded, validate=True))
            if key.kind == kind and marker in _MARKERS and not names.startswith("#"):
                yield KnownKey(tuple(names.split(",")), key, file, _MARKERS[marker])


def _fits(pattern: str, name: str) -> bool:
    """Whether OpenSSH's pattern means `name`: a hash of it, or a text in which only * and ? are special."""
    if pattern.startswith("|1|"):
        with contextlib.suppress(ValueError):
            salt, digest = map(base64.b64decode, pattern[3:].split("|"))
            return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)
    if "*" not in pattern and "?" not in pattern:
        return pattern.lower() == name
    words = re.escape(pattern.lower()).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(words, name, flags=re.DOTALL) is not None


def _without_port(host: Host) -> str:
    """The name that certificates have for a host."""
    found = re.fullmatch(r"\[(.*)\]:\d+", host.key_name)
    return found[1] if found else host.key_name


def _is_signed(certificate: SSHCertificate, shown: PublicKey) -> bool:
    try:
        certificate.verify_cert_signature()
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    authority = certificate.signature_key()
    # The last of a certificate: the name of the algorithm, a length, the signature itself.
    tail = authority.key_size // 8 + 4 if isinstance(authority, rsa.RSAPublicKey) else 0
    return not (tail and shown[:-tail].endswith(b"\0\0\0\x07ssh-rsa"))


def _as_sent(key: SSHCertPublicKeyTypes) -> PublicKey:
    return PublicKey(base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1]))
