"""What a launcher reaches of a node over one SSH exec: its questions become files, files become answers.

It holds no state: killed at any moment, the next one goes on from the offsets that it is told. The supervisor does not
depend on it. A question may hold any of these, beside `folder` and `node`:

    start {spec}   again: it was sent before, and its answer may have been lost
    follow {lead, offsets {path: bytes}}    from where files are to be sent; from then on what is new in each answer
    beat true   stop {cause, grace_s}   stacks NONCE   sweep NONCE
    wait_s   budget     how long the answer may wait for news, and how many bytes of files it may carry

and its answer: got_ns now_ns, started | refused {kind, text}, swept [pids], errors {name: text}, status {phase,
supervisor, outcome, health}, files [{path, offset, bytes, ...}] whose bytes follow in their order, all: that was all.

Logs only grow: they are followed by offset. Other files are replaced as a whole: they are read again when time stamp,
size or inode changed. What is neither a plain file nor of a known kind is not looked at.
"""

import os
import re
import stat
import threading
import time
from collections import deque
from typing import Any, Callable, Optional, Union

from cluster.agent.code import install_code
from cluster.agent.folder import (
    LEAD_LOGS,
    LEAD_WHOLE,
    NodeFiles,
    beat,
    read_json,
    read_status,
    request_stacks,
    request_stop,
)
from cluster.agent.messages import Message, SpecError, checked_folder, checked_node
from cluster.agent.start import start, sweep

_POLL_S = 0.1
_IDLE_AFTER_S = 10.0  # without news files are looked at once per question


class Agent:
    """Answers the questions of one launcher."""

    def __init__(self) -> None:
        self._tail: Optional[NodeTail] = None
        self._status: Optional[Message] = None  # as it was sent last
        self._has_told_all = False
        self._news_at = time.monotonic()
        self._begun: set[str] = set()  # starts and sweeps
        self._done: deque[Message] = deque()  # by threads
        self._errors: deque[tuple[str, str]] = deque()

    def answer(self, asked: Message, data: bytes = b"") -> tuple[Message, bytes]:
        """The answer and the bytes of its files: at once if there is news, else after a while."""
        if "install" in asked:
            return install_code(asked["install"], data), b""
        got_ns, deadline = time.time_ns(), time.monotonic() + asked["wait_s"]
        self._act(asked)
        while True:
            news, data = self._news(asked, asked.get("budget", 0))
            now = time.monotonic()
            self._news_at = now if news else self._news_at
            if news or now >= deadline:
                return {**news, "got_ns": got_ns, "now_ns": time.time_ns()}, data
            time.sleep(_POLL_S if now < self._news_at + _IDLE_AFTER_S else deadline - now)

    # --- what is asked for -------------------------------------------------------------------------------------------

    def _act(self, asked: Message) -> None:
        """Do all that is asked for; what cannot be done is news."""
        acts: dict[str, Callable[[str, str, Any], None]] = {
            "follow": self._follow,
            "beat": lambda folder, node, _: beat(folder, node),
            "stop": lambda folder, node, wish: request_stop(folder, node, wish["cause"], wish["grace_s"]),
            "stacks": request_stacks,
            "sweep": self._sweep,
        }
        if "start" in asked:
            self._start(asked["start"], asked.get("again") is True)
            return
        for name, act in acts.items():
            if name in asked:
                self._try(name, act, asked)

    def _try(self, name: str, act: Callable[[str, str, Any], None], asked: Message) -> None:
        try:
            act(checked_folder(asked.get("folder")), checked_node(asked.get("node")), asked[name])
        except (SpecError, KeyError, TypeError, ValueError, AttributeError) as error:
            self._note_error(name, str(error))
        except OSError as error:
            self._note_error(name, f"{error.filename or 'the run folder'}: {error.strerror or error}")

    def _note_error(self, name: str, text: str) -> None:
        self._errors.append((name, f"{name}: {text}"))

    def _start(self, spec: Any, again: bool) -> None:
        """In a thread, for it may take long; until it is answered, files may be those of an earlier attempt."""
        self._tail = self._status = None
        name = str(spec.get("start_id")) if isinstance(spec, dict) else ""
        if name not in self._begun:
            self._begun.add(name)
            self._later("start", lambda: start(spec, again=again))

    def _follow(self, folder: str, node: str, wish: Message) -> None:
        self._tail = NodeTail(folder, node, wish["lead"], wish["offsets"])
        self._status, self._has_told_all = None, False

    def _sweep(self, folder: str, node: str, nonce: str) -> None:
        if nonce in self._begun:
            return
        self._begun.add(nonce)
        started = read_json(NodeFiles(folder, node).spec) or {}
        run_id = started.get("run_id") or os.path.basename(folder)
        self._later("sweep", lambda: {"swept": sweep(folder, node, run_id)})

    def _later(self, name: str, work: Callable[[], Message]) -> None:
        def do() -> None:
            try:
                self._done.append(work())
            except Exception as error:  # nobody else hears of it, and the launcher would wait for ever
                self._note_error(name, f"{type(error).__name__}: {error}")

        threading.Thread(target=do, name="agent", daemon=True).start()

    # --- what there is to tell ---------------------------------------------------------------------------------------

    def _news(self, asked: Message, budget: int) -> tuple[Message, bytes]:
        """What was not told before."""
        news: Message = {}
        while self._done:
            news.update(self._done.popleft())
        while self._errors:
            name, text = self._errors.popleft()
            news.setdefault("errors", {})[name] = text
        if "start" in asked:
            return news, b""
        status = read_status(checked_folder(asked.get("folder")), checked_node(asked.get("node")))
        if status != self._status:
            news["status"] = self._status = status
        # The files after the status: what is final now has written all of them.
        heads, data = self._tail.take(budget) if self._tail is not None else ([], b"")
        if heads:
            news["files"], self._has_told_all = heads, False
        elif self._tail is not None and budget and status["phase"] in ("ended", "lost") and not self._has_told_all:
            news["all"] = self._has_told_all = True
        return news, data


