"""Frames: how launcher, nodes, and nodes among each other talk over a byte stream. Python 3.9, standard library only.

    message   b"J", length (4 bytes), a JSON object
    data      b"D", length (4 bytes), number of the blob (2 bytes), offset in it (8 bytes), bytes of it

Lengths are checked before anything is read: a peer that sends something else is refused, never believed.
"""

import json
import struct
from typing import Any, Callable, NamedTuple, Optional

MAX_MESSAGE_BYTES = 8 << 20
MAX_DATA_BYTES = 256 << 10
MAX_BLOBS = 1 << 16
_HEAD = struct.Struct(">cI")
_PLACE = struct.Struct(">HQ")
_MAX_OFFSET = 1 << 50

Message = dict[str, Any]


class FrameError(Exception):
    """The peer sent what is no frame."""


class Frame(NamedTuple):
    """One frame: a message, or bytes of a blob at an offset."""

    message: Optional[Message]
    blob: int = 0
    offset: int = 0
    data: bytes = b""


def pack_message(message: Message) -> bytes:
    """The frame of a JSON object."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_MESSAGE_BYTES:
        raise FrameError(f"a message of {len(body)} bytes is too long")
    return _HEAD.pack(b"J", len(body)) + body


def pack_data(blob: int, offset: int, data: bytes) -> bytes:
    """The frame of bytes of blob number `blob`, from `offset` on."""
    return _HEAD.pack(b"D", _PLACE.size + len(data)) + _PLACE.pack(blob, offset) + data


class FrameReader:
    """Frames from `read(n)`, which gives up to n bytes and b"" at the end of the stream."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read

    def next(self) -> Optional[Frame]:
        """The next frame; None when the stream ends between two frames. Raises FrameError for anything else."""
        head = self._take(_HEAD.size, may_end=True)
        if head is None:
            return None
        kind, length = _HEAD.unpack(head)
        if kind == b"J" and length <= MAX_MESSAGE_BYTES:
            return Frame(_parse(self._whole(length)))
        if kind == b"D" and _PLACE.size < length <= _PLACE.size + MAX_DATA_BYTES:
            blob, offset = _PLACE.unpack(self._whole(_PLACE.size))
            if offset > _MAX_OFFSET:
                raise FrameError(f"offset {offset} is out of range")
            return Frame(None, blob, offset, self._whole(length - _PLACE.size))
        raise FrameError(f"not a frame: kind {kind!r}, {length} bytes")

    def _whole(self, size: int) -> bytes:
        data = self._take(size, may_end=False)
        return b"" if data is None else data

    def _take(self, size: int, may_end: bool) -> Optional[bytes]:
        parts: list[bytes] = []
        left = size
        while left:
            data = self._read(left)
            if not data:
                if may_end and left == size:
                    return None
                raise FrameError("the stream ended within a frame")
            parts.append(data)
            left -= len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _parse(body: bytes) -> Message:
    try:
        message = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        raise FrameError("a message is no JSON") from None
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise FrameError("a message has no op")
    return message
