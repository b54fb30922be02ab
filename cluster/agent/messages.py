"""What a launcher and a node both know: the part of a run that one is to own, and messages as they travel.

    READY                                          once, by the program: what a login shell said before is passed over
    bytes of the object (4), bytes of the data (4), a JSON object, data      one question, then its one answer

Lengths are checked before anything is read: a peer that sends something else is refused, never believed.
"""

import hashlib
import json
import math
import os
import re
import select
import struct
from typing import Any, Callable, NamedTuple, Optional

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
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}")
_CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
_MAX_GRACE_S = 86400.0
_QUESTION_BYTES = 256 << 20  # the code of the ranks comes as one
_HEAD = struct.Struct(">II")

Message = dict[str, Any]


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
        asked = reader.next()
        while asked is not None:
            write_all(out, pack(*answer(*asked)))
            asked = reader.next()
    except (MessageError, BrokenPipeError):
        return


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte; after an error of a file, it is longer by what had been written."""
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
    container: Optional[str] = None
    engine: tuple[str, ...] = ("docker",)
    lease_s: Optional[float] = 60.0
    stop_grace_s: float = STOP_GRACE_S
    exclusive: bool = True
    start_id: str = ""


def parse_spec(message: Any) -> Spec:
    """The spec in `message`, once its names and paths are what they should be. Raises SpecError naming the field."""
    try:
        spec = Spec(**message)
        files = tuple((relative_path(path), str(text)) for path, text in spec.files)
        words = (*spec.argv, *spec.engine, *spec.environment, *spec.environment.values())
        if not spec.argv or any("\0" in word for word in words) or any("=" in name for name in spec.environment):
            raise SpecError("argv or environment cannot be given to a process")
        if min(spec.node_rank, spec.num_nodes, spec.first_rank, spec.local_ranks) < 0:
            raise SpecError("a rank is below 0")
        lease_s = None if spec.lease_s is None else seconds(spec.lease_s, "lease_s")
    except (TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"the spec makes no sense: {error}") from error
    return spec._replace(
        run_id=checked_run_id(spec.run_id),
        node=checked_node(spec.node),
        folder=checked_folder(spec.folder),
        cwd=checked_folder(spec.cwd, "cwd"),
        files=files,
        container=None if spec.container is None else _match(_CONTAINER, spec.container, "container"),
        lease_s=lease_s,
        stop_grace_s=seconds(spec.stop_grace_s, "stop_grace_s"),
    )


def checked_run_id(value: Any) -> str:
    """A run id, which becomes part of file names and of an environment."""
    return _match(_RUN_ID, value, "run_id")


def checked_node(value: Any) -> str:
    """A node's name."""
    return _match(_NODE, value, "node")


def checked_folder(value: Any, name: str = "folder") -> str:
    """An absolute path without "..", normalised."""
    if not isinstance(value, str) or not os.path.isabs(value) or "\0" in value or ".." in value.split("/"):
        raise SpecError(f"{name} is no absolute path: {value if value is None else str(value)[:200]!r}")
    return os.path.normpath(value)


def seconds(value: Any, name: str) -> float:
    """A finite number of seconds from 0 to a day."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise SpecError(f"{name} is no number of seconds: {str(value)[:60]!r}")
    return min(float(value), _MAX_GRACE_S)


def relative_path(value: Any) -> str:
    """A path below the run folder. Raises SpecError for one that would lead out of it."""
    parts = value.split("/") if isinstance(value, str) and len(value) < 1000 else [""]
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise SpecError(f"not a path below the run folder: {str(value)[:200]!r}")
    return str(value)


def _match(pattern: Any, value: Any, name: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value) or value in (".", ".."):
        raise SpecError(f"{name} is no name: {value if value is None else str(value)[:100]!r}")
    return value
