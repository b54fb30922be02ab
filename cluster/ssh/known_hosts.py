"""Which host keys are trusted: known_hosts files, read line by line so that one damaged line spoils nothing."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import shlex
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import SshError, SshFailure
from cluster.ssh.hosts import Host

KNOWN_HOSTS_BYTES = 64 << 20
_PLAIN_TYPE = re.compile(r"[a-z0-9@.-]+")


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file.

    patterns: names, `[name]:port`, `*` and `?`, `!` in front of one that is left out, `|1|SALT|HASH`.
    """

    patterns: tuple[str, ...]
    kind: str
    blob: bytes
    file: str
    is_revoked: bool = False
    is_authority: bool = False  # of host certificates, which paramiko cannot ask a server for

    def matches(self, name: str) -> bool:
        """Whether the line speaks of `name`."""
        found = False
        for pattern in self.patterns:
            if _matches(pattern.removeprefix("!"), name.lower()):
                if pattern.startswith("!"):
                    return False
                found = True
        return found


@dataclass(frozen=True)
class HostKeys:
    """Trusted and revoked keys of any number of files."""

    keys: tuple[KnownKey, ...]

    @classmethod
    def load(cls, files: Sequence[str]) -> HostKeys:
        """The keys in `files`; files that are not there are empty, lines that make no sense are passed over."""
        return cls(tuple(key for file in files for key in _read(file)))

    def find(self, names: Sequence[str]) -> tuple[KnownKey, ...]:
        """Trusted keys that any of `names` is known by."""
        return tuple(key for key in self._named(names) if not key.is_authority)

    def _named(self, names: Sequence[str]) -> list[KnownKey]:
        return [key for key in self.keys if not key.is_revoked and any(key.matches(name) for name in names)]

    def types(self, names: Sequence[str]) -> tuple[str, ...]:
        """Types of the keys that any of `names` is known by."""
        return tuple(dict.fromkeys(key.kind for key in self.find(names)))

    def check(self, host: Host, blob: bytes) -> None:
        """Raise SshError unless the key `blob` is known under one of the host's names and revoked under none."""
        shown = f"{key_type(blob)} {fingerprint(blob)}"
        if any(known.is_revoked and known.blob == blob for known in self.keys):
            text, remedy = f"its host key is marked as revoked: it shows {shown}", "the node needs a new host key"
            raise SshError(host.name, SshFailure.HOST_KEY_CHANGED, text, remedy)
        found = self.find(host.key_names)
        if any(known.blob == blob for known in found):
            return
        if found:
            text = f"its host key is not the one that is known: it shows {shown}, not {_known_in_words(found)}"
            forget, trust = _way_to_forget(host, found[0]), host.command("hosts", "trust")
            remedy = f"if the node was installed anew: `{forget}`, then `{trust}`"
            raise SshError(host.name, SshFailure.HOST_KEY_CHANGED, text, remedy)
        remedy = f"compare the fingerprint, then: `{host.command('hosts', 'trust')}`"
        text = f"its host key is unknown: {shown}"
        if authority := next(iter(self._named(host.key_names)), None):
            text += f"; {authority.file} has a @cert-authority for it, but burst checks no host certificates, only keys"
        raise SshError(host.name, SshFailure.HOST_KEY_UNKNOWN, text, remedy)


def _way_to_forget(host: Host, key: KnownKey) -> str:
    if Path(key.file).expanduser() == trust_file():
        return host.command("hosts", "forget")
    return f"ssh-keygen -R {shlex.quote(host.key_names[0])} -f {shlex.quote(key.file)}"


def trust_file() -> Path:
    """burst's own known_hosts: ~/.config/burst/known_hosts, or below XDG_CONFIG_HOME."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "burst" / "known_hosts"


def fingerprint(blob: bytes) -> str:
    """SHA256:... of a public key as SSH sends it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def key_type(blob: bytes) -> str:
    """The type that a public key itself names, such as ssh-ed25519; empty when it names none."""
    if len(blob) < 4:
        return ""
    (length,) = struct.unpack(">I", blob[:4])
    kind = blob[4 : 4 + min(length, 64)].decode("ascii", errors="replace")
    return kind if length == len(kind) and _PLAIN_TYPE.fullmatch(kind) else ""


def parse_line(line: str, file: str) -> KnownKey | None:
    """The key of one line; None for comments and lines that make no sense."""
    words = line.split(None, 4)
    marker = words.pop(0) if words and words[0].startswith("@") else ""
    if len(words) < 3 or words[0].startswith("#") or marker not in ("", "@revoked", "@cert-authority"):
        return None
    try:
        blob = base64.b64decode(words[2].encode(), validate=True)
    except (binascii.Error, ValueError):
        return None
    if key_type(blob) != words[1]:
        return None
    patterns = tuple(words[0].split(","))
    return KnownKey(patterns, words[1], blob, file, marker == "@revoked", marker == "@cert-authority")


def _read(file: str) -> list[KnownKey]:
    try:
        with Path(file).expanduser().open("rb") as stream:
            text = stream.read(KNOWN_HOSTS_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return []
    return [key for line in text.split("\n") if (key := parse_line(line, file)) is not None]


def is_name(pattern: str, name: str) -> bool:
    """Whether a pattern is this very name, plain or hashed."""
    return _is_hash_of(pattern, name.lower()) if pattern.startswith("|1|") else pattern.lower() == name.lower()


def _matches(pattern: str, name: str) -> bool:
    if not pattern.startswith("|1|") and ("*" in pattern or "?" in pattern):
        # Only * and ? are special: brackets belong to [name]:port.
        words = re.escape(pattern.lower()).replace(r"\*", ".*").replace(r"\?", ".")
        return re.fullmatch(words, name, flags=re.DOTALL) is not None
    return is_name(pattern, name)


def _is_hash_of(pattern: str, name: str) -> bool:
    try:
        _, _, salt, digest = pattern.split("|")
        found = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(found, base64.b64decode(digest))
    except (binascii.Error, ValueError):
        return False


def _known_in_words(keys: Sequence[KnownKey]) -> str:
    first = keys[0]
    more = f" or {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{first.kind} {fingerprint(first.blob)}{more} (in {first.file})"
