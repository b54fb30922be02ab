"""Which host keys are trusted: known_hosts files, read line by line so that one damaged line spoils nothing.

A key counts when a line has it for one of the host's names, or when an authority that a line has for them certified it.
burst's own file has what `burst hosts trust` accepted; it is written whole or not at all.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import hmac
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import SshError, SshFailure
from cluster.ssh.certificates import fingerprint, fits, key_type, objection, signer
from cluster.ssh.hosts import Host
from engine.runs.files import replace_file

_MARKERS = ("", "@revoked", "@cert-authority")
_WITH_PORT = re.compile(r"\[(.*)\]:\d+")


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file.

    patterns: names, `[name]:port`, `*` and `?`, `!` in front of one that is left out, `|1|SALT|HASH`. marker: empty,
    @revoked or @cert-authority.
    """

    patterns: tuple[str, ...]
    blob: bytes
    file: str
    marker: str = ""

    @property
    def kind(self) -> str:
        """Its type, such as ssh-ed25519."""
        return key_type(self.blob)

    def matches(self, name: str) -> bool:
        """Whether the line speaks of `name`."""
        found = [pattern for pattern in self.patterns if _matches(pattern.removeprefix("!"), name)]
        return bool(found) and not any(pattern.startswith("!") for pattern in found)


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
        names = {host.key_name, _bare(host.key_name)}
        return tuple(key for key in self.keys if key.marker == "@cert-authority" and any(map(key.matches, names)))

    def check(self, host: Host, blob: bytes, certificate: bytes = b"") -> None:
        """Raise SshError unless the key `blob` is trusted: by itself, or by the certificate that was shown with it."""
        shown = f"{key_type(blob)} {fingerprint(blob)}"
        if self._is_revoked(blob) or self._is_revoked(signer(certificate)):
            whose = "host key" if self._is_revoked(blob) else "certificate's authority"
            text, remedy = f"its {whose} is marked as revoked: it shows {shown}", "the node needs a new host key"
            raise SshError(host.name, SshFailure.HOST_KEY_CHANGED, text, remedy)
        authorities = self.authorities(host)
        fault = objection(certificate, _bare(host.key_name), [key.blob for key in authorities])
        found = self.find(host.key_name)
        if not fault or any(known.blob == blob for known in found):
            return
        reason = f"; its certificate does not count: {fault}" if certificate else ""
        if authorities and not certificate:
            reason = f"; {authorities[0].file} has a @cert-authority for it, but it shows no certificate"
        if found:
            text = f"its host key is not the one that is known: it shows {shown}, not {_known_in_words(found)}{reason}"
            forget, trust = _way_to_forget(host, found[0]), host.command("hosts", "trust")
            remedy = f"if the node was installed anew: `{forget}`, then `{trust}`"
            raise SshError(host.name, SshFailure.HOST_KEY_CHANGED, text, remedy)
        remedy = f"compare the fingerprint, then: `{host.command('hosts', 'trust')}`"
        if authorities:
            remedy = f"let the authority certify the key anew; or {remedy}"
        raise SshError(host.name, SshFailure.HOST_KEY_UNKNOWN, f"its host key is unknown: {shown}{reason}", remedy)

    def state_of(self, host: Host, blob: bytes) -> str:
        """What a key is to us that `host` shows: `known`, `new`, `changed` or `revoked`."""
        found = [key.blob for key in self.find(host.key_name)]
        if self._is_revoked(blob):
            return "revoked"
        return "known" if blob in found else "changed" if found else "new"

    def _is_revoked(self, blob: bytes) -> bool:
        return any(key.blob == blob for key in self.keys if key.marker == "@revoked")


@dataclass(frozen=True)
class ShownKey:
    """A key that the server of `host` showed, by nothing proven yet; `state` as `HostKeys.state_of` has it."""

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


def trust_file() -> Path:
    """burst's own known_hosts: ~/.config/burst/known_hosts, or below XDG_CONFIG_HOME."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "burst" / "known_hosts"


def parse_line(line: str, file: str) -> KnownKey | None:
    """The key of one line; None for comments and lines that make no sense."""
    words = line.split(None, 4)
    marker = words.pop(0) if words and words[0].startswith("@") else ""
    if len(words) < 3 or words[0].startswith("#") or marker not in _MARKERS:
        return None
    try:
        blob = base64.b64decode(words[2].encode(), validate=True)
    except (binascii.Error, ValueError):
        return None
    return KnownKey(tuple(words[0].split(",")), blob, file, marker) if key_type(blob) == words[1] else None


def add_keys(keys: Sequence[ShownKey]) -> None:
    """Add `keys` to the trust store; those already there are left alone."""
    with _rewriting() as lines:
        lines += [line for line in dict.fromkeys(key.line for key in keys) if line not in lines]


def forget_names(names: Sequence[str]) -> None:
    """Take the lines that are about one of `names` alone, as ours are, out of the trust store."""
    with _rewriting() as lines:
        lines[:] = [line for line in lines if line.split(" ")[0] not in names]


def _read(file: str) -> list[KnownKey]:
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [key for line in text.split("\n") if (key := parse_line(line, file)) is not None]


def _bare(name: str) -> str:
    """The name without its port: certificates name hosts, not ports."""
    found = _WITH_PORT.fullmatch(name)
    return found[1] if found else name


def _matches(pattern: str, name: str) -> bool:
    return _is_hash_of(pattern, name.lower()) if pattern.startswith("|1|") else fits(pattern, name)


def _is_hash_of(pattern: str, name: str) -> bool:
    try:
        _, _, salt, digest = pattern.split("|")
        return hmac.compare_digest(hmac.digest(base64.b64decode(salt), name.encode(), "sha1"), base64.b64decode(digest))
    except (binascii.Error, ValueError):
        return False


def _way_to_forget(host: Host, key: KnownKey) -> str:
    if key.file == str(trust_file()):
        return host.command("hosts", "forget")
    return f"ssh-keygen -R {shlex.quote(host.key_name)} -f {shlex.quote(key.file)}"


def _known_in_words(keys: Sequence[KnownKey]) -> str:
    return " or ".join(f"{key.kind} {fingerprint(key.blob)} (in {key.file})" for key in keys)


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
