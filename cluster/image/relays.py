"""The relays of one push as the launcher has them: a pull-through cache on each node, beside the port that feeds it."""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
import threading
import time
from typing import Any

import paramiko
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cluster.code import node_code, program_words
from cluster.errors import SshError, SshFailure
from cluster.image.archive import PackedImage
from cluster.image.node.registry import Door, Handler, Limiter
from cluster.remote_text import one_line
from cluster.ssh.connection import RemoteProcess
from cluster.ssh.session import SshConnection

_START_S = 30.0
_LAST_WORDS_S = 2.0
_MAX_LINE_BYTES = 1 << 16


class PushSecrets:
    """What one push makes up: tokens for engines and for relays, and the one certificate that its relays believe."""

    def __init__(self) -> None:
        self.token, self.peer_token = secrets.token_hex(16), secrets.token_hex(16)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "burst image push")])
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=400)  # clocks of nodes may be wrong; the key is gone when the push ends
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        self.certificate = certificate.public_bytes(pem).decode()
        self.key = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain).decode()


class Feed:
    """What one node's engine pulls from: `ports` on its loopback, best first. Everything ends with `close`."""

    def __init__(
        self, connection: SshConnection, image: PackedImage, push: PushSecrets, limiter: Limiter, stall_s: float
    ) -> None:
        self.connection, self._push, self._stall_s = connection, push, stall_s
        self._door = Door(image.blobs, push.token, limiter)
        self.problem, self._relayed = "", 0
        self._peer: tuple[str, int] | None = None
        self._process: RemoteProcess | None = None
        self._follower: threading.Thread | None = None
        self._buffered = bytearray()
        port = connection.forward(self._serve)
        self.ports = [port]
        self._launcher = {"address": "127.0.0.1", "port": port, "token": push.token}

    @property
    def sent_bytes(self) -> int:
        """What left this machine for this node."""
        return self._door.sent

    @property
    def received_bytes(self) -> int:
        """What came to this node, from wherever."""
        return self._relayed or self._door.sent

    def start_relay(self, blobs: dict[str, tuple[str, int]], limit: float | None, *, feeds_others: bool) -> None:
        """Start it; without one (`problem` says why) the engine pulls from here."""
        tls = self._push.certificate + self._push.key if feeds_others else None
        setup = {"blobs": blobs, "limit": limit, "certificate": tls, "stall_s": self._stall_s}
        setup |= {"token": self._push.token, "peer_token": self._push.peer_token}
        try:
            self._process = self.connection.start(program_words("cluster.image.node.relay", "burst-image-relay"))
            self._process.write(node_code() + _line(setup))
            said = self._next_line(time.monotonic() + _START_S)
            port, peer = int(said["port"]), said["peer"]
            self._peer = None if peer is None else (str(peer[0]), int(peer[1]))
        except (SshError, ValueError, KeyError, TypeError, IndexError) as error:
            self.problem = f"no relay there ({self._last_words() or one_line(str(error))}): it pulls from here"
            return
        self.ports.insert(0, port)

    def link(self, feeders: list[Feed]) -> None:
        """Tell the relay whom to ask, the first first; begins to follow it."""
        if len(self.ports) == 1 or self._process is None:
            return
        upstreams: list[dict[str, Any]] = [
            {
                "address": feeder._peer[0],
                "port": feeder._peer[1],
                "token": self._push.peer_token,
                "certificate": self._push.certificate,
            }
            for feeder in feeders
            if feeder._peer is not None
        ]
        with contextlib.suppress(SshError):
            self._process.write(_line([*upstreams, self._launcher]))
        self._follower = threading.Thread(target=self._follow, name="relay", daemon=True)
        self._follower.start()

    def end_relay(self) -> None:
        """End the relay; `received_bytes` are final then. Who is fed by it goes on with those before it."""
        if self._process is None:
            return
        self._process.close_stdin()
        if self._follower is not None:
            self._follower.join(_LAST_WORDS_S)  # it reads to the end: nobody else may, or the last count is lost
        self._process.close()

    def close(self) -> None:
        """End the relay and the connection."""
        self.end_relay()
        self.connection.close()

    def _serve(self, channel: paramiko.Channel) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException, ValueError), channel:
            Handler(channel, ("", 0), self._door)  # type: ignore[arg-type]  # what it needs of sockets, channels have

    def _follow(self) -> None:
        alive_at = time.monotonic()
        assert self._process is not None
        while True:
            try:
                self._relayed = int(self._next_line(time.monotonic() + self._stall_s)["received"])
            except SshError as error:
                if error.kind is not SshFailure.COMMAND_TIMEOUT:
                    return
            except (ValueError, KeyError, TypeError):
                return
            if time.monotonic() - alive_at >= self._stall_s:
                alive_at = time.monotonic()
                with contextlib.suppress(SshError):
                    self._process.write(b"\n")

    def _next_line(self, until: float) -> dict[str, Any]:
        """What the relay says next; ValueError for nonsense, or at its end."""
        assert self._process is not None
        while b"\n" not in self._buffered:
            data = self._process.read(4096, max(0.01, until - time.monotonic()))
            if not data or len(self._buffered) > _MAX_LINE_BYTES:
                raise ValueError("it ended")
            self._buffered += data
        line, _, rest = self._buffered.partition(b"\n")
        self._buffered = rest
        said = json.loads(line)
        if not isinstance(said, dict):
            raise ValueError("not an object")
        return said

    def _last_words(self) -> str:
        """What it wrote on stderr, such as that there is no python3."""
        if self._process is None:
            return ""
        try:
            self._process.close_stdin()
            return one_line(self._process.wait(2.0).stderr)
        except SshError:
            return ""


def _line(value: Any) -> bytes:
    return json.dumps(value).encode("ascii") + b"\n"
