"""`NodeLink` over SSH: an agent on the node is asked again and again, its files copied, reconnecting until closed.

One thread asks; `poll`, `beat`, `stop` and `request_stacks` only leave a note for it. What was asked for and not
answered when a connection broke is asked for again on the next one.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from cluster.agent.messages import Message, Spec
from cluster.code.program import NoAnswerError, NodeProgram
from cluster.control.link import AskedLink, NodeStatus, StrangeAnswerError
from cluster.control.node_copy import NodeCopy
from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.ssh.connection import Connection
from cluster.ssh.hosts import Host
from cluster.values import integer

# No use in trying again: a person must do something first.
_LASTING = (SshFailure.AUTH, SshFailure.HOST_KEY_CHANGED, SshFailure.HOST_KEY_UNKNOWN, SshFailure.DNS)
_CLOSE_S = 2.0
_WAIT_S = 0.5  # an answer waits so long for news: what is asked for meanwhile is late by as much
_BUDGET_BYTES = 256 << 10  # of files in one answer: on a slow link what is asked for meanwhile is late by its way
_KEPT_ANSWERS = 64
_PAUSE_S = 0.02  # between two questions, should an agent never wait


class Connector(Protocol):
    """Where connections come from; `SshPool` is one."""

    def connect(self, host: Host) -> Connection:
        """A logged-in connection. Raises SshError."""


@dataclass(frozen=True)
class NodePlace:
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


class SshLink(AskedLink):
    """One node of one run over SSH; see `NodeLink`. Its thread begins with `follow` or a wish and ends with `close`.

    on_end: told once, when no more connections are needed.
    """

    def __init__(
        self,
        host: Host,
        pool: Connector,
        place: NodePlace,
        timing: LinkTiming = LinkTiming(),
        *,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(place.folder, place.node, timing.start_s)
        self._host, self._pool, self._place, self._timing = host, pool, place, timing
        self._on_end = on_end
        self._thread: threading.Thread | None = None
        self._connection: Connection | None = None
        self._problem = "not connected yet"
        self._heard_at = time.monotonic()
        # Of the thread alone.
        self._copy = NodeCopy(place.run, place.node, lead=place.lead)
        self._clocks: deque[tuple[int, int]] = deque(maxlen=_KEPT_ANSWERS)  # round trip, offset
        self._is_following = False

    def start(self, spec: Spec) -> None:
        """See `NodeLink`; whatever the connection does meanwhile."""
        super().start(spec)
        if self._status.refusal is None:
            self.follow()

    def sweep(self) -> None:
        """See `NodeLink`."""
        super().sweep()
        self.follow()

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

    def close(self) -> None:
        """End the thread once it has asked for what is noted, without waiting for it."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            self._on_end()
        else:
            name = f"close {self.node}"
            threading.Thread(target=self._close_soon, args=(thread,), name=name, daemon=True).start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread of a closed link; whether it ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _close_soon(self, thread: threading.Thread) -> None:
        """A dead link is not waited for."""
        thread.join(_CLOSE_S)
        self._disconnect()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._keep_asking()
        finally:
            self._disconnect()
            self._on_end()

    def _keep_asking(self) -> None:
        pause_s = self._timing.first_pause_s
        while not self._is_closed:
            begin = time.monotonic()
            try:
                self._converse()
            except NoAnswerError as error:
                self._note_end(str(error), "command" if error.is_python_missing else None)
            except StrangeAnswerError as error:
                self._note_end(f"it sends what makes no sense: {error}", None)
            except SshError as error:
                detail = error.detail
                if error.kind is SshFailure.COMMAND_TIMEOUT:
                    detail = f"nothing was heard for {self._timing.silence_s:.3g} s"
                text = f"{detail}; {error.remedy}" if error.remedy else detail
                self._note_end(text, "unreachable" if error.kind in _LASTING else None)
            except Exception as error:  # a thread that dies would leave everybody waiting
                self._note_end(one_line(f"{type(error).__name__}: {error}"), None)
            if time.monotonic() - begin > self._timing.longest_pause_s:
                pause_s = self._timing.first_pause_s
            self._pause(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._timing.longest_pause_s)

    def _converse(self) -> None:
        """Ask one agent until the link is closed and has nothing more to ask for."""
        if self._connection is None:
            self._connection = self._pool.connect(self._host)
        program = NodeProgram(self._connection, self._note_heard)
        self._is_following = False
        try:
            while (question := self._next_question()) is not None:
                sent_ns = time.time_ns()
                answer, data = program.ask(question, silence_s=self._timing.silence_s)
                self._note_clock(sent_ns, time.time_ns(), answer)
                self._heed(question, answer, data)
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

    def _heed(self, question: Message, answer: Message, data: bytes) -> None:
        """The files first: what is final has all of them. Raises StrangeAnswerError."""
        if "files" in answer and not self._copy.take(answer["files"], data):
            self._is_following = False
        self._take(question, answer)
        if answer.get("all") is True and self._is_following:
            with self._changed:
                self._status = replace(self._status, is_synced=self._status.outcome is not None)

    def _note_clock(self, sent_ns: int, heard_ns: int, answer: Message) -> None:
        """The node's clock is told by the fastest answer."""
        got_ns, now_ns = integer(answer, "got_ns"), integer(answer, "now_ns")
        if got_ns is None or now_ns is None:
            return
        way_ns = heard_ns - sent_ns - (now_ns - got_ns)
        if way_ns >= 0:
            with self._changed:
                self._clocks.append((way_ns, (got_ns - sent_ns + now_ns - heard_ns) // 2))

    def _note_heard(self) -> None:
        with self._changed:
            self._heard_at = time.monotonic()

    def _note_end(self, text: str, refusal: str | None) -> None:
        """The connection is of no more use. refusal: a start that waits need not wait for the next one."""
        with self._changed:
            self._problem = text
            if refusal is not None and "start" in self._requests:
                self._refuse(refusal, text)
            self._changed.notify_all()
        self._disconnect()

    def _pause(self, seconds: float) -> None:
        """Wait, but not while something urgent was asked for since the last question, nor once closed."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._is_closed and not self._is_urgent and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)
            self._is_urgent = False

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
