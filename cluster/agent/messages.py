"""What a launcher and a node both know: the part of a run that one is to own, and messages as they travel.

    READY                                          once, by the program: what a login shell said before is passed over
    bytes of the object (4), bytes of the data (4), a JSON object, data      one question, then its one answer

Lengths are checked before anything is read: a peer that sends something else is refused, never believed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import select
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

RANK_LOGS_VARIABLE = "BURST_RANK_LOGS"
STOP_GRACE_S = 12.0  # between asking ranks to stop and killing them
READY = b"\nburst is here\n"
MAX_OBJECT_BYTES = 8 << 20
# What holds clocks down that ought to be full, by its bit (NVML): idling, set clocks and the power limit are normal.
SLOWDOWNS = {
    0x08: "hw slowdown",
    0x20: "sw thermal slowdown",
    0x40: "hw thermal slowdown",
    0x80: "hw power brake slowdown",
}
_QUESTION_BYTES = 256 << 20  # the code of the ranks comes as one
_HEAD = struct.Struct(">II")

Message = dict[str, Any]


def safe_name(node: str) -> str:
    """`node` as a file name, as `engine.runs.folder.RunFolder.log_dir` makes it."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", node).lstrip(".") or "_"


def code_path(root: str, code_id: str) -> str:
    """What PYTHONPATH names."""
    return f"{root}/{code_id}.zip"


def code_id_of(archive: bytes) -> str:
    """64 hex digits."""
    return hashlib.sha256(archive).hexdigest()


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

    def next(self) -> tuple[Message, bytes] | None:
        """The next message and its data; None when the stream ends before one. Raises MessageError."""
        head = self._read(_HEAD.size)
        if not head:
            return None
        size, data_size = _HEAD.unpack(head + self._take(_HEAD.size - len(head)))
        if size > MAX_OBJECT_BYTES or data_size > self._max_data:
            raise MessageError(f"not a message: {size} and {data_size} bytes")
        try:
            message = json.loads(self._take(size).decode("utf-8"))
        except (ValueError, RecursionError):
            raise MessageError("a message is no JSON") from None
        if not isinstance(message, dict):
            raise MessageError("a message is no object")
        return message, self._take(data_size)

    def _take(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            data = self._read(size)
            if not data:
                raise MessageError("the stream ended within a message")
            parts.append(data)
            size -= len(data)
        return b"".join(parts)


def serve(answer: Callable[[Message, bytes], tuple[Message, bytes]], silence_s: float = 60.0) -> None:
    """Answer the launcher at the other end of stdin and stdout, one message after the other, until it is gone.

    silence_s: then it is gone without anybody saying so.
    """
    out = os.dup(1)
    os.dup2(2, 1)  # what anything prints must not get between messages

    def read(size: int) -> bytes:
        return os.read(0, min(size, 1 << 20)) if select.select([0], [], [], silence_s)[0] else b""

    reader = MessageReader(read, _QUESTION_BYTES)
    try:
        write_all(out, READY)
        while (asked := reader.next()) is not None:
            write_all(out, pack(*answer(*asked)))
    except (MessageError, BrokenPipeError):
        return


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte; after an error of a file, it is longer by what had been written."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class SpecError(ValueError):
    """What arrived cannot be done; the text is for people."""


class Spec(NamedTuple):
    """What the supervisor of one node is told; plain JSON on the wire and in nodes/<node>/spec.json.

    folder: the run folder on that node, absolute. argv: one command that starts all local ranks (torchrun, or docker
    run with torchrun in it). environment: on top of the node's. files: (path relative to `folder`, text) to lay there
    first; empty where the folder is the launcher's own. container: name of the container that argv starts; None: bare.
    engine: command line of the container engine. lease_s: without a beat for so long the supervisor stops the run;
    None: it goes on alone. exclusive: refuse while another run holds the node. start_id: of the request to start it:
    the same when it is asked for again.
    """

    run_id: str
    node: str
    node_rank: int
    num_nodes: int
    first_rank: int
    local_ranks: int
    folder: str
    argv: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    files: tuple[tuple[str, str], ...] = ()
    container: str | None = None
    engine: tuple[str, ...] = ("docker",)
    lease_s: float | None = 60.0
    stop_grace_s: float = STOP_GRACE_S
    exclusive: bool = True
    start_id: str = ""


# They become part of file names, of an environment and of command lines.
_NAMES = {
    "run_id": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"),
    "node": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}"),
    "container": re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}"),
}
_DAY_S = 86400.0


def parse_spec(message: Any) -> Spec:
    """The spec in `message`, once its names and paths are what they should be. Raises SpecError naming the field."""
    try:
        spec = Spec(**message)
        words = (*spec.argv, *spec.engine, *spec.environment, *spec.environment.values())
        if not spec.argv or any("\0" in word for word in words) or any("=" in name for name in spec.environment):
            raise SpecError("argv or environment cannot be given to a process")
        if min(spec.node_rank, spec.num_nodes, spec.first_rank, spec.local_ranks) < 0:
            raise SpecError("a rank is below 0")
        return spec._replace(
            run_id=checked_name(spec.run_id, "run_id"),
            node=checked_name(spec.node, "node"),
            folder=checked_folder(spec.folder),
            cwd=checked_folder(spec.cwd, "cwd"),
            files=tuple((relative_path(path), str(text)) for path, text in spec.files),
            container=None if spec.container is None else checked_name(spec.container, "container"),
            lease_s=None if spec.lease_s is None else seconds(spec.lease_s, "lease_s"),
            stop_grace_s=seconds(spec.stop_grace_s, "stop_grace_s"),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"the spec makes no sense: {error}") from error


def checked_name(value: Any, kind: str) -> str:
    """The name of a run, a node or a container. Raises SpecError."""
    if not isinstance(value, str) or not _NAMES[kind].fullmatch(value):
        raise SpecError(f"{kind} is no name: {str(value)[:100]!r}")
    return value


def checked_folder(value: Any, kind: str = "folder") -> str:
    """An absolute path without "..", normalised. Raises SpecError."""
    if not isinstance(value, str) or not os.path.isabs(value) or "\0" in value or ".." in value.split("/"):
        raise SpecError(f"{kind} is no absolute path: {str(value)[:200]!r}")
    return os.path.normpath(value)


def relative_path(value: Any) -> str:
    """A path below the run folder. Raises SpecError for one that would lead out of it."""
    parts = value.split("/") if isinstance(value, str) and len(value) < 1000 else [""]
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise SpecError(f"not a path below the run folder: {str(value)[:200]!r}")
    return str(value)


def seconds(value: Any, kind: str) -> float:
    """A finite number of seconds from 0 to a day. Raises SpecError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise SpecError(f"{kind} is no number of seconds: {str(value)[:60]!r}")
    return min(float(value), _DAY_S)
