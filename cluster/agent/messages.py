"""Messages: how burst talks with a program that it sent to a node. Python 3.9, standard library only.

    READY                                          once, by the program: what a login shell said before is passed over
    bytes of the object (4), bytes of the data (4), a JSON object, data      one question, then its one answer

Lengths are checked before anything is read: a peer that sends something else is refused, never believed.
"""

import json
import os
import select
import struct
from typing import Any, Callable, Optional

READY = b"\nburst is here\n"
MAX_OBJECT_BYTES = 8 << 20
_QUESTION_BYTES = 256 << 20  # the code of the ranks comes as one
_SILENCE_S = 60.0  # then the launcher is gone without anybody saying so
_HEAD = struct.Struct(">II")

Message = dict[str, Any]


class MessageError(Exception):
    """The peer sent what is no message."""


def pack(message: Message, data: bytes = b"") -> bytes:
    """A message as it travels. Raises MessageError when its object is too long."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_OBJECT_BYTES:
        raise MessageError(f"a message of {len(body)} bytes is too long")
    return _HEAD.pack(len(body), len(data)) + body + data


class MessageReader:
    """Messages from `read(n)`, which gives up to n bytes and b"" at the end; none has more than `max_data` of data."""

    def __init__(self, read: Callable[[int], bytes], max_data: int) -> None:
        self._read, self._max_data = read, max_data

    def next(self) -> Optional[tuple[Message, bytes]]:
        """The next message and its data; None when the stream ends before one. Raises MessageError."""
        head = self._take(_HEAD.size, may_end=True)
        if not head:
            return None
        size, data_size = _HEAD.unpack(head)
        if size > MAX_OBJECT_BYTES or data_size > self._max_data:
            raise MessageError(f"not a message: {size} and {data_size} bytes")
        return _parse(self._take(size)), self._take(data_size)

    def _take(self, size: int, may_end: bool = False) -> bytes:
        parts: list[bytes] = []
        left = size
        while left:
            data = self._read(left)
            if not data:
                if may_end and left == size:
                    return b""
                raise MessageError("the stream ended within a message")
            parts.append(data)
            left -= len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def serve(answer: Callable[[Message, bytes], tuple[Message, bytes]]) -> None:
    """Answer the launcher at the other end of stdin and stdout, one message after the other, until it is gone."""
    out = os.dup(1)
    os.dup2(2, 1)  # what anything prints must not get between messages
    reader = MessageReader(_read_stdin, _QUESTION_BYTES)
    try:
        _write(out, READY)
        asked = reader.next()
        while asked is not None:
            _write(out, pack(*answer(*asked)))
            asked = reader.next()
    except (MessageError, BrokenPipeError):
        return


def _read_stdin(size: int) -> bytes:
    return os.read(0, min(size, 1 << 20)) if select.select([0], [], [], _SILENCE_S)[0] else b""


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _parse(body: bytes) -> Message:
    try:
        message = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        raise MessageError("a message is no JSON") from None
    if not isinstance(message, dict):
        raise MessageError("a message is no object")
    return message
