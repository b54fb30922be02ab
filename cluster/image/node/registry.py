"""A read-only OCI registry of one image, over whatever carries bytes: channels of SSH here, sockets on the nodes.

Python 3.9, standard library only: it runs on the nodes, too.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

CHUNK_BYTES = 262_144
POLL_S = 0.02
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_KINDS = {"manifests": MANIFEST, "blobs": "application/octet-stream"}
_PATH = re.compile(r"/v2/([0-9a-f]{32})/burst/(manifests|blobs)/(sha256:[0-9a-f]{64})")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-")


class Blob:
    """Bytes in a file without a name, which are read while they still arrive; nothing of it outlives the process.

    size: what it is to have in the end. is_given_up: whether nobody is to wait for what it has not.
    """

    def __init__(self, size: int = 0) -> None:
        self.size, self.have, self.is_given_up = size, 0, False
        with tempfile.TemporaryFile(dir=os.environ.get("TMPDIR") or "/var/tmp") as file:  # /tmp may lie in memory
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)

    def append(self, data: bytes) -> None:
        """Put `data` behind what is there. Raises OSError where there is no room."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self.descriptor, view, self.have)
            view, self.have = view[written:], self.have + written

    def pieces(self, begin: int) -> Iterator[bytes]:
        """Everything from `begin` on. Raises EOFError when no more of it will come."""
        while begin < self.size:
            data = os.pread(self.descriptor, CHUNK_BYTES, begin)
            if data:
                begin += len(data)
                yield data
            elif self.is_given_up:
                raise EOFError
            else:
                time.sleep(POLL_S)


@dataclass(frozen=True)
class Door:
    """One way in: who knows `token` gets `blobs`, and nothing can be written.

    on_request(digest) is told what somebody is about to read, on_bytes(size) what is about to go out.
    """

    blobs: Mapping[str, Blob]
    token: str
    on_request: Callable[[str], None] = lambda digest: None
    on_bytes: Callable[[int], None] = lambda size: None

    def answer(self, connection: Any) -> None:
        """Serve one connection, a socket or what is like one, until it ends: whoever broke off asks again."""
        with contextlib.suppress(Exception), connection:
            _Handler(connection, None, self)  # type: ignore[arg-type]  # a door is all that it needs of a server


class _Handler(BaseHTTPRequestHandler):
    # What is no HTTP is answered in it, too: by that engines with containerd's store know that there is no TLS.
    protocol_version = default_request_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        """A blob, a manifest, or whether this is a registry."""
        door: Door = self.server
        path, part = _PATH.fullmatch(self.path), _RANGE.fullmatch(self.headers.get("Range", ""))
        blob = door.blobs.get(path[3]) if path and hmac.compare_digest(path[1], door.token) else None
        if path is None or blob is None:
            self._head(200 if self.path == "/v2/" else 404, "application/json", 0)
            return
        begin = min(int(part[1]), blob.size) if part else 0
        more = {"Content-Range": f"bytes {begin}-{blob.size - 1}/{blob.size}"} if part else {}
        self._head(206 if part else 200, _KINDS[path[2]], blob.size - begin, {"Docker-Content-Digest": path[3], **more})
        if self.command == "GET":
            door.on_request(path[3])
            for data in blob.pieces(begin):
                door.on_bytes(len(data))
                self.wfile.write(data)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: paths hold the token."""

    def _head(self, status: int, kind: str, size: int, more: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(size), **more}.items():
            self.send_header(name, value)
        self.end_headers()
