"""What a link over SSH knows of its node and still has to ask of it: shared by its threads and its user."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.control.bridge_session import BeatClock, BridgeSession
from cluster.control.link import NodeStatus, StartRefusedError
from cluster.supervise.node.frames import Message


@dataclass
class PendingStart:
    """A start that somebody waits for.

    sent_ns: the node's clock before it was first sent; None: it never was. refused: what a node answered of which it is
    not known whether an earlier attempt, whose answer was lost, had succeeded.
    """

    message: Message
    sent_ns: int | None = None
    refused: StartRefusedError | None = None
    error: StartRefusedError | None = None
    is_done: bool = False


@dataclass
class LinkState:
    """All fields are guarded by `changed`, which is told of every change that somebody may wait for.

    requests: by op, what the node has not confirmed. session: the bridge that runs now. is_following: it knows of which
    run we speak, so it takes requests. problem: why the node cannot be heard. mirror_problem: why what it says cannot
    be kept. is_urgent: somebody waits for the next connection.
    """

    status: NodeStatus
    changed: threading.Condition = field(default_factory=threading.Condition)
    clock: BeatClock = field(default_factory=BeatClock)
    requests: dict[str, Message] = field(default_factory=dict)
    session: BridgeSession | None = None
    is_following: bool = False
    start: PendingStart | None = None
    swept: tuple[int, ...] | None = None
    heard_at: float = field(default_factory=time.monotonic)
    problem: str | None = "not connected yet"
    mirror_problem: str | None = None
    is_closed: bool = False
    is_urgent: bool = False

    def snapshot(self) -> NodeStatus:
        """The status as of now."""
        with self.changed:
            return replace(
                self.status,
                heard_s=max(0.0, time.monotonic() - self.heard_at),
                problem=self.problem or self.mirror_problem,
                clock_offset_ns=self.clock.offset_ns,
            )

    def open_session(self, session: BridgeSession | None) -> None:
        """There is a new bridge, or none any more."""
        with self.changed:
            self.session, self.is_following = session, False
            if session is not None and self.is_closed:
                session.finish()

    def follow(self, session: BridgeSession, message: Message) -> None:
        """Tell the bridge of which run we speak; then what it has to do, and from now on every request."""
        with self.changed:
            for each in (message, *self.requests.values()):
                session.send(each)
            self.is_following = self.session is session

    def send(self, message: Message) -> None:
        """Give it to the bridge that there is, if there is one."""
        with self.changed:
            if self.session is not None and self.is_following:
                self.session.send(message)

    def request(self, message: Message) -> None:
        """Send it now and over every new connection until the node has confirmed it; the next one comes soon."""
        with self.changed:
            self.requests[message["op"]] = message
            self.is_urgent = True
            self.changed.notify_all()
            self.send(message)

    def confirm(self, session: BridgeSession, beat: int) -> None:
        """The node has answered a beat, so it has all that was sent before."""
        with self.changed:
            for op, message in list(self.requests.items()):
                if op != "sweep" and session.arrived_before(beat, message):
                    del self.requests[op]

    def note_heard(self) -> None:
        """The node said something."""
        with self.changed:
            self.heard_at = time.monotonic()

    def note_status(self, **facts: Any) -> None:
        """New facts of the status."""
        with self.changed:
            self.status = replace(self.status, **facts)
            self.changed.notify_all()

    def note_problem(self, text: str | None, mirror_text: str | None = None) -> None:
        """Why the node cannot be heard now, or why not mirrored."""
        with self.changed:
            self.problem, self.mirror_problem = text, mirror_text
            self.changed.notify_all()

    def sweep(self, deadline: float) -> tuple[int, ...] | None:
        """Ask for a sweep and wait for what it left; None when no answer came. The caller holds `changed`."""
        self.swept = None
        self.request({"op": "sweep"})
        self.wait(lambda: self.swept is not None, deadline)
        self.requests.pop("sweep", None)
        return self.swept

    def note_swept(self, left: tuple[int, ...]) -> None:
        """The answer to a sweep."""
        with self.changed:
            self.swept = left
            self.requests.pop("sweep", None)
            self.changed.notify_all()

    def pending_start(self) -> PendingStart | None:
        """The start that somebody still waits for."""
        with self.changed:
            return None if self.start is None or self.start.is_done else self.start

    def end_start(self, error: StartRefusedError | None = None) -> None:
        """The pending start has succeeded, or failed with `error`."""
        with self.changed:
            if self.start is not None and not self.start.is_done:
                self.start.is_done, self.start.error = True, error
                self.changed.notify_all()

    def wait(self, is_over: Callable[[], bool], deadline: float) -> None:
        """Wait for `is_over`, the end of the link, or a point of the monotonic clock. The caller holds `changed`."""
        while not is_over() and not self.is_closed and (left_s := deadline - time.monotonic()) > 0:
            self.changed.wait(left_s)

    def pause(self, seconds: float) -> None:
        """Wait, but not while something urgent was asked for since the last pause, nor once closed."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while not self.is_closed and not self.is_urgent and (left_s := deadline - time.monotonic()) > 0:
                self.changed.wait(left_s)
            self.is_urgent = False
