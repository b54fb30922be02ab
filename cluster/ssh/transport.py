"""One SSH connection up to the log-in: the server proves its key, we offer ours. Never a password, never a question.

Keys and certificates as SSH sends them, and which of them are trusted for a host: its key counts when a line of a
known_hosts file has it for one of the host's names, or when an authority that a line has for them certified it. Files
are read line by line, so that one damaged line spoils nothing. burst's own has what `burst hosts trust` accepted; it is
written whole or not at all. Around them paramiko's transport with its gaps closed: endless packets and windows, timers,
words that get lost.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import fcntl
import hashlib
import hmac
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.hazmat.primitives.serialization.ssh import (
    SSHCertificate,
    SSHCertificateType,
    SSHCertPublicKeyTypes,
    load_ssh_public_identity,
)
from paramiko.agent import AgentKey, AgentSSH
from paramiko.buffered_pipe import BufferedPipe
from paramiko.packet import Packetizer
from paramiko.pkey import PublicBlob
from paramiko.transport import ChannelMap

from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.ssh.connection import Deadline
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


def clear_names(names: Sequence[str]) -> None:
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


# --- the connection ---------------------------------------------------------------------------------------------------


WINDOW_BYTES = 1 << 20

# Without a handler Python prints paramiko's tracebacks of failed handshakes on stderr; ours are errors with a text.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class BoundedPacketizer(Packetizer):
    """Reads packets of bounded size."""

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        """`n` bytes of a packet."""
        if n > WINDOW_BYTES:
            raise paramiko.SSHException(f"a packet of {n} bytes is not SSH")
        return bytes(super().read_all(n, check_rekey))

    def start_handshake(self, timeout: float) -> None:
        """No timer: paramiko's is a thread that outlives a failed handshake and delays the end of the process."""


class BoundedPipe(BufferedPipe):  # type: ignore[type-arg]
    """A stream of a server that keeps to the window; paramiko itself takes whatever comes into memory."""

    def feed(self, data: bytes) -> None:
        """Take what came."""
        if len(self) > 2 * WINDOW_BYTES:
            raise paramiko.SSHException("the server sends more than it may")
        super().feed(data)


class BoundedChannels(ChannelMap):
    """Channels, whoever opened them, none of which takes more than its window."""

    def put(self, chanid: int, chan: paramiko.Channel) -> None:
        """Take a channel for which nothing has come yet."""
        chan.in_buffer, chan.in_stderr_buffer = BoundedPipe(), BoundedPipe()
        super().put(chanid, chan)


class SshTransport(paramiko.Transport):
    """One SSH connection, not yet begun. goodbye: what the server said when it disconnected."""

    packetizer: BoundedPacketizer
    host_key: paramiko.PKey
    goodbye = ""

    def __init__(self, sock: socket.socket | paramiko.Channel) -> None:
        super().__init__(sock, default_window_size=WINDOW_BYTES, packetizer_class=BoundedPacketizer)
        self._channels = BoundedChannels()
        options = self.get_security_options()
        # A counter mode with a separate checksum costs twice the time of AES-GCM on machines with AES instructions.
        options.ciphers = sorted(options.ciphers, key=lambda cipher: "gcm" not in cipher)

    def shake_hands(self, host: Host, known: HostKeys, deadline: Deadline) -> None:
        """Exchange keys, so that the server's host key can be looked at.

        Types of keys that are known are asked for first, or a server with several may show one that nobody has seen;
        certificates even before these where an authority may certify the host. Raises SshError (TIMEOUT, PROTOCOL).
        """
        options, types = self.get_security_options(), [line.key.kind for line in known.find(host.key_name)]
        certified = [f"{kind}{SUFFIX}" for kind in options.key_types] if known.authorities(host) else []
        # known_hosts knows nothing of the names of an RSA key's signatures.
        plain = sorted(options.key_types, key=lambda kind: re.sub("^rsa-.*", "ssh-rsa", kind) not in types)
        options.key_types = (*certified, *plain)
        self.banner_timeout = deadline.left_s + 1  # paramiko's own ends after 15 s, whatever the deadline is
        done = threading.Event()
        self.start_client(event=done)
        if not done.wait(deadline.left_s):
            silent = "stays silent" if not self.remote_version else "does not finish its handshake"
            text, remedy = f"connected, but the SSH server {silent}", "is the node overloaded or its sshd stopped?"
            raise SshError(host.name, SshFailure.TIMEOUT, text, remedy)
        if not (self.is_active() and self.initial_kex_done):
            said = self.goodbye or words(self.get_exception() or EOFError("it closed the connection"))
            remedy = (
                "is it an SSH server? does plain `ssh` reach it? its MaxStartups drops log-ins when many come at once"
            )
            raise SshError(host.name, SshFailure.PROTOCOL, f"no SSH handshake: {said}", remedy)

    def key_shown(self) -> PublicKey:
        """The server's key, proven, or its certificate of that key where it showed one."""
        key = self.host_key  # paramiko's own question fails where the server has left since
        shown = PublicKey(key.public_blob.key_blob) if key.public_blob is not None else PublicKey()
        return shown if shown.plain == key.asbytes() else PublicKey(key.asbytes())

    def get_exception(self) -> Exception | None:
        """Why the connection ended; what a message that makes no sense made of paramiko is an SSHException, too."""
        error = super().get_exception()
        if error is None or isinstance(error, paramiko.SSHException | EOFError | OSError):
            return error
        return paramiko.SSHException(f"a message makes no sense ({type(error).__name__})")

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        message.get_int()
        self.goodbye = one_line(message.get_binary())


