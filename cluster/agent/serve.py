"""What a launcher reaches of a node over one SSH exec: its questions become files, files become answers.

It holds no state: killed at any moment, the next one goes on from the offsets that it is told. The supervisor does not
depend on it. A question may hold any of these, beside `folder` and `node`:

    start {spec}   again: it was sent before, and its answer may have been lost
    follow {lead, offsets {path: bytes}}    from where files are to be sent; from then on what is new in each answer
    beat NUMBER   stop {cause, grace_s}   stacks NONCE   sweep NONCE
    wait_s   budget     how long the answer may wait for news, and how many bytes of files it may carry

and its answer: got_ns now_ns, started | refused {kind, text}, swept [pids], errors {name: text}, status {phase,
supervisor, outcome, health}, files [{path, offset, bytes, ...}] whose bytes follow in their order, all: that was all.

Logs only grow: they are followed by offset. Other files are replaced as a whole: they are read again when time stamp,
size or inode changed. What is neither a plain file nor of a known kind is not looked at.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from cluster.agent.code import install_code
from cluster.agent.folder import (
    LEAD_LOGS,
    LEAD_WHOLE,
    NodeFiles,
    Stamp,
    beat,
    open_plain,
    read_json,
    read_status,
    request_stacks,
    request_stop,
)
from cluster.agent.messages import Message, checked_folder, checked_name
from cluster.agent.start import start, sweep

_POLL_S = 0.1
_IDLE_AFTER_S = 10.0  # without news files are looked at once per question


class Agent:
    """Answers the questions of one launcher."""

    def __init__(self) -> None:
        self._tail: NodeTail | None = None
        self._status: Message | None = None  # as it was sent last
        self._news_at = time.monotonic()
        self._begun: set[str] = set()  # starts and sweeps
        self._done: deque[Message] = deque()  # by threads
        self._errors: deque[tuple[str, str]] = deque()

    def answer(self, asked: Message, data: bytes = b"") -> tuple[Message, bytes]:
        """The answer and the bytes of its files: at once if there is news, else after a while."""
        if "install" in asked:
            return install_code(asked["install"], data), b""
        got_ns, deadline = time.time_ns(), time.monotonic() + asked["wait_s"]
        if "start" in asked:
            self._start(asked["start"], asked.get("again") is True)
        else:
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
        for name in acts:
            if name in asked:
                self._try(name, acts[name], *_place(asked), asked[name])

    def _try(self, name: str, act: Callable[[str, str, Any], None], folder: str, node: str, wish: Any) -> None:
        try:
            act(folder, node, wish)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            self._note_error(name, str(error))
        except OSError as error:
            self._note_error(name, f"{error.filename or 'the run folder'}: {error.strerror or error}")

    def _note_error(self, name: str, text: str) -> None:
        self._errors.append((name, f"{name}: {text}"))

    def _start(self, spec: Any, again: bool) -> None:
        """Until it is answered, files may be those of an earlier attempt."""
        self._tail = self._status = None
        name = str(spec.get("start_id")) if isinstance(spec, dict) else ""
        self._once("start", name, lambda: start(spec, again=again))

    def _follow(self, folder: str, node: str, wish: Message) -> None:
        self._tail = NodeTail(folder, node, wish["lead"], wish["offsets"])
        self._status, self._has_sent_all = None, False

    def _sweep(self, folder: str, node: str, nonce: str) -> None:
        started = read_json(NodeFiles(folder, node).spec) or {}
        run_id = started.get("run_id") or os.path.basename(folder)
        self._once("sweep", nonce, lambda: {"swept": sweep(folder, node, run_id)})

    def _once(self, name: str, nonce: str, work: Callable[[], Message]) -> None:
        """In a thread, for it may take long."""

        def do() -> None:
            try:
                self._done.append(work())
            except Exception as error:  # nobody else hears of it, and the launcher would wait for ever
                self._note_error(name, f"{type(error).__name__}: {error}")

        if nonce not in self._begun:
            self._begun.add(nonce)
            threading.Thread(target=do, daemon=True).start()

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
        status = read_status(*_place(asked))
        if status != self._status:
            news["status"] = self._status = status
        # The files after the status: what is final now has written all of them.
        heads, data = self._tail.take(budget) if self._tail is not None else ([], b"")
        if heads:
            news["files"], self._has_sent_all = heads, False
        elif self._tail is not None and budget and status["phase"] in ("ended", "lost") and not self._has_sent_all:
            news["all"] = self._has_sent_all = True
        return news, data


def _place(asked: Message) -> tuple[str, str]:
    """Folder and node. Raises SpecError, which ends the agent: nobody asks so by mistake."""
    return checked_folder(asked.get("folder")), checked_name(asked.get("node"), "node")


CHUNK_BYTES = 64 << 10
_MAX_FILES = 8192
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_LOGS = (".log", ".stacks")
_STATE_WHOLE = ("supervisor.json", "health.json", "stacks_done.json", "outcome.json")

# {path, offset, bytes} of a piece; anew: a log that was begun anew; size: of a file that is replaced, when it is whole.
Chunk = tuple[dict[str, Any], bytes]


class GrowingFile:
    """A log: what was sent is its beginning, up to `offset`."""

    def __init__(self, root: str, path: str, offset: int) -> None:
        self._path, self._full, self._offset = path, os.path.join(root, path), offset
        self._inode: int | None = None

    def next(self, size: int) -> Chunk | None:
        """The next piece, empty where a file begins so; None when there is nothing new."""
        opened = open_plain(self._full)
        if opened is None:
            return None
        descriptor, stamp = opened
        try:
            anew = stamp.size < self._offset or self._inode not in (None, stamp.inode)
            offset = 0 if anew else self._offset
            is_new = anew or (self._inode is None and not offset)
            data = os.pread(descriptor, size, offset)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        self._inode, self._offset = stamp.inode, offset + len(data)
        head = {"path": self._path, "offset": offset, "bytes": len(data), **({"anew": True} if anew else {})}
        return (head, data) if data or is_new else None


class ReplacedFile:
    """A file that others replace, sent in pieces from one open descriptor, so that they fit together."""

    def __init__(self, root: str, path: str) -> None:
        self._path, self._full = path, os.path.join(root, path)
        self._stamp: Stamp | None = None
        self._open: int | None = None
        self._offset = 0

    def next(self, size: int) -> Chunk | None:
        """The next piece of its present content; None when all of that was sent."""
        if self._open is None:
            self._look()
        if self._open is None or self._stamp is None:
            return None
        try:
            data = os.pread(self._open, min(size, self._stamp.size - self._offset), self._offset)
        except OSError:
            data = b""
        head = {"path": self._path, "offset": self._offset, "bytes": len(data), "size": self._stamp.size}
        self._offset += len(data)
        if not data or self._offset >= self._stamp.size:
            os.close(self._open)
            self._open = None
        return head, data

    def _look(self) -> None:
        """Open it if it has changed."""
        opened = open_plain(self._full)
        if opened is not None and opened[1] == self._stamp:
            os.close(opened[0])
        elif opened is not None:
            (self._open, self._stamp), self._offset = opened, 0


class NodeTail:
    """All files of node `node` that a launcher copies. `lead`: also those that rank 0 writes."""

    def __init__(self, folder: str, node: str, lead: bool, offsets: dict[str, int]) -> None:
        self._files, self._lead, self._offsets = NodeFiles(folder, node), lead, dict(offsets)
        self._known: dict[str, GrowingFile | ReplacedFile] = {}
        self._served = 0

    def take(self, budget: int) -> tuple[list[dict[str, Any]], bytes]:
        """Heads and data of what is new, at most `budget` bytes. No file holds up another: each goes on in its turn."""
        for path, grows in self._found():
            if path not in self._known and len(self._known) < _MAX_FILES:
                root, offset = self._files.folder, self._offsets.get(path, 0)
                self._known[path] = GrowingFile(root, path, offset) if grows else ReplacedFile(root, path)
        files = list(self._known.values())
        waiting = files[self._served :] + files[: self._served]
        heads: list[dict[str, Any]] = []
        parts: list[bytes] = []
        while waiting:
            more = []
            for file in waiting:
                if budget <= 0:
                    break
                piece = file.next(min(CHUNK_BYTES, budget))
                self._served = (self._served + 1) % len(files)
                if piece is not None:
                    heads.append(piece[0])
                    parts.append(piece[1])
                    budget -= len(piece[1])
                    more.append(file)
            waiting = more
        return heads, b"".join(parts)

    def _found(self) -> Iterator[tuple[str, bool]]:
        """(path below the run folder, whether it grows) of every file to send, those first that all need."""
        log_dir, state_dir = f"logs/{self._files.name}", f"nodes/{self._files.name}"
        yield from ((f"{state_dir}/{name}", False) for name in _STATE_WHOLE)
        if self._lead:
            yield from ((name, False) for name in LEAD_WHOLE)
            yield from ((name, True) for name in LEAD_LOGS)
        yield f"{state_dir}/supervisor.log", True
        for name in self._names(log_dir):
            if name.endswith((*_LOGS, ".json")):
                yield f"{log_dir}/{name}", not name.endswith(".json")
        yield from ((f"tensorboard/{name}", True) for name in self._names("tensorboard") if self._lead)
        yield from ((f"profile/{name}", False) for name in self._names("profile"))

    def _names(self, folder: str) -> list[str]:
        try:
            names = os.listdir(os.path.join(self._files.folder, folder))
        except OSError:
            return []
        return sorted(name for name in names if _NAME.fullmatch(name))
