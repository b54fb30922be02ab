"""A node's run folder: what a supervisor is told, the files by which it is controlled, and what it tells.

    nodes/<node>/ spec.json supervisor.json health.json stacks_done.json outcome.json supervisor.log   by the supervisor
                  lease stop.json stacks.json                                            by whoever controls the run
    logs/<node>/  torchrun.log (argv, appended)  rank<NNNN>.*  (the ranks)  flight.request (the supervisor)

Every JSON file is replaced as a whole; a reader sees the old or the new one.
"""

import contextlib
import errno
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

from cluster.agent.processes import process_start

MAX_JSON_BYTES = 4 << 20
Document = dict[str, Any]


class NodeFiles:
    """Where everything of node `node` lies in the run folder `folder`; creates nothing."""

    def __init__(self, folder: str, node: str) -> None:
        self.folder, self.node, self.name = folder, node, safe_name(node)
        self.state_dir = os.path.join(folder, "nodes", self.name)
        self.log_dir = os.path.join(folder, "logs", self.name)
        self.spec = self._state("spec.json")
        self.supervisor = self._state("supervisor.json")
        self.lease = self._state("lease")
        self.stop = self._state("stop.json")
        self.stacks = self._state("stacks.json")
        self.stacks_done = self._state("stacks_done.json")
        self.health = self._state("health.json")
        self.outcome = self._state("outcome.json")
        self.own_log = self._state("supervisor.log")
        self.lock = self._state("supervisor.lock")
        self.torchrun_log = os.path.join(self.log_dir, "torchrun.log")
        self.flight_request = os.path.join(self.log_dir, "flight.request")

    def _state(self, name: str) -> str:
        return os.path.join(self.state_dir, name)


