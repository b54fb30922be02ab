"""paramiko's transport with its gaps closed: endless banners and packets, dead links, timers, mixed up errors.

No timer threads: who waits has a deadline and closes the transport when it is over.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import paramiko
from paramiko.common import (
    MSG_CHANNEL_DATA,
    MSG_CHANNEL_EXTENDED_DATA,
    MSG_CHANNEL_OPEN_FAILURE,
    cMSG_CHANNEL_REQUEST,
    cMSG_GLOBAL_REQUEST,
)
from paramiko.packet import Packetizer

from cluster.remote_text import one_line

WINDOW_BYTES = 1 << 20
KEEPALIVE_S = 10.0
_PACKET_BYTES = 1 << 20
_LINE_BYTES = 1 << 14
_SILENT_INTERVALS = 3  # so many keepalives without an answer, and the link is dead
# A counter mode with a separate checksum costs twice the time of AES-GCM on machines with AES instructions.
_FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")

# Without a handler Python prints paramiko's tracebacks of failed handshakes on stderr; ours are errors with a text.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class BoundedPacketizer(Packetizer):
    """Reads lines and packets of bounded size and notes when the other side was heard last."""

    heard_at = 0.0
    first_line = ""
    _line_bytes = 0

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        """`n` bytes of a packet."""
        if n > _PACKET_BYTES:
            raise paramiko.SSHException(f"a packet of {n} bytes is not SSH")
        data: bytes = super().read_all(n, check_rekey)
        return data

    def read_message(self) -> Any:
        """The next packet."""
        message = super().read_message()
        self.heard_at = time.monotonic()
        return message

    def readline(self, timeout: float) -> str:
        """The next line before the handshake."""
        line: str = super().readline(timeout)
        self.first_line = self.first_line or line
        return line

    def _read_timeout(self, timeout: float) -> bytes:
        # Only lines before the handshake come through here; a server that never ends one must not fill memory.
        data: bytes = super()._read_timeout(timeout)  # type: ignore[misc]
        self._line_bytes += len(data)
        if self._line_bytes > _LINE_BYTES:
            raise paramiko.SSHException("too much text before the SSH handshake")
        return data

    def start_handshake(self, timeout: float) -> None:
        """No timer: paramiko's is a thread that outlives a failed handshake and delays the end of the process."""


class SshTransport(paramiko.Transport):
    """One SSH connection, not yet begun. goodbye: what the server said when it disconnected.

    keepalive_s: after so long without traffic the server is asked for a sign of life; after three times that, the
    connection ends.
    """

    packetizer: BoundedPacketizer
    # paramiko's own, unknown to its type stubs.
    _handler_table: dict[int, Callable[[paramiko.Message], None]]
    _send_message: Callable[[paramiko.Message], None]
    _send_user_message: Callable[[paramiko.Message], None]
    _channel_handler_table: dict[int, Callable[[paramiko.Channel, paramiko.Message], None]]
    _channels: Any

    def __init__(self, sock: socket.socket | paramiko.Channel, *, keepalive_s: float = KEEPALIVE_S) -> None:
        super().__init__(sock, default_window_size=WINDOW_BYTES, packetizer_class=BoundedPacketizer)
        self.goodbye = ""
        self._keepalive_s, self._asked_at, self._unanswered = keepalive_s, 0.0, 0
        self._opening = threading.local()
        self._open_failures: dict[int, paramiko.ChannelException] = {}
        self._handler_table[MSG_CHANNEL_OPEN_FAILURE] = self._note_open_failure
        self._channel_handler_table = {
            **self._channel_handler_table,
            MSG_CHANNEL_DATA: _within_window(paramiko.Channel._feed),  # type: ignore[attr-defined]
            MSG_CHANNEL_EXTENDED_DATA: _within_window(paramiko.Channel._feed_extended),  # type: ignore[attr-defined]
        }
        options = self.get_security_options()
        fast = [cipher for cipher in options.ciphers if cipher in _FAST_CIPHERS]
        options.ciphers = (*fast, *(cipher for cipher in options.ciphers if cipher not in _FAST_CIPHERS))

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

    def exec(self, channel: paramiko.Channel, command: str, timeout_s: float) -> None:
        """Start `command` on a session channel. paramiko's exec_command waits for the answer without an end."""
        message = paramiko.Message()
        message.add_byte(cMSG_CHANNEL_REQUEST)
        message.add_int(channel.remote_chanid)
        message.add_string("exec")
        message.add_boolean(True)
        message.add_string(command.encode("utf-8", errors="surrogateescape"))
        channel.event.clear()
        channel.event_ready = False
        if channel.closed:
            raise paramiko.SSHException("it ended")
        self._send_user_message(message)
        if not channel.event.wait(timeout_s):
            raise TimeoutError("the server does not answer")
        if not channel.event_ready:
            raise paramiko.SSHException("the server refuses to run commands" if self.is_active() else "it ended")

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
            if number not in self.channel_events:
                return  # about a channel that nobody asked for: a server could fill our memory with those
            self._open_failures[number] = paramiko.ChannelException(code, one_line(reason))
            event = self.channel_events.pop(number, None)
            self._channels.delete(number)
        if event is not None:
            event.set()

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        message.get_int()
        self.goodbye = one_line(message.get_binary())

    def _ask_for_life(self) -> None:
        """Called by the reading thread when nothing moved for keepalive_s."""
        self._unanswered = self._unanswered + 1 if self.packetizer.heard_at < self._asked_at else 0
        self._asked_at = time.monotonic()
        if self._unanswered >= _SILENT_INTERVALS:
            raise EOFError("no sign of life")
        message = paramiko.Message()
        message.add_byte(cMSG_GLOBAL_REQUEST)
        message.add_string("keepalive@openssh.com")
        message.add_boolean(True)
        self._send_message(message)


def _within_window(
    feed: Callable[[paramiko.Channel, paramiko.Message], None],
) -> Callable[[paramiko.Channel, paramiko.Message], None]:
    """`feed` for servers that keep to the window; paramiko itself takes whatever they send into memory."""

    def checked(channel: paramiko.Channel, message: paramiko.Message) -> None:
        if len(channel.in_buffer) + len(channel.in_stderr_buffer) > 2 * WINDOW_BYTES:
            raise paramiko.SSHException("the server sends more than it may")
        feed(channel, message)

    return checked


def keep_alive(sock: socket.socket, silent_s: float) -> None:
    """Let the kernel end a connection when what was sent is not acknowledged for `silent_s`."""
    if sock.family == socket.AF_UNIX:
        return  # a ProxyCommand has the connection
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * 1000))
