"""`NodeLink` over SSH: a bridge on the node, its files mirrored into the run folder, reconnecting until closed.

One thread connects, reads and writes the mirror; another one sends. `poll`, `beat`, `stop` and `request_stacks` only
leave a note for them. What was asked for and not confirmed when a connection broke is asked for again on the next one.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cluster.access.connection import Connection
from cluster.access.hosts import Host
from cluster.control.bridge_session import BridgeEndedError, BridgeSession
from cluster.control.link import NodeSpec, NodeStatus, StartRefusedError
from cluster.control.link_state import LinkState, PendingStart
from cluster.control.mirror import Mirror, MirrorError, MirrorGapError
from cluster.control.node_talk import AgainError, NodeTalk
from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.supervise.node.frames import FrameError, Message, pack_message

# No use in trying again: a person must do something first.
_LASTING = (SshFailure.AUTH, SshFailure.HOST_KEY_CHANGED, SshFailure.HOST_KEY_UNKNOWN, SshFailure.DNS)
_CLOSE_S = 2.0


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

    def follow_message(self) -> Message:
        """What asks a bridge for everything of this node; without offsets."""
        return {"op": "follow", "folder": self.folder, "node": self.node, "lead": self.lead}


@dataclass(frozen=True)
class LinkTiming:
    """How patient a link is, in seconds. silence_s: a bridge says something every 2 s."""

    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    silence_s: float = 12.0
    start_s: float = 60.0


class SshLink:
    """One node of one run over SSH; see `NodeLink`. Its threads begin with `follow` or `start` and end with `close`.

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
        self._host, self._pool, self._place, self._timing = host, pool, place, timing
        self._on_end = on_end
        self._mirror = Mirror(place.run, place.node, lead=place.lead)
        self._state = LinkState(NodeStatus(place.node))
        self._thread: threading.Thread | None = None
        self._connection: Connection | None = None

    @property
    def node(self) -> str:
        """The node's name."""
        return self._place.node

    def start(self, spec: NodeSpec) -> None:
        """Start the supervisor, whatever the connection does meanwhile; see `NodeLink.start`."""
        state, start = self._state, PendingStart({"op": "start", "spec": spec.to_dict()})
        try:
            pack_message(start.message)
        except FrameError as error:
            raise StartRefusedError(self.node, "command", f"its files are too large: {error}") from error
        deadline = time.monotonic() + self._timing.start_s
        with state.changed:
            state.start, state.status, state.is_urgent = start, NodeStatus(self.node), True
            state.requests.clear()
            if state.session is not None:
                state.session.finish()  # the next one begins with the start
            self._begin()
            state.wait(lambda: start.is_done, deadline)
            state.start = None
            if start.error is not None:
                raise start.error
            if not start.is_done:
                cause = "given up" if state.is_closed else f"no answer in {self._timing.start_s:.3g} s"
                text = f"{cause}: {state.problem or 'the node takes its time'}"
                raise StartRefusedError(self.node, "unreachable", text)

    def follow(self) -> None:
        """Mirror what is there and what comes; returns at once."""
        with self._state.changed:
            self._begin()

    def poll(self) -> NodeStatus:
        """What is known now. A problem is set as long as the node is not heard, or what it says cannot be kept."""
        return self._state.snapshot()

    def beat(self) -> None:
        """Renew the lease, if the node can be reached."""
        self._state.send({"op": "beat"})

    def stop(self, cause: str, grace_s: float) -> None:
        """Ask for the end; kept until the node has it."""
        self._state.request({"op": "stop", "cause": cause, "grace_s": grace_s})

    def request_stacks(self, nonce: str) -> None:
        """Ask for stacks; kept until the node has it."""
        self._state.request({"op": "stacks", "nonce": nonce})

    def sweep(self, timeout_s: float) -> tuple[int, ...]:
        """Kill what is left; pids that would not die. Raises SshError when the node does not answer in time."""
        state, deadline = self._state, time.monotonic() + timeout_s
        with state.changed:
            self._begin()
            left = state.sweep(deadline)
            if left is not None:
                return left
            detail = f"was not seen clearing up within {timeout_s:.3g} s: {state.problem or 'no answer'}"
        raise SshError(self.node, SshFailure.LOST, detail, "its supervisor ends the run when its lease is over")

    def close(self) -> None:
        """Say goodbye to the bridge and end the threads, without waiting for them."""
        state = self._state
        with state.changed:
            if state.is_closed:
                return
            state.is_closed = True
            state.changed.notify_all()
            if state.session is not None:
                state.session.send({"op": "bye"})
                state.session.finish()
            thread = self._thread
        if thread is None:
            self._on_end()
        else:
            name = f"close {self.node}"
            threading.Thread(target=self._close_soon, args=(thread,), name=name, daemon=True).start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads of a closed link; whether they ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _begin(self) -> None:
        if self._thread is None and not self._state.is_closed:
            self._thread = threading.Thread(target=self._serve, name=f"link to {self.node}", daemon=True)
            self._thread.start()

    def _close_soon(self, thread: threading.Thread) -> None:
        """A dead link is not waited for."""
        thread.join(_CLOSE_S)
        self._disconnect()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._keep_conversing()
        finally:
            self._disconnect()
            self._mirror.close()
            self._on_end()

    def _keep_conversing(self) -> None:
        pause_s = self._timing.first_pause_s
        while not self._state.is_closed:
            begin = time.monotonic()
            try:
                self._converse()
            except (MirrorGapError, AgainError):
                pass  # the connection is as good as before
            except BridgeEndedError as error:
                self._note_end(error.text, "command" if error.is_lasting else None)
            except SshError as error:
                text = f"{error.detail}; {error.remedy}" if error.remedy else error.detail
                self._note_end(text, "unreachable" if error.kind in _LASTING else None)
            except (FrameError, MirrorError) as error:
                self._note_end(f"it sends what makes no sense: {one_line(str(error))}", None)
            except Exception as error:  # a thread that dies would leave everybody waiting
                self._note_end(one_line(f"{type(error).__name__}: {error}"), None)
            if time.monotonic() - begin > self._timing.longest_pause_s:
                pause_s = self._timing.first_pause_s
            self._state.pause(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._timing.longest_pause_s)

    def _converse(self) -> None:
        """One bridge from its first message to its last; always raises, unless we asked for its end."""
        if self._connection is None:
            self._connection = self._pool.connect(self._host)
        state = self._state
        session = BridgeSession(self._connection, state.clock)
        talk = NodeTalk(state, session, self._mirror, self._place.follow_message())
        state.open_session(session)
        try:
            while (frame := session.next(self._timing.silence_s)) is not None:
                talk.take(frame)
            if state.is_closed:
                return
            if state.pending_start() is not None and session.is_ending:
                raise AgainError
            raise session.epitaph()
        finally:
            state.open_session(None)
            session.close()

    def _note_end(self, text: str, refusal: str | None) -> None:
        """The connection is of no more use. refusal: a start that waits need not wait for the next one."""
        self._state.note_problem(text)
        self._disconnect()
        if refusal is not None:
            self._state.end_start(StartRefusedError(self.node, refusal, text))

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
