"""One SSH connection up to the log-in: the server proves its key, we offer ours. Never a password, never a question.

paramiko's transport with its gaps closed: endless packets and windows, timers, words that get lost.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.buffered_pipe import BufferedPipe
from paramiko.packet import Packetizer
from paramiko.pkey import PublicBlob
from paramiko.transport import ChannelMap

from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.ssh.connection import Deadline
from cluster.ssh.hosts import Host
from cluster.ssh.keys import SUFFIX, HostKeys, PublicKey, counts_now

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
