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
import ssl
import threading
import time
from typing import Any

from cluster.agent.messages import Message, serve
from cluster.image.node.registry import CHUNK_BYTES, POLL_S, Blob, Door

_CONNECT_S = 5.0  # two more tries by TCP; who does not answer then is passed by
_PAUSE_S = 0.1
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_USER_TIMEOUT, 3000))


class Relay:
    """The blobs of one push on this node, each fetched once it is asked for, and once only."""

    def __init__(self) -> None:
        self._setup: Message = {}
        self._blobs: dict[str, Blob] = {}
        self._upstreams: list[tuple[str, int, bool]] = []
        self._fetching: set[str] = set()
        self._lock, self._note = threading.Lock(), ""

    def answer(self, asked: Message, data: bytes) -> tuple[Message, bytes]:
        """First, where its doors are; then it learns whom to ask: (address, port, whether by TLS); then, what came.

        note: what did not go as planned.
        """
        if "blobs" in asked:
            return self._open(asked), b""
        if "upstreams" in asked:
            self._upstreams = [tuple(row) for row in asked["upstreams"]]
        return {"received": sum(blob.have for blob in self._blobs.values()), "note": self._note}, b""

    def _open(self, setup: Message) -> Message:
        self._setup, self._blobs = setup, {digest: Blob(size) for digest, size in setup["blobs"].items()}
        address = os.environ["SSH_CONNECTION"].split()[2]  # by which the launcher, or its jump host, reached this node
        peers = _tls(ssl.PROTOCOL_TLS_SERVER, setup["certificate"])
        return {"port": self._listen("127.0.0.1"), "peer": [address, self._listen(address, peers)]}

    def _listen(self, address: str, tls: ssl.SSLContext | None = None) -> int:
        """The port of a door."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        port = int(listener.getsockname()[1])
        if tls is not None:  # the handshake comes with the first read, in the thread of that connection
            listener = tls.wrap_socket(listener, server_side=True, do_handshake_on_connect=False)
        door = Door(self._blobs, self._setup["token"], self._want)

        def accept() -> None:
            while True:
                try:
                    _thread(door.answer, listener.accept()[0])
                except (OSError, RuntimeError) as error:  # noqa: PERF203
                    # No files or threads are left: who waits is let in when there are some.
                    self._note = f"its relay let nobody in for a while: {error}"
                    time.sleep(_PAUSE_S)

        _thread(accept)
        return port

    def _want(self, digest: str) -> None:
        """Fetch a blob, or what is still missing of it."""
        with self._lock:
            if digest not in self._fetching:
                self._fetching.add(digest)
                self._blobs[digest].is_given_up = False
                _thread(self._fetch, digest)

    def _fetch(self, digest: str) -> None:
        blob = self._blobs[digest]
        while not self._upstreams:
            time.sleep(POLL_S)
        for upstream in self._upstreams[:]:
            with contextlib.suppress(OSError, http.client.HTTPException):
                self._read(upstream, digest, blob)
            if blob.have == blob.size:
                return
            with self._lock:
                if upstream in self._upstreams[:-1]:
                    self._upstreams.remove(upstream)
        with self._lock:
            blob.is_given_up = True
            self._fetching.remove(digest)

    def _read(self, upstream: tuple[str, int, bool], digest: str, blob: Blob) -> None:
        """Append what is missing of a blob, as far as it comes, and as there is room for it here."""
        address, port, is_peer = upstream
        connection = http.client.HTTPConnection(address, port, timeout=_CONNECT_S)
        if is_peer:
            context = _tls(ssl.PROTOCOL_TLS_CLIENT, self._setup["certificate"])
            connection = http.client.HTTPSConnection(address, port, timeout=_CONNECT_S, context=context)
        with contextlib.closing(connection):
            connection.connect()
            # It may have nothing to send for long: then its kernel says that it is still there, or has not for 3 s.
            connection.sock.settimeout(None)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
            path = f"/v2/{self._setup['token']}/burst/blobs/{digest}"
            connection.request("GET", path, headers={"Range": f"bytes={blob.have}-"})
            response = connection.getresponse()
            while response.status == 206 and (data := response.read1(CHUNK_BYTES)):
                blob.append(data)


def _tls(protocol: Any, certificate: str) -> ssl.SSLContext:
    """TLS with those alone who have this certificate and its key (PEM), which touch no disk."""
    context = ssl.SSLContext(protocol)
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    with open(os.memfd_create("certificate"), "w") as memory:
        memory.write(certificate)
        memory.flush()
        context.load_cert_chain(f"/proc/self/fd/{memory.fileno()}")
    return context


def _thread(target: Any, *arguments: Any) -> None:
    threading.Thread(target=target, args=arguments, daemon=True).start()


def main() -> None:
    """See the module."""
    serve(Relay().answer)
    os._exit(0)
