"""The relays of one push as the launcher has them: a pull-through cache on each node, beside the port that feeds it."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import paramiko
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cluster.code import NodeProgram
from cluster.errors import ClusterError
from cluster.image.archive import PackedImage
from cluster.image.node.registry import Door, Handler, Limiter
from cluster.remote_text import one_line
from cluster.ssh.session import SshConnection

_RELAY = ("cluster.image.node.relay", "burst-image-relay")
_START_S = 30.0
_BEAT_S = 0.5
_LAST_WORDS_S = 2.0
_NO_ANSWER = (ClusterError, ValueError, KeyError, TypeError, IndexError)


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

    def __init__(self, connection: SshConnection, image: PackedImage, push: PushSecrets, limiter: Limiter) -> None:
        self.connection, self._image, self._push = connection, image, push
        self._door = Door(image.blobs, push.token, limiter)
        self._relayed, self._peer = 0, dict[str, Any]()
        self._program: NodeProgram | None = None
        self._follower: threading.Thread | None = None
        self._is_over = threading.Event()
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

    def start_relay(self, limit: float | None, *, feeds_others: bool) -> str:
        """Start it. Returns why there is none; empty when there is one, which the engine asks first then."""
        tls = self._push.certificate + self._push.key if feeds_others else None
        blobs = {digest: (blob.media_type, blob.size) for digest, blob in self._image.blobs.items()}
        setup = {"blobs": blobs, "limit": limit, "certificate": tls, "token": self._push.token}
        try:
            self._program = NodeProgram(self.connection, words=_RELAY)
            said, _ = self._program.ask({**setup, "peer_token": self._push.peer_token}, silence_s=_START_S)
            port, peer = int(said["port"]), said["peer"]
            if peer is not None:
                facts = {"address": str(peer[0]), "port": int(peer[1]), "token": self._push.peer_token}
                self._peer = {**facts, "certificate": self._push.certificate}
        except _NO_ANSWER as error:
            return f"no relay there ({one_line(str(error))}): it pulls from here"
        self.ports.insert(0, port)
        return ""

    def link(self, feeders: Sequence[Feed]) -> None:
        """Tell the relay, if there is one, whom to ask, the first first; begins to follow it."""
        if self._program is None or len(self.ports) == 1:
            return
        upstreams = [*(feeder._peer for feeder in feeders if feeder._peer), self._launcher]
        with contextlib.suppress(ClusterError):
            self._program.ask({"upstreams": upstreams}, silence_s=_START_S)
            self._follower = threading.Thread(target=self._follow, args=(self._program,), name="relay", daemon=True)
            self._follower.start()

    def end_relay(self) -> None:
        """End the relay; `received_bytes` are final then. Who is fed by it goes on with those before it."""
        self._is_over.set()
        if self._follower is not None:
            self._follower.join(_LAST_WORDS_S)
        if self._program is not None:
            self._program.close()

    def _serve(self, channel: paramiko.Channel) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException, ValueError), channel:
            Handler(channel, ("", 0), self._door)  # type: ignore[arg-type]  # what it needs of sockets, channels have

    def _follow(self, program: NodeProgram) -> None:
        """Ask how much came, which is a sign of life, too; the last time when it is over."""
        with contextlib.suppress(*_NO_ANSWER):
            is_over = False
            while not is_over:
                is_over = self._is_over.wait(_BEAT_S)
                self._relayed = int(program.ask({}, silence_s=_START_S)[0]["received"])