def safe_name(node: str) -> str:
    """`node` as a file name, as `engine.runs.folder.RunFolder.log_dir` makes it."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", node).lstrip(".") or "_"


def now_text() -> str:
    """The present as ISO 8601 in UTC with milliseconds."""
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"


def write_text(path: str, text: str, *, mode: int = 0o600, sync: bool = False) -> None:
    """Replace `path`; a reader sees the old or the new text. Raises OSError."""
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}-{threading.get_ident()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(path: str, document: Document, *, sync: bool = False) -> None:
    """Replace `path` by `document`. Raises OSError."""
    write_text(path, json.dumps(document, indent=1) + "\n", sync=sync)


def read_json(path: str) -> Optional[Document]:
    """The object in `path`; None if there is none, or none that can be read."""
    try:
        # Opened, not asked for by stat: on a network file system only that shows what another machine wrote.
        with open(path, "rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
        document = json.loads(data.decode("utf-8")) if len(data) <= MAX_JSON_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def make_folder(path: str) -> None:
    """Folder `path` and those above it, for this user alone. Raises OSError."""
    if not os.path.isdir(path):
        parent = os.path.dirname(path)
        if parent and parent != path:
            make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def lay_files(folder: str, files: Iterable[tuple[str, str]]) -> None:
    """Put `files` (checked relative path, text) below `folder`. Raises OSError."""
    for name, text in files:
        path = os.path.join(folder, name)
        make_folder(os.path.dirname(path))
        write_text(path, text, mode=0o700 if name.endswith(".sh") else 0o600)


# --- by whoever controls the run -----------------------------------------------------------------------------------


def beat(folder: str, node: str) -> None:
    """Renew the lease. Raises OSError."""
    path = NodeFiles(folder, node).lease
    try:
        os.utime(path, None)
    except FileNotFoundError:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))


def request_stop(folder: str, node: str, cause: str, grace_s: float) -> None:
    """Ask for the end of the run on this node; a later request may shorten the grace. Raises OSError."""
    document = {"cause": cause, "grace_s": grace_s, "at": now_text(), "at_ns": time.time_ns()}
    write_json(NodeFiles(folder, node).stop, document)


def request_stacks(folder: str, node: str, nonce: str) -> None:
    """Ask for the stacks of all ranks of this node. Raises OSError."""
    write_json(NodeFiles(folder, node).stacks, {"nonce": nonce})


def read_status(folder: str, node: str) -> Document:
    """{"phase", "supervisor", "outcome", "health"} of node `node`, from its files and its process."""
    files = NodeFiles(folder, node)
    supervisor = read_json(files.supervisor)
    outcome = read_json(files.outcome)
    phase = _phase(supervisor, outcome)
    if phase == "lost":  # or it ended between the two looks
        outcome = read_json(files.outcome)
        phase = "lost" if outcome is None else "ended"
    return {"phase": phase, "supervisor": supervisor or {}, "outcome": outcome, "health": read_json(files.health)}


def is_alive(supervisor: Optional[Document]) -> Optional[bool]:
    """Whether the process that a supervisor.json names still lives; None when it is on another machine."""
    if not supervisor or supervisor.get("host") != socket.gethostname():
        return None if supervisor else False
    pid = supervisor.get("pid")
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 1:
        return False
    return process_start(pid) == supervisor.get("pid_start")


def _phase(supervisor: Optional[Document], outcome: Optional[Document]) -> str:
    if outcome is not None:
        return "ended"
    if supervisor is None:
        return "none"
    if is_alive(supervisor) is False:
        return "lost"
    phase = supervisor.get("phase")
    if phase == "ended":
        return "stopping"  # its outcome is about to be written
    return phase if phase in ("starting", "running", "stopping") else "running"


RANK_LOGS_VARIABLE = "BURST_RANK_LOGS"
MAX_GRACE_S = 86400.0
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}")
_CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
_MAX_FILES = 1000


class SpecError(ValueError):
    """What arrived cannot be done; the text is for people."""


class Spec(NamedTuple):
    """See `NodeSpec`; the same names and units."""

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
    files: tuple[tuple[str, str], ...]
    container: Optional[str]
    engine: tuple[str, ...]
    lease_s: Optional[float]
    stop_grace_s: float
    exclusive: bool
    start_id: str = ""  # of the request to start it: the same when it is asked for again

    def to_dict(self) -> dict[str, Any]:
        """As JSON, without the files, which lie beside it."""
        return {**self._asdict(), "files": []}


def parse_spec(message: Any) -> Spec:
    """The checked spec. Raises SpecError naming the field."""
    if not isinstance(message, dict):
        raise SpecError("the spec is no object")
    lease = message.get("lease_s", 60.0)
    container = message.get("container")
    environment = message.get("environment", {})
    if not isinstance(environment, dict):
        raise SpecError("environment is no object")
    for name, value in environment.items():
        if not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
            raise SpecError(f"environment: {str(name)[:60]!r} cannot be set")
    return Spec(
        run_id=checked_run_id(message.get("run_id")),
        node=checked_node(message.get("node")),
        node_rank=_count(message, "node_rank"),
        num_nodes=_count(message, "num_nodes"),
        first_rank=_count(message, "first_rank"),
        local_ranks=_count(message, "local_ranks"),
        folder=checked_folder(message.get("folder")),
        argv=_words(message.get("argv"), "argv"),
        cwd=checked_folder(message.get("cwd"), "cwd"),
        environment=dict(environment),
        files=_files(message.get("files") or ()),
        container=None if container is None else _match(_CONTAINER, container, "container"),
        engine=_words(message.get("engine", ["docker"]), "engine"),
        lease_s=None if lease is None else seconds(lease, "lease_s"),
        stop_grace_s=seconds(message.get("stop_grace_s", 12.0), "stop_grace_s"),
        exclusive=bool(message.get("exclusive", True)),
        start_id=checked_run_id(message.get("start_id") or "none"),
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
    return min(float(value), MAX_GRACE_S)


def relative_path(value: Any) -> str:
    """A path below the run folder. Raises SpecError for one that would lead out of it."""
    parts = value.split("/") if isinstance(value, str) and len(value) < 1000 else [""]
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise SpecError(f"not a path below the run folder: {str(value)[:200]!r}")
    return str(value)


def _files(value: Any) -> tuple[tuple[str, str], ...]:
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, (list, tuple)) or len(pairs) > _MAX_FILES:
        raise SpecError("files is no list of (path, text)")
    checked: list[tuple[str, str]] = []
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[1], str):
            raise SpecError("files is no list of (path, text)")
        checked.append((relative_path(pair[0]), pair[1]))
    return tuple(checked)


def _words(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value or not value[0]:
        raise SpecError(f"{name} is no command")
    if any(not isinstance(word, str) or "\0" in word for word in value):
        raise SpecError(f"{name} holds what is no word")
    return tuple(value)


def _match(pattern: Any, value: Any, name: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value) or value in (".", ".."):
        raise SpecError(f"{name} is no name: {value if value is None else str(value)[:100]!r}")
    return value


def _count(message: dict[str, Any], name: str) -> int:
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 24:
        raise SpecError(f"{name} is no number: {str(value)[:60]!r}")
    return value
