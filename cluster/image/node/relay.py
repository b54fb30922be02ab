"""A pull-through cache on a node: its engine and the next node read from it what it fetches from the node before it.

Bytes go out while they arrive (cut-through). A node before it that no longer answers is left out, the launcher is the
last one asked. Started over SSH, told what to do by two lines of JSON on stdin, gone when stdin ends or is silent.
Python 3.9, standard library only.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import socketserver
import ssl
import sys
import threading
import time
from typing import Any

from cluster.image.node.registry import PIECE_BYTES, Blob, Door, Handler, Limiter

_BEAT_S = 0.5
_TOGETHER_S = 0.05  # for the other requests that an engine makes at the same time
_SILENCE_S = 40.0  # the launcher says something every few seconds


class Upstream:
    """Where blobs come from; `certificate` (PEM) makes it TLS with nobody else.

    After `stall_s` without a byte it is asked whether it lives.
    """

    def __init__(self, facts: dict[str, Any], stall_s: float) -> None:
        self._stall_s = stall_s
        self.address, self.port, self._token = str(facts["address"]), int(facts["port"]), str(facts["token"])
        self._context: ssl.SSLContext | None = None
        if facts.get("certificate"):
            self._context = ssl.create_default_context(cadata=facts["certificate"])
            self._context.check_hostname = False

    def read(self, digest: str, blob: Blob) -> bool:
        """Append what is missing of a blob, as far as it comes; False if it broke off before the first byte of it."""
        before, is_silent = blob.have, False
        connection = self._connect()
        try:
            path = f"/v2/{self._token}/burst/blobs/{digest}"
            connection.request("GET", path, headers={"Range": f"bytes={blob.have}-"})
            response = connection.getresponse()
            while response.status == 206 and (data := response.read1(PIECE_BYTES)):
                _append(blob, data)
        except socket.timeout:  # before Python 3.10 no TimeoutError
            is_silent = True
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        return is_silent or blob.have > before

    def answers(self) -> bool:
        """Whether it is alive."""
        connection = self._connect()
        try:
            connection.request("GET", "/v2/")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self.address, self.port, timeout=self._stall_s)
        return http.client.HTTPSConnection(self.address, self.port, timeout=self._stall_s, context=self._context)


class NoRoomError(Exception):
    """This node cannot keep what comes."""


def _append(blob: Blob, data: bytes) -> None:
    try:
        blob.append(data)
    except OSError as error:
        raise NoRoomError(str(error)) from error


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
            with contextlib.suppress(NoRoomError):
                self._fetch(digest, blob)
            if blob.have != blob.size:
                blob.set_failed(True)

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

    def _fetch(self, digest: str, blob: Blob) -> None:
        for upstream in list(self._upstreams):
            while blob.have != blob.size and upstream.read(digest, blob):
                if blob.have != blob.size and not upstream.answers():
                    break
            if blob.have != blob.size and not upstream.answers():
                self._upstreams.remove(upstream)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A door on a socket, with TLS where a context is given."""

    daemon_threads = True
    allow_reuse_address = True
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


def _read_line(buffered: bytearray) -> bytes:
    """The next line of stdin; b"" when it ended, or nobody said anything for too long."""
    while b"\n" not in buffered:
        data = os.read(0, 1 << 16) if select.select([0], [], [], _SILENCE_S)[0] else b""
        if not data:
            return b""
        buffered += data
    line, _, rest = bytes(buffered).partition(b"\n")
    buffered[:] = rest
    return line + b"\n"


def _say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode("ascii") + b"\n")


def main() -> None:
    """See the module. Line 1: the blobs and the doors; line 2: upstreams; then anything, as a sign of life."""
    buffered = bytearray()
    setup = json.loads(_read_line(buffered))
    relay = Relay({digest: Blob(kind, size) for digest, (kind, size) in setup["blobs"].items()})
    engine = _Server("127.0.0.1", Door(relay.blobs, setup["token"], Limiter(None), relay.want))
    peer, address = None, _own_address() if setup["certificate"] else None
    if address is not None:
        door = Door(relay.blobs, setup["peer_token"], Limiter(setup["limit"]), relay.want)
        peer = [address, _Server(address, door, _tls(setup["certificate"])).server_address[1]]
    _say({"port": engine.server_address[1], "peer": peer})
    relay.start([Upstream(facts, setup["stall_s"]) for facts in json.loads(_read_line(buffered))])

    def beat() -> None:
        said, ticker = -1, threading.Event()
        try:
            while not ticker.wait(_BEAT_S):
                if said != relay.received():
                    said = relay.received()
                    _say({"received": said})
        except OSError:
            os._exit(0)

    _thread(beat)
    while _read_line(buffered):
        pass
    _say({"received": relay.received()})
    sys.stdout.flush()
    os._exit(0)
