"""A pull-through cache on a node: its engine and the next node read from it what it fetches from the node before it.

Bytes go out while they arrive (cut-through). A node before it that breaks off is left out, the launcher is the last one
asked. Started over SSH, told what to do by messages on stdin, gone when stdin ends or is silent.
Python 3.9, standard library only.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import socketserver
import ssl
import threading
import time
from typing import Any

from cluster.agent.messages import Message, serve
from cluster.image.node.registry import PIECE_BYTES, Blob, Door, Handler, Limiter

_TOGETHER_S = 0.05  # for the other requests that an engine makes at the same time
_CONNECT_S = 10.0
_DEAD_S = 3  # a node before this one that does not even acknowledge for so long


class Upstream:
    """Where blobs come from; `certificate` (PEM) makes it TLS with nobody else."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._where, self._token = (str(facts["address"]), int(facts["port"])), str(facts["token"])
        self._context: ssl.SSLContext | None = None
        if facts.get("certificate"):
            self._context = ssl.create_default_context(cadata=facts["certificate"])
            self._context.check_hostname = False

    def read(self, digest: str, blob: Blob) -> None:
        """Append what is missing of a blob, as far as it comes, and as there is room for it here."""
        connection = self._connection()
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.connect()
            # It may have nothing to send for long: then its kernel says whether it is still there.
            connection.sock.settimeout(None)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1)):
                connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _DEAD_S)
            path = f"/v2/{self._token}/burst/blobs/{digest}"
            connection.request("GET", path, headers={"Range": f"bytes={blob.have}-"})
            response = connection.getresponse()
            while response.status == 206 and (data := response.read1(PIECE_BYTES)):
                blob.append(data)

    def _connection(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(*self._where, timeout=_CONNECT_S)
        return http.client.HTTPSConnection(*self._where, timeout=_CONNECT_S, context=self._context)


class Relay:
    """The blobs of one push on this node, each fetched once: of those that are asked for, the first in their order.

    Engines ask for several layers at once, each in an order of its own. Nodes that fetched in these would wait for one
    another's layers; in one order, bytes of a layer pass through all of them while they arrive.
    """

    def __init__(self, blobs: dict[str, Blob]) -> None:
        self.blobs = blobs
        self._upstreams: list[Upstream] = []
        self._wanted: set[str] = set()
        self._asked = threading.Condition()

    def want(self, digest: str) -> None:
        """Fetch a blob, or what is still missing of it by then."""
        self.blobs[digest].set_failed(False)
        with self._asked:
            self._wanted.add(digest)
            self._asked.notify()

    def start(self, upstreams: list[Upstream]) -> None:
        """Begin to fetch."""
        self._upstreams = upstreams
        _thread(self._run)

    def received(self) -> int:
        """Bytes that came so far."""
        return sum(blob.have for blob in self.blobs.values())

    def _run(self) -> None:
        while True:
            digest = self._next()
            blob = self.blobs[digest]
            while blob.have != blob.size:
                self._upstreams[0].read(digest, blob)
                if blob.have != blob.size and len(self._upstreams) == 1:
                    blob.set_failed(True)
                    break
                if blob.have != blob.size:
                    del self._upstreams[0]

    def _next(self) -> str:
        with self._asked:
            is_idle = not self._wanted
            self._asked.wait_for(lambda: self._wanted)
        if is_idle:
            time.sleep(_TOGETHER_S)
        with self._asked:
            digest = next(digest for digest in self.blobs if digest in self._wanted)
            self._wanted.remove(digest)
            return digest


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A door on a socket, with TLS where a context is given."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, door: Door, context: ssl.SSLContext | None = None) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), Handler)
        self.door, self._context = door, context
        _thread(self.serve_forever)

    def get_request(self) -> tuple[Any, Any]:
        """A connection; the handshake comes with the first read, in the thread of that connection."""
        connection, address = super().get_request()
        if self._context is not None:
            connection = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: whoever broke off asks again."""


class _Answers:
    """What a relay answers: first, where its doors are; then it learns whom to ask; then, how much came."""

    def __init__(self) -> None:
        self._relay = Relay({})

    def __call__(self, asked: Message, data: bytes) -> tuple[Message, bytes]:
        if "blobs" in asked:
            return self._open_doors(asked), b""
        if "upstreams" in asked:
            self._relay.start([Upstream(facts) for facts in asked["upstreams"]])
        return {"received": self._relay.received()}, b""

    def _open_doors(self, asked: Message) -> Message:
        relay = self._relay = Relay({digest: Blob(kind, size) for digest, (kind, size) in asked["blobs"].items()})
        engine = _Server("127.0.0.1", Door(relay.blobs, asked["token"], Limiter(None), relay.want))
        peer, address = None, _own_address() if asked["certificate"] else None
        if address is not None:
            door = Door(relay.blobs, asked["peer_token"], Limiter(asked["limit"]), relay.want)
            peer = [address, _Server(address, door, _tls(asked["certificate"])).server_address[1]]
        return {"port": engine.server_address[1], "peer": peer}


def _tls(certificate: str) -> ssl.SSLContext:
    """A server with this certificate and key (PEM), which touch no disk."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    memory = os.memfd_create("certificate")
    try:
        os.write(memory, certificate.encode("ascii"))
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


def _own_address() -> str | None:
    """The address of this node by which the launcher, or its jump host, reached it."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else None


def _thread(target: Any) -> None:
    threading.Thread(target=target, daemon=True).start()


def main() -> None:
    """See the module."""
    serve(_Answers())
    os._exit(0)
