"""`NodeLink` over SSH: an agent on the node is asked again and again, its files copied, reconnecting until closed.

One thread asks; `poll`, `beat`, `stop` and `request_stacks` only leave a note for it. What was asked for and not
answered when a connection broke is asked for again on the next one. In the copy logs grow by offset, other files are
replaced whole. The length of a log here is the offset from which it goes on, so a launcher that was killed at any
moment loses nothing and writes nothing twice. What a node sends is believed only inside its own folders:

    logs/<node>/NAME   nodes/<node>/NAME   run.json -> nodes/<node>/run.json   profile/rank<NNNN>.json
    metrics.jsonl events.jsonl summary.json tokenizer.json tensorboard/NAME    of the node with rank 0
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.agent.folder import LEAD_LOGS, LEAD_WHOLE
from cluster.agent.messages import Message, write_all
from cluster.code import NoAnswerError, NodeProgram
from cluster.control.link import AgentLink, NodeLink, NodeStatus, StrangeAnswerError
from cluster.errors import SshError, SshFailure
from cluster.plan import LaunchPlan
from cluster.remote_text import integer, one_line
from cluster.ssh.connection import Connect, Connection
from cluster.ssh.hosts import DEFAULT_WIDTH, Host, resolve_hosts
from cluster.ssh.session import SshPool
from engine.runs.folder import RunFolder, typed_overrides

# No use in trying again: a person must do something first.
_LASTING = (SshFailure.AUTH, SshFailure.HOST_KEY_CHANGED, SshFailure.HOST_KEY_UNKNOWN, SshFailure.DNS)
_PATIENCE_S = 15.0  # a connection on which nothing moves for so long is dead: long before a lease is over
_CLOSE_S = 2.0
_WAIT_S = 0.5  # an answer waits so long for news: what is asked for meanwhile is late by as much
_BUDGET_BYTES = 256 << 10  # of files in one answer: on a slow link what is asked for meanwhile is late by its way
_MAX_ANSWERS = 64
_PAUSE_S = 0.02  # between two questions, should an agent never wait


@dataclass(frozen=True)
class NodeTask:
    """Which node of which run. run: the run folder here; folder: that on the node; lead: whether it has rank 0."""

    run: Path
    node: str
    folder: str
    lead: bool


@dataclass(frozen=True)
class LinkTiming:
    """How patient a link is, in seconds. silence_s: an agent answers at once or in half a second."""

    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    silence_s: float = 12.0
    start_s: float = 60.0


class SshLink(AgentLink):
    """One node of one run over SSH; see `NodeLink`. Its thread begins with `follow` or a wish and ends with `close`.

    on_end: told once, when no more connections are needed.
    """

    def __init__(
        self,
        host: Host,
        connect: Connect,
        place: NodeTask,
        timing: LinkTiming = LinkTiming(),
        *,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(place.folder, place.node, timing.start_s)
        self._host, self._connect, self._place, self._timing = host, connect, place, timing
        self._on_end = on_end
        self._thread: threading.Thread | None = None
        self._connection: Connection | None = None
        self._problem = "not connected yet"
        self._heard_at = time.monotonic()
        # Of the thread alone.
        self._copy = NodeCopy(place.run, place.node, lead=place.lead)
        self._clocks: deque[tuple[int, int]] = deque(maxlen=_MAX_ANSWERS)  # round trip, offset
        self._is_following = False

    def follow(self) -> None:
        """Copy what is there and what comes; returns at once."""
        with self._changed:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._serve, name=f"link to {self.node}", daemon=True)
                self._thread.start()

    def poll(self) -> NodeStatus:
        """What is known now. A problem is set as long as the node is not heard, or what it says cannot be kept."""
        with self._changed:
            offset_ns = min(self._clocks)[1] if self._clocks else 0
            status = super().poll()
            problem = status.problem or self._copy.problem
            heard_s = time.monotonic() - self._heard_at
            return replace(status, heard_s=heard_s, problem=problem, clock_offset_ns=offset_ns)

    def _request(self, name: str, wish: Any) -> None:
        super()._request(name, wish)
        self.follow()

    def close(self) -> None:
        """End the thread once it has asked for what is noted, without waiting for it."""
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            self._changed.notify_all()
        if self._thread is None and not was_closed:
            self._on_end()
        elif not was_closed:
            cutting = threading.Timer(_CLOSE_S, self._disconnect)  # a dead link is not waited for
            cutting.daemon = True
            cutting.start()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        pause_s = self._timing.first_pause_s
        while not self._is_closed:
            begin = time.monotonic()
            try:
                self._converse()
            except Exception as error:  # a thread that dies would leave everybody waiting
                self._note_end(error)
            if time.monotonic() - begin > self._timing.longest_pause_s:
                pause_s = self._timing.first_pause_s
            self._pause(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._timing.longest_pause_s)
        self._disconnect()
        self._on_end()

    def _converse(self) -> None:
        """Ask one agent until the link is closed and has nothing more to ask for."""
        self._connection = self._connect(self._host)
        program = NodeProgram(self._connection, self._note_heard)
        self._is_following = False
        try:
            while (question := self._next_question()) is not None:
                sent_ns = time.time_ns()
                answer, data = program.ask(question, silence_s=self._timing.silence_s)
                self._note_clock(sent_ns, time.time_ns(), answer)
                # The files first: what is final has all of them.
                if "files" in answer and not self._copy.take(answer["files"], data):
                    self._is_following = False
                self._take(question, answer)
                if answer.get("all") is True and self._is_following:
                    with self._changed:
                        self._status = replace(self._status, is_synced=self._status.outcome is not None)
                if "files" not in answer:
                    self._pause(_PAUSE_S)
        finally:
            program.close()

    def _next_question(self) -> Message | None:
        with self._changed:
            if self._is_closed and not self._requests:
                return None
            question = self._question(0.0 if self._is_closed else _WAIT_S)
        if "start" in question:
            self._is_following = False
            return question
        if not self._is_following and self._copy.can_go_on():
            question["follow"] = {"lead": self._place.lead, "offsets": self._copy.offsets()}
            self._is_following = True
        question["budget"] = _BUDGET_BYTES if self._is_following else 0
        return question

    def _note_clock(self, sent_ns: int, heard_ns: int, answer: Message) -> None:
        """The node's clock is told by the fastest answer."""
        got_ns, now_ns = integer(answer, "got_ns"), integer(answer, "now_ns")
        if got_ns is not None and now_ns is not None and (way_ns := heard_ns - sent_ns - (now_ns - got_ns)) >= 0:
            with self._changed:
                self._clocks.append((way_ns, (got_ns - sent_ns + now_ns - heard_ns) // 2))

    def _note_heard(self) -> None:
        with self._changed:
            self._heard_at = time.monotonic()

    def _note_end(self, error: Exception) -> None:
        """The connection is of no more use. A start that waits need not wait for the next one, where that is no use."""
        text, refusal = f"{type(error).__name__}: {error}", None
        if isinstance(error, NoAnswerError):
            text, refusal = str(error), "command" if error.is_python_missing else None
        elif isinstance(error, StrangeAnswerError):
            text = f"it sends what makes no sense: {error}"
        elif isinstance(error, SshError):
            silence = f"nothing was heard for {self._timing.silence_s:.3g} s"
            text = silence if error.kind is SshFailure.COMMAND_TIMEOUT else error.detail
            text = f"{text}; {error.remedy}" if error.remedy else text
            refusal = "unreachable" if error.kind in _LASTING else None
        with self._changed:
            self._problem = one_line(text, 2000)
            if refusal is not None and "start" in self._requests:
                self._refuse(refusal, text)
            self._changed.notify_all()
        self._disconnect()

    def _pause(self, seconds: float) -> None:
        """Wait, but not while something urgent was asked for since the last question, nor once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._is_urgent, seconds)
            self._is_urgent = False

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_TRACE = re.compile(r"profile/rank\d{4,9}\.json")
# What only the copy itself makes: a log that was begun anew on its node.
_ASIDE = re.compile(r".*\.before-\d+")
_OBSTRUCTED = (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ENXIO)


@dataclass(frozen=True)
class CopyLimits:
    """What one node may take of the launcher's machine.

    reserve_bytes: of the disk, left for what the launcher itself must write. retry_s: between two looks at a full disk.
    """

    files: int = 4096
    file_bytes: int = 64 << 20  # of one that is replaced; logs have no limit but the disk
    replaced_logs: int = 9
    reserve_bytes: int = 32 << 20
    retry_s: float = 2.0


class NodeCopy:
    """The copy of one node's files in the run folder `run`. lead: whether the node has rank 0.

    problem: why nothing is written now, such as a full disk. Who controls the run is the only one who copies.
    """

    def __init__(self, run: Path, node: str, *, lead: bool, limits: CopyLimits = CopyLimits()) -> None:
        name = RunFolder(run).log_dir(node).name
        self._run, self._logs, self._facts = run, f"logs/{name}", f"nodes/{name}"
        self._lead, self._limits = lead, limits
        self._known: set[str] = set()
        self._retry_at = 0.0
        self.problem: str | None = None

    def offsets(self) -> dict[str, int]:
        """How far every log is here."""
        folders = [self._run / name for name in (self._logs, self._facts, *(["tensorboard"] if self._lead else []))]
        found = [path for folder in folders if not folder.is_symlink() for path in folder.glob("*")]
        found += [self._run / name for name in LEAD_LOGS if self._lead]
        logs = (path for path in found if _is_log(path.name) and path.is_file() and not path.is_symlink())
        return {path.relative_to(self._run).as_posix(): path.stat().st_size for path in logs}

    def take(self, heads: Any, data: bytes) -> bool:
        """Write pieces of files. False: they do not go on where the copy ends, or cannot be written now, so that the
        node must be asked again, from `offsets()`. Raises StrangeAnswerError."""
        if not isinstance(heads, list):
            raise StrangeAnswerError("its list of files makes no sense")
        at = 0
        for head in heads:
            offset, count = integer(head, "offset"), integer(head, "bytes")
            if offset is None or count is None or not isinstance(head.get("path"), str):
                raise StrangeAnswerError("it sends a piece that makes no sense")
            piece, at = data[at : at + count], at + count
            if len(piece) != count:
                raise StrangeAnswerError("it sends fewer bytes than it says")
            if not self._put(head, offset, piece):
                return False
        return True

    def can_go_on(self) -> bool:
        """Whether to ask for files: nothing is in the way, or it may be gone by now."""
        if self.problem is not None and time.monotonic() >= self._retry_at:
            try:
                self._need_room(0)
                self.problem = None
            except OSError as error:
                self._pause(error)
        return self.problem is None

    # --- writing ---------------------------------------------------------------------------------------------------

    def _put(self, head: Message, offset: int, piece: bytes) -> bool:
        """Logs grow; of another file a reader sees the old content or the new one."""
        path = f"{self._facts}/run.json" if head["path"] == "run.json" else str(head["path"])
        if not self._is_allowed(path):
            return True
        size, end, is_log = integer(head, "size"), offset + len(piece), _is_log(path)
        if not is_log and (size is None or end > size):
            raise StrangeAnswerError(f"{path} is longer than announced")
        if not is_log and (size or 0) > self._limits.file_bytes:
            return True
        here = self._run / path
        target = here if is_log else here.with_name(f".{here.name}.part")  # no node may name such a file
        try:
            self._make_folders(path)
            if not is_log and not offset:
                target.unlink(missing_ok=True)
            if is_log and head.get("anew") is True:
                self._set_aside(here)
            if not self._append(target, offset, piece):
                return False
            if not is_log and end == size:
                target.rename(here)
        except OSError as error:
            if error.errno in _OBSTRUCTED:  # something else has its name here
                return True
            self._pause(error)
            return False
        return True

    def _append(self, target: Path, offset: int, piece: bytes) -> bool:
        """Whether that was where the file ends. OSError for links, and anything else but a plain file."""
        # Not blocking: opening a pipe would wait for its other end.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_APPEND | os.O_CREAT
        descriptor = os.open(target, flags, 0o600)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a plain file", str(target))
            if status.st_size != offset:
                return False
            self._need_room(len(piece))
            write_all(descriptor, piece)
            return True
        finally:
            os.close(descriptor)

    def _set_aside(self, log: Path) -> None:
        """The log on the node is another one now: keep what is here under another name."""
        if log.is_symlink() or not log.is_file() or not log.stat().st_size:
            return
        names = [log.with_name(f"{log.name}.before-{number}") for number in range(1, self._limits.replaced_logs + 1)]
        log.rename(next((name for name in names if not name.exists()), names[-1]))

    def _make_folders(self, path: str) -> None:
        """Those above `path`. OSError where one is a link, whoever put it there."""
        folder = self._run
        for part in path.split("/")[:-1]:
            folder = folder / part
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if folder.is_symlink():
                raise OSError(errno.ELOOP, "a link", str(folder))

    def _need_room(self, size: int) -> None:
        """OSError unless the disk has room beside what is reserved."""
        found, kept = os.statvfs(self._run), self._limits.reserve_bytes
        free = found.f_bavail * found.f_frsize
        if kept and free < kept + size:
            text = f"its disk has {free >> 20} MiB left, {kept >> 20} MiB are kept for the launcher"
            raise OSError(errno.ENOSPC, text)

    def _pause(self, error: OSError) -> None:
        self.problem = f"the run folder cannot be written: {error.strerror or error}"
        self._retry_at = time.monotonic() + self._limits.retry_s

    def _is_allowed(self, path: str) -> bool:
        """Whether the node may write `path`."""
        if path in self._known:
            return True
        folder, _, name = path.rpartition("/")
        is_name = _NAME.fullmatch(name) is not None and not _ASIDE.fullmatch(name)
        is_own = (is_name and folder in (self._logs, self._facts)) or _TRACE.fullmatch(path) is not None
        is_leads = (is_name and folder == "tensorboard") or path in (*LEAD_LOGS, *LEAD_WHOLE)
        if not (is_own or (self._lead and is_leads)) or len(self._known) >= self._limits.files:
            return False
        self._known.add(path)
        return True


def _is_log(path: str) -> bool:
    """Whether `path` grows by offset; JSON files are replaced whole."""
    return not (path.endswith((".json", ".part")) or _ASIDE.fullmatch(path))


def open_links(plan: LaunchPlan, run: RunFolder, timing: LinkTiming = LinkTiming()) -> list[NodeLink]:
    """See `cluster.control.runner.open_links`."""
    hosts = resolve_hosts([node.name for node in plan.nodes], plan.config.cluster, typed_overrides(run.path))
    shared = SharedPool(SshPool(patience_s=_PATIENCE_S), len(hosts))
    places = [NodeTask(run.path, node.name, node.folder, lead=node.node_rank == 0) for node in plan.nodes]
    return [
        SshLink(host, shared.connect, place, timing, on_end=shared.leave)
        for host, place in zip(hosts, places, strict=True)
    ]


class SharedPool:
    """A pool for so many users that ends with the last of them, and connects not all at once."""

    def __init__(self, pool: SshPool, users: int) -> None:
        self._pool, self._left, self._at_once = pool, itertools.count(users - 1, -1), threading.Semaphore(DEFAULT_WIDTH)

    def connect(self, host: Host) -> Connection:
        """A connection of the pool."""
        with self._at_once:
            return self._pool.connect(host)

    def leave(self) -> None:
        """One user needs no more connections."""
        if next(self._left) == 0:  # a count is safe in threads
            self._pool.close()
