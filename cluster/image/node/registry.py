"""A read-only OCI registry of one image, over whatever carries bytes: channels of SSH here, sockets on the nodes.

Python 3.9, standard library only: it runs on the nodes, too.
"""

from __future__ import annotations

import hmac
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any

PIECE_BYTES = 256 << 10
_PATH = re.compile(r"/v2/([0-9a-f]{32})/burst/(?:blobs|manifests)/(sha256:[0-9a-f]{64})")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-")
_SPACIOUS = "/var/tmp"  # what lies in /tmp may lie in memory


class BlobError(Exception):
    """The rest of a blob will not come."""


class Blob:
    """Bytes in a file without a name, which are read while they still arrive; nothing of it outlives the process."""

    def __init__(self, media_type: str, size: int | None = None) -> None:
        self.media_type, self.size, self.have = media_type, size, 0
        self._file: int | None = None
        self._failed = False
        self._changed = threading.Condition()

    def append(self, data: bytes) -> None:
        """Put `data` behind what is there. Raises OSError where there is no room."""
        if self._file is None:
            folder = os.environ.get("TMPDIR") or (_SPACIOUS if os.access(_SPACIOUS, os.W_OK) else None)
            self._file, name = tempfile.mkstemp(prefix="burst-image-", dir=folder)
            os.unlink(name)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        with self._changed:
            self.have += len(data)
            self._changed.notify_all()

    def set_failed(self, failed: bool) -> None:
        """Whether readers shall give up waiting for what is not there."""
        with self._changed:
            self._failed = failed
            self._changed.notify_all()

    def pieces(self, offset: int, size: int) -> Iterator[bytes]:
        """Everything from `offset` to `size`. Raises BlobError when no more of it will come."""
        while offset < size:
            with self._changed:
                while self.have <= offset:
                    if self._failed:
                        raise BlobError("the rest of a layer will not come")
                    self._changed.wait()
            assert self._file is not None
            data = os.pread(self._file, PIECE_BYTES, offset)
            yield data
            offset += len(data)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


class Limiter:
    """At most `rate` bytes per second through `take`, shared by all threads that use it; None: as fast as it goes."""

    def __init__(self, rate: float | None) -> None:
        self._rate, self._free_at, self._lock = rate, 0.0, threading.Lock()

    def take(self, size: int) -> None:
        """Wait until `size` bytes may go."""
        if not self._rate:
            return
        with self._lock:
            start = max(time.monotonic(), self._free_at)
            self._free_at = start + size / self._rate
        time.sleep(max(0.0, start - time.monotonic()))


class Door:
    """One way in: who knows `token` gets `blobs`, and nothing can be written. sent: bytes that went out of it.

    on_request(digest) is told what somebody is about to read.
    """

    def __init__(
        self,
        blobs: Mapping[str, Blob],
        token: str,
        limiter: Limiter,
        on_request: Callable[[str], None] = lambda digest: None,
    ) -> None:
        self._blobs, self._token, self.on_request = blobs, token, on_request
        self._limiter, self.sent, self._lock = limiter, 0, threading.Lock()

    def find(self, path: str) -> tuple[str, Blob | None]:
        """(digest, blob) that a path names."""
        match = _PATH.fullmatch(path)
        if match is None or not hmac.compare_digest(match[1], self._token):
            return "", None
        return match[2], self._blobs.get(match[2])

    def count(self, size: int) -> None:
        """Wait for the limit; `size` bytes go out."""
        self._limiter.take(size)
        with self._lock:
            self.sent += size


class Handler(BaseHTTPRequestHandler):
    """One connection; `server` is a `Door`, or has one as its `door`."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        """A blob, a manifest, or whether this is a registry."""
        self._answer(read=True)

    def do_HEAD(self) -> None:
        """The same without its body."""
        self._answer(read=False)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: paths hold the token."""

    def _answer(self, *, read: bool) -> None:
        door: Door = getattr(self.server, "door", self.server)
        digest, blob = door.find(self.path)
        if blob is None:
            is_root = self.path in ("/v2/", "/v2")
            body = b"{}" if is_root else b'{"errors":[{"code":"NAME_UNKNOWN"}]}'
            self._head(200 if is_root else 404, "application/json", len(body))
            if read:
                self.wfile.write(body)
            return
        size = blob.size or 0
        part = _RANGE.fullmatch(self.headers.get("Range", ""))
        begin = min(int(part[1]), size) if part else 0
        extra = {"Content-Range": f"bytes {begin}-{size - 1}/{size}"} if part else {}
        self._head(206 if part else 200, blob.media_type, size - begin, {"Docker-Content-Digest": digest, **extra})
        if not read:
            return
        door.on_request(digest)
        try:
            for data in blob.pieces(begin, size):
                door.count(len(data))
                self.wfile.write(data)
        except (BlobError, OSError, EOFError):
            self.close_connection = True  # too short: whoever reads sees it, and asks again or elsewhere

    def _head(self, status: int, media_type: str, size: int, extra: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": media_type, "Content-Length": str(size), **extra}.items():
            self.send_header(name, value)
        self.end_headers()