PIECE_BYTES = 64 << 10
_MAX_FILES = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_LOGS = (".log", ".stacks")
_TRACES, _CURVES = "profile/", "tensorboard/"
_STATE_WHOLE = ("supervisor.json", "health.json", "stacks_done.json", "outcome.json")

# {path, offset, bytes} of a piece; anew: a log that was begun anew; size: of a file that is replaced, when it is whole.
Piece = tuple[dict[str, Any], bytes]


class GrowingFile:
    """A log: what was sent is its beginning, up to `offset`."""

    def __init__(self, root: str, path: str, offset: int) -> None:
        self._path, self._offset = path, offset
        self._full = os.path.join(root, path)
        self._inode: Optional[int] = None

    def next(self, size: int) -> Optional[Piece]:
        """The next piece, empty where a file begins so; None when there is nothing new."""
        opened = open_plain(self._full)
        if opened is None:
            return None
        descriptor, status = opened
        try:
            anew = status.st_size < self._offset or self._inode not in (None, status.st_ino)
            offset = 0 if anew else self._offset
            if status.st_size == offset and not (anew or (self._inode is None and not offset)):
                self._inode = status.st_ino
                return None
            data = os.pread(descriptor, size, offset)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        self._inode, self._offset = status.st_ino, offset + len(data)
        return {"path": self._path, "offset": offset, "bytes": len(data), **({"anew": True} if anew else {})}, data


class ReplacedFile:
    """A file that others replace, sent in pieces from one open descriptor, so that they fit together."""

    def __init__(self, root: str, path: str) -> None:
        self._path, self._full = path, os.path.join(root, path)
        self._stamp: Any = None
        self._open: Optional[int] = None
        self._offset = self._size = 0

    def next(self, size: int) -> Optional[Piece]:
        """The next piece of its present content; None when all of that was sent."""
        if self._open is None and not self._look():
            return None
        assert self._open is not None
        try:
            data = os.pread(self._open, min(size, self._size - self._offset), self._offset)
        except OSError:
            data = b""
        head = {"path": self._path, "offset": self._offset, "bytes": len(data), "size": self._size}
        self._offset += len(data)
        if not data or self._offset >= self._size:
            os.close(self._open)
            self._open = None
        return head, data

    def _look(self) -> bool:
        """Whether it changed; then it is open."""
        opened = open_plain(self._full)
        if opened is None:
            return False
        descriptor, status = opened
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp == self._stamp:
            os.close(descriptor)
            return False
        self._stamp, self._open, self._offset, self._size = stamp, descriptor, 0, status.st_size
        return True


class NodeTail:
    """All files of node `node` that a launcher copies. `lead`: also those that rank 0 writes."""

    def __init__(self, folder: str, node: str, lead: bool, offsets: dict[str, int]) -> None:
        self._files, self._lead, self._offsets = NodeFiles(folder, node), lead, offsets
        self._known: dict[str, Union[GrowingFile, ReplacedFile]] = {}
        self._served = 0

    def take(self, budget: int) -> tuple[list[dict[str, Any]], bytes]:
        """Heads and data of what is new, at most `budget` bytes. No file holds up another: each goes on in its turn."""
        self._discover()
        files = list(self._known.values())
        waiting = files[self._served :] + files[: self._served]
        heads: list[dict[str, Any]] = []
        parts: list[bytes] = []
        while waiting and budget > 0:
            more = []
            for file in waiting:
                if budget <= 0:
                    break
                piece = file.next(min(PIECE_BYTES, budget))
                self._served = (self._served + 1) % len(files)
                if piece is not None:
                    heads.append(piece[0])
                    parts.append(piece[1])
                    budget -= len(piece[1])
                    more.append(file)
            waiting = more
        return heads, b"".join(parts)

    def _discover(self) -> None:
        files = self._files
        log_dir, state_dir = "logs/" + files.name, "nodes/" + files.name
        growing = [log_dir + "/" + name for name in _names(files.log_dir) if name.endswith(_LOGS)]
        growing.append(state_dir + "/supervisor.log")
        replaced = [log_dir + "/" + name for name in _names(files.log_dir) if name.endswith(".json")]
        replaced += [state_dir + "/" + name for name in _STATE_WHOLE]
        replaced += [_TRACES + name for name in _names(os.path.join(files.folder, _TRACES))]
        if self._lead:
            growing += [_CURVES + name for name in _names(os.path.join(files.folder, _CURVES))]
            growing, replaced = [*LEAD_LOGS, *growing], [*LEAD_WHOLE, *replaced]
        for path in replaced:
            if path not in self._known and len(self._known) < _MAX_FILES:
                self._known[path] = ReplacedFile(files.folder, path)
        for path in growing:
            if path not in self._known and len(self._known) < 2 * _MAX_FILES:
                self._known[path] = GrowingFile(files.folder, path, self._offsets.get(path, 0))


def open_plain(path: str) -> "Optional[tuple[int, os.stat_result]]":
    """Descriptor and status of a plain file, which its user closes; None for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status
    os.close(descriptor)
    return None


def _names(folder: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
    except OSError:
        return []
