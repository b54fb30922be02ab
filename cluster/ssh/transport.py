"""paramiko's transport with its gaps closed: endless banners and packets, dead links, timers, mixed up errors.

No timer threads: who waits has a deadline and closes the transport when it is over.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import paramiko
from paramiko.common import (
    MSG_CHANNEL_DATA,
    MSG_CHANNEL_EXTENDED_DATA,
    MSG_CHANNEL_OPEN_FAILURE,
    MSG_REQUEST_FAILURE,
    MSG_REQUEST_SUCCESS,
    cMSG_GLOBAL_REQUEST,
)
from paramiko.packet import Packetizer

from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.ssh.certificates import SUFFIX
from cluster.ssh.connection import Deadline
from cluster.ssh.hosts import Host
from cluster.ssh.known_hosts import HostKeys

WINDOW_BYTES = 1 << 20
KEEPALIVE_S = 10.0
_SILENT_INTERVALS = 3  # so many keepalives without an answer, and the link is dead

# Without a handler Python prints paramiko's tracebacks of failed handshakes on stderr; ours are errors with a text.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

# Is told the answer to a question: what comes with it, or None where it is refused.
_Note = Callable[[paramiko.Message | None], None]
# The names of an RSA key's signatures, of which known_hosts knows nothing.
_SIGNATURES = {"rsa-sha2-512": "ssh-rsa", "rsa-sha2-256": "ssh-rsa"}


class DroppedError(Exception):
    """The server ended the connection before it knew who we are, as one with too many strangers at its door does."""


class BoundedPacketizer(Packetizer):
    """Reads packets of bounded size. first_line: what the other side said first."""

    first_line = ""

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        """`n` bytes of a packet."""
        if n > WINDOW_BYTES:
            raise paramiko.SSHException(f"a packet of {n} bytes is not SSH")
        data: bytes = super().read_all(n, check_rekey)
        return data

    def readline(self, timeout: float) -> str:
        """The next line before the handshake."""
        line: str = super().readline(timeout)
        self.first_line = self.first_line or line
        return line

    def start_handshake(self, timeout: float) -> None:
        """No timer: paramiko's is a thread that outlives a failed handshake and delays the end of the process."""