class KeyFiles:
    """Private keys by file: hundreds of nodes take the same few, and reading a large one takes a second."""

    def __init__(self) -> None:
        self._lock, self._keys = threading.Lock(), dict[tuple[str, int], paramiko.PKey]()

    def read(self, path: str) -> paramiko.PKey:
        """The key in a file; raises whatever libraries below do where there is none."""
        place = path, Path(path).stat().st_mtime_ns
        with self._lock:
            if place not in self._keys:
                self._keys[place] = paramiko.PKey.from_path(path)
                # The certificate beside it is renewed more often than the key, and the key counts, too.
                self._keys[place].public_blob = None
            return self._keys[place]


def log_in(host: Host, transport: SshTransport, files: KeyFiles, deadline: Deadline) -> None:
    """Offer key after key until the server takes one. Raises SshError (AUTH, TIMEOUT, PROTOCOL)."""
    with _agent_of(host, deadline.left_s / 2) as held:
        offers, skipped = _offered_keys(host, files, held)
        if any(_accepts(host, transport, deadline, key) for _, key in offers):
            return
    text = f"accepts none of our keys for user {host.user} (tried: {', '.join(name for name, _ in offers) or 'none'}"
    text += f"; skipped: {', '.join(skipped)})" if skipped else ")"
    remedy = "add your public key to its authorized_keys, ssh-add one that has a passphrase, or set cluster.ssh.user"
    raise SshError(host.name, SshFailure.AUTH, text, remedy)


def _offered_keys(
    host: Host, files: KeyFiles, held: Sequence[AgentKey]
) -> tuple[list[tuple[str, paramiko.PKey]], list[str]]:
    """(keys for `host` with what messages call them, in the order of trial: what is certified first, then its identity
    files, then the agent's; what cannot be offered, each with the reason).
    """
    plain, certified = dict[PublicKey, tuple[str, paramiko.PKey]](), dict[PublicKey, tuple[str, paramiko.PKey]]()
    skipped = list[str]()
    for path in host.identity_files:
        try:
            key = files.read(path)
            plain[PublicKey(key.asbytes())] = path, key
        except FileNotFoundError:
            continue
        except Exception as error:  # a damaged or foreign file makes the libraries stumble in many ways
            skipped.append(f"{path} ({words(error)})")
    certificates = [*host.certificate_files, *(f"{path}-cert.pub" for path in host.identity_files)]
    named = [*certificates, *host.identity_files, *(f"{path}.pub" for path in host.identity_files)]
    allowed = {_public_key(path).plain for path in named}
    for held_key in held:
        shown = PublicKey(held_key.blob)
        if host.identities_only and shown.plain not in allowed:
            continue
        if shown == shown.plain:
            plain.setdefault(shown, (f"agent's {shown.fingerprint}", held_key))
        else:
            held_key.inner_key = None  # type: ignore[attr-defined]  # paramiko would send the plain key in place of an RSA certificate
            certified[shown] = f"agent's certificate {shown.fingerprint}", held_key
    for path in certificates:
        shown = _public_key(path)
        if (found := shown.certificate) is not None and shown.plain in plain:
            name = path if counts_now(found) else f"{path}, which is out of date"
            certified[shown] = name, _certified(plain[shown.plain][1], shown)
    return [*certified.values(), *plain.values()], skipped


def _accepts(host: Host, transport: SshTransport, deadline: Deadline, key: paramiko.PKey) -> bool:
    """Whether the server lets us in with `key`."""
    transport.auth_timeout = max(0.01, deadline.left_s)
    try:
        missing = transport.auth_publickey(host.user, key)
    except Exception as error:  # whatever a message of the server makes of paramiko
        if deadline.is_over:
            text = f"the SSH server does not finish the log-in of user {host.user}"
            raise SshError(host.name, SshFailure.TIMEOUT, text, "is the node overloaded?") from error
        if transport.is_active():
            return False
        kind = SshFailure.AUTH if transport.goodbye else SshFailure.PROTOCOL
        text = f"the connection ended during the log-in of user {host.user}: {transport.goodbye or words(error)}"
        raise SshError(host.name, kind, text, "set cluster.ssh.identity_file") from error
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


def _certified(key: paramiko.PKey, certificate: PublicKey) -> paramiko.PKey:
    found = AgentKey(key.agent, key.blob) if isinstance(key, AgentKey) else copy.copy(key)
    found.public_blob = PublicBlob(certificate.kind, certificate)
    return found


def _public_key(path: str) -> PublicKey:
    """The public key or certificate in a file; empty where there is none."""
    with contextlib.suppress(OSError, ValueError, paramiko.SSHException):
        return PublicKey(PublicBlob.from_file(path).key_blob)
    return PublicKey()


def words(error: BaseException) -> str:
    """What an exception says, or its name when it says nothing."""
    said = getattr(error, "strerror", None) or getattr(error, "text", None) or str(error)
    return one_line(said or type(error).__name__)
