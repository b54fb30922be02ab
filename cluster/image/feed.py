"""What the launcher has of one node in a push: the port that feeds it, and perhaps a relay there."""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import threading
import time
from collections.abc import Iterable, Mapping

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cluster.agent.messages import Message
from cluster.code import NodeProgram
from cluster.errors import ClusterError
from cluster.image.node.registry import Blob, Door
from cluster.remote_text import one_line
from cluster.ssh.connection import Deadline, begin, within
from cluster.ssh.session import SshConnection

_RELAY = ("cluster.image.node.relay", "burst-image-relay")
_SILENCE_S = 30.0
_HEARTBEAT_S = 0.5
_LAST_WORDS_S = 2.0
_NO_ANSWER = (ClusterError, ValueError, LookupError, TypeError)


def new_certificate() -> str:
    """A certificate that names itself, and its key (PEM): those who have both believe each other, and nobody else."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "burst image push")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=400)  # clocks of nodes may be wrong; the key is gone when the push ends
    certificate = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now - day, now + day
    ).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    return (certificate.public_bytes(pem) + private).decode()


class Limiter:
    """At most `rate` bytes per second through `take`, shared by all threads that use it."""

    def __init__(self, rate: float | None) -> None:
        self._rate, self._free_at, self._lock = rate or math.inf, 0.0, threading.Lock()

    def take(self, size: int) -> None:
        """Wait until `size` bytes may go."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + size / self._rate
        time.sleep(start - now)


class Feed:
    """What one node's engine pulls from: `ports` on its loopback, best first.

    sent_bytes: what left this machine for the node. notes: what did not go as planned.
    """

    def __init__(self, connection: SshConnection, blobs: Mapping[str, Blob], token: str, limiter: Limiter) -> None:
        self.connection, self._limiter = connection, limiter
        self._door = Door(blobs, token, on_bytes=self._count)
        self.sent_bytes, self._relayed, self._lock = 0, 0, threading.Lock()
        self.notes: list[str] = []
        self.ports = [connection.forward(self._door.answer)]
        self._relay: tuple[NodeProgram, str, int] | None = None  # and where peers reach it, by TLS
        self._asking = threading.Lock()

    @property
    def received_bytes(self) -> int:
        """What came to this node, from wherever."""
        return self._relayed or self.sent_bytes

    def start_relay(self, certificate: str) -> None:
        """Start it: then the engine asks it first, and peers with the certificate may. Why there is none is noted."""
        blobs = {digest: blob.size for digest, blob in self._door.blobs.items()}
        try:
            program = NodeProgram(self.connection, words=_RELAY)
            setup = {"blobs": blobs, "token": self._door.token, "certificate": certificate}
            said, _ = program.ask(setup, silence_s=_SILENCE_S)
            (address, peer_port), port = said["peer"], int(said["port"])
            self._relay = program, str(address), int(peer_port)
            self.ports.insert(0, port)
        except _NO_ANSWER as error:
            self.notes.append(f"no relay there ({one_line(str(error))}): it pulls from here")

    def follow_relay(self, feeders: Iterable[Feed]) -> None:
        """Tell the relay, if there is one, whom to ask, the first first, and from then on ask how much came."""
        upstreams = [(*feeder._relay[1:], True) for feeder in feeders if feeder._relay is not None]
        if self._relay is not None:
            upstreams.append(("127.0.0.1", self.ports[-1], False))
            begin(functools.partial(self._follow, self._relay[0], {"upstreams": upstreams}))

    def end(self) -> None:
        """End the relay; `received_bytes` are final then. Who is fed by it goes on with those before it."""
        if self._relay is not None:
            with contextlib.suppress(TimeoutError, *_NO_ANSWER):
                within(Deadline.after(_LAST_WORDS_S), functools.partial(self._ask, self._relay[0], {}))
            self._relay[0].close()

    def _follow(self, program: NodeProgram, question: Message) -> None:
        while True:  # until it does not answer: then it is let go of
            self._ask(program, question)
            question = {}
            time.sleep(_HEARTBEAT_S)

    def _ask(self, program: NodeProgram, question: Message) -> None:
        with self._asking:
            said, _ = program.ask(question, silence_s=_SILENCE_S)
            self._relayed = int(said["received"])
            if (note := one_line(str(said["note"]), 400)) and note not in self.notes:
                self.notes.append(note)

    def _count(self, size: int) -> None:
        self._limiter.take(size)
        with self._lock:
            self.sent_bytes += size