class Answer(threading.Event):
    """An answer that may not come: TimeoutError after `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s

    def wait(self, timeout: float | None = None) -> bool:
        """True."""
        if not super().wait(self._timeout_s):
            raise TimeoutError("the server does not answer")
        return True


class SshTransport(paramiko.Transport):
    """One SSH connection, not yet begun. goodbye: what the server said when it disconnected.

    keepalive_s: after so long without traffic the server is asked for a sign of life; after three times that, the
    connection ends.
    """

    packetizer: BoundedPacketizer
    host_key: paramiko.PKey
    # paramiko's own, unknown to its type stubs.
    _handler_table: dict[int, Callable[[paramiko.Message], None]]
    _send_message: Callable[[paramiko.Message], None]
    _send_user_message: Callable[[paramiko.Message], None]
    _channel_handler_table: dict[int, Callable[[paramiko.Channel, paramiko.Message], None]]
    _channels: Any

    def __init__(self, sock: socket.socket | paramiko.Channel, *, keepalive_s: float = KEEPALIVE_S) -> None:
        super().__init__(sock, default_window_size=WINDOW_BYTES, packetizer_class=BoundedPacketizer)
        self.goodbye = ""
        self._keepalive_s = keepalive_s
        self._opening = threading.local()
        self._open_failures: dict[int, paramiko.ChannelException] = {}
        self._handler_table[MSG_CHANNEL_OPEN_FAILURE] = self._note_open_failure
        # paramiko takes any answer for that to its last request: a sign of life, which OpenSSH refuses, for a port's.
        self._asking, self._asked = threading.Lock(), deque[_Note]()
        self._handler_table[MSG_REQUEST_SUCCESS] = self._answered
        self._handler_table[MSG_REQUEST_FAILURE] = lambda _: self._answered(None)
        self._channel_handler_table = {
            **self._channel_handler_table,
            MSG_CHANNEL_DATA: _within_window(paramiko.Channel._feed),  # type: ignore[attr-defined]
            MSG_CHANNEL_EXTENDED_DATA: _within_window(paramiko.Channel._feed_extended),  # type: ignore[attr-defined]
        }
        options = self.get_security_options()
        # A counter mode with a separate checksum costs twice the time of AES-GCM on machines with AES instructions.
        options.ciphers = sorted(options.ciphers, key=lambda cipher: "gcm" not in cipher)

    @property
    def preferred_keys(self) -> Sequence[str]:
        """The types of host keys to ask for; paramiko adds certificates of all of them to what it is told."""
        return self.get_security_options().key_types

    def host_key_shown(self) -> tuple[bytes, bytes]:
        """(the server's key, proven; the certificate that it showed with it, or nothing)."""
        key = self.host_key  # paramiko's own question fails where the server has left since
        return key.asbytes(), key.public_blob.key_blob if key.public_blob is not None else b""

    @property
    def last_words(self) -> str:
        """What the server said when it disconnected, for the end of a sentence."""
        return f" ({self.goodbye})" if self.goodbye else ""

    def watch(self) -> None:
        """Begin to send keepalives; call it once logged in."""
        self.packetizer.set_keepalive(self._keepalive_s, self._ask_for_life)

    def open(self, kind: str, timeout_s: float, address: tuple[str, int] | None = None) -> paramiko.Channel:
        """An open channel. Raises ChannelException with the server's own words, or another SSHException."""
        self._opening.number = None
        try:
            return self.open_channel(kind, address, ("127.0.0.1", 0) if address else None, timeout=timeout_s)
        except (paramiko.SSHException, EOFError, OSError):
            # paramiko keeps one exception per connection: of two channels that fail at once, one gets the other's.
            failure = self._open_failures.pop(self._opening.number, None)
            if failure is not None:
                raise failure from None
            raise

    def forward_port(
        self, handler: Callable[[paramiko.Channel, tuple[str, int], tuple[str, int]], None], timeout_s: float
    ) -> int:
        """A port that the server opened on its loopback for us; `handler` gets every connection to it.

        Raises SSHException where it is refused, TimeoutError without an answer.
        """
        came, answers = Answer(timeout_s), list[paramiko.Message | None]()

        def note(answer: paramiko.Message | None) -> None:
            answers.append(answer)
            came.set()

        self._tcp_handler = handler
        with self._asking:
            self._ask(self._send_user_message, note, "tcpip-forward", "127.0.0.1", 0)
        came.wait()
        if answers[0] is None:
            raise paramiko.SSHException("TCP forwarding request denied")
        return answers[0].get_int()

    def get_exception(self) -> Exception | None:
        """Why the connection ended; what a malformed message made of paramiko is an SSHException, too."""
        error = super().get_exception()
        if error is None or isinstance(error, paramiko.SSHException | EOFError | OSError):
            return error
        return paramiko.SSHException(f"a message makes no sense ({type(error).__name__})")

    def close(self) -> None:
        """End the connection now; no waiting for the reader to look at its flag."""
        if isinstance(self.sock, socket.socket):
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        super().close()
        with contextlib.suppress(OSError, EOFError):
            self.sock.close()

    def _next_channel(self) -> int:
        self._opening.number = super()._next_channel()  # type: ignore[misc]
        return int(self._opening.number)

    def _note_open_failure(self, message: paramiko.Message) -> None:
        number, code = message.get_int(), message.get_int()
        reason = message.get_binary().decode(errors="replace")
        with self.lock:
            event = self.channel_events.pop(number, None)
            if event is None:
                return  # about a channel that nobody asked for: a server could fill our memory with those
            self._open_failures[number] = paramiko.ChannelException(code, one_line(reason))
            self._channels.delete(number)
            event.set()

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        message.get_int()
        self.goodbye = one_line(message.get_binary())

    def _answered(self, message: paramiko.Message | None) -> None:
        """Servers answer requests in their order."""
        if self._asked:
            self._asked.popleft()(message)

    def _ask_for_life(self) -> None:
        """Called by the reading thread when nothing moved for keepalive_s."""
        if len(self._asked) >= _SILENT_INTERVALS:
            raise EOFError("no sign of life")
        if self._asking.acquire(blocking=False):  # else something is just being asked for, and that has an answer, too
            try:
                self._ask(self._send_message, lambda _: None, "keepalive@openssh.com")
            finally:
                self._asking.release()

    def _ask(self, send: Callable[[paramiko.Message], None], note: _Note, kind: str, *facts: object) -> None:
        message = paramiko.Message()
        message.add_byte(cMSG_GLOBAL_REQUEST)
        message.add(kind, True, *facts)
        self._asked.append(note)
        send(message)


def _within_window(
    feed: Callable[[paramiko.Channel, paramiko.Message], None],
) -> Callable[[paramiko.Channel, paramiko.Message], None]:
    """`feed` for servers that keep to the window; paramiko itself takes whatever they send into memory."""

    def checked(channel: paramiko.Channel, message: paramiko.Message) -> None:
        if len(channel.in_buffer) + len(channel.in_stderr_buffer) > 2 * WINDOW_BYTES:
            raise paramiko.SSHException("the server sends more than it may")
        feed(channel, message)

    return checked


def shake_hands(
    host: Host, transport: SshTransport, deadline: Deadline, known: HostKeys, *, wants_certificate: bool
) -> None:
    """Exchange keys, so that the server's host key can be looked at.

    Types of keys that are known are asked for first, or a server with several may show one that nobody has seen;
    certificates even before these where they are wanted. Raises SshError (TIMEOUT, PROTOCOL) or DroppedError.
    """
    options, types = transport.get_security_options(), [key.kind for key in known.find(host.key_name)]
    certified = [f"{kind}{SUFFIX}" for kind in options.key_types] if wants_certificate else []
    plain = sorted(options.key_types, key=lambda kind: _SIGNATURES.get(kind, kind) not in types)
    options.key_types = (*certified, *plain)
    transport.banner_timeout = deadline.left_s + 1  # paramiko's own ends after 15 s, whatever the deadline is
    done = threading.Event()
    transport.start_client(event=done)
    if not done.wait(deadline.left_s):
        silent = "stays silent" if not transport.remote_version else "does not finish its handshake"
        text, remedy = f"connected, but the SSH server {silent}", "is the node overloaded or its sshd stopped?"
        raise SshError(host.name, SshFailure.TIMEOUT, text, remedy)
    if transport.is_active() and transport.initial_kex_done:
        return
    error: BaseException | None = transport.get_exception()
    if str(error).startswith("Error reading SSH protocol banner") and error is not None:
        error = error.__context__  # what paramiko makes its text of
    spoken = one_line(transport.packetizer.first_line)
    if spoken and not spoken.startswith("SSH-"):
        detail = f"it says {spoken!r}"
    else:
        said = "" if error is None or isinstance(error, EOFError) else words(error)
        detail = one_line(transport.goodbye or said or "it closed the connection")
    if transport.goodbye or error is None or isinstance(error, EOFError | OSError):
        raise DroppedError(detail)
    raise SshError(host.name, SshFailure.PROTOCOL, f"no SSH handshake: {detail}", "is it an SSH server?")


def words(error: BaseException) -> str:
    """What an exception says, or its name when it says nothing."""
    return one_line(getattr(error, "strerror", None) or str(error) or type(error).__name__)
