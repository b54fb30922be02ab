"""One conversation with a bridge: what it says goes into the link's state and the mirror, what is wanted to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.control.bridge_session import BridgeSession
from cluster.control.link import StartRefusedError
from cluster.control.link_state import LinkState, PendingStart
from cluster.control.mirror import Mirror, MirrorError
from cluster.control.node_answers import LIVE_PHASES, as_integer, as_pids, as_status
from cluster.remote_text import one_line
from cluster.supervise.node.frames import Frame, Message


class AgainError(Exception):
    """This conversation did what it could; a new bridge on the same connection goes on."""


class NodeTalk:
    """A conversation through `session`, beginning with the bridge's hello.

    While a start is not answered, the files on the node are left alone: they may be those of an earlier attempt.
    """

    def __init__(self, state: LinkState, session: BridgeSession, mirror: Mirror, follow: Message) -> None:
        self._state, self._session, self._mirror, self._follow = state, session, mirror, follow
        self._is_mirroring = False
        self._is_second_start = False  # an earlier connection broke before the answer
        self._start_was_sent = False

    def take(self, frame: Frame) -> None:
        """Act on one frame. Raises MirrorError, MirrorGapError, AgainError."""
        self._state.note_heard()
        if frame.message is None:
            if self._is_mirroring:
                self._mirror.data(frame.blob, frame.offset, frame.data)
            return
        message = frame.message
        match message["op"]:
            case "hello":
                self._hello(message)
            case "started":
                self._started()
            case "refused":
                self._refused(message)
            case "status":
                self._status(message)
            case "beat":
                number = as_integer(message.get("id"))
                self._state.clock.note_answer(number, as_integer(message.get("now_ns")))
                self._state.confirm(self._session, number)
            case "swept":
                self._state.note_swept(as_pids(message.get("left")))
            case "error":
                self._error(one_line(str(message.get("text")), 500))
            case "log" | "file" | "synced" if self._is_mirroring:
                self._mirror_message(message)

    # --- start -----------------------------------------------------------------------------------------------------

    def _hello(self, message: Message) -> None:
        start = self._state.pending_start()
        if start is None:
            self._begin_to_mirror()
        elif start.sent_ns is None:
            start.sent_ns = as_integer(message.get("now_ns"))
            self._send_start(start)
        else:
            self._is_second_start = True
            self._session.send({**self._follow, "offsets": {}})  # to see whether the lost attempt had succeeded

    def _send_start(self, start: PendingStart) -> None:
        self._start_was_sent = True
        self._session.send(start.message)

    def _started(self) -> None:
        if self._state.pending_start() is None:
            return
        self._state.end_start()
        self._state.note_problem(None)
        if self._is_second_start:
            raise AgainError  # what it sent until now was not mirrored
        self._begin_to_mirror()

    def _refused(self, message: Message) -> None:
        start = self._state.pending_start()
        if start is None:
            return
        kind, text = one_line(str(message.get("kind")), 20), one_line(str(message.get("text")), 2000)
        error = StartRefusedError(self._state.status.node, kind, text)
        if self._is_second_start and start.refused is None and kind in ("exists", "busy"):
            start.refused = error
            raise AgainError  # perhaps by the supervisor that the lost attempt has started
        self._state.end_start(error)

    def _look(self, start: PendingStart, phase: str, outcome: Mapping[str, Any] | None) -> None:
        """A status before a start is answered: is what is there the fruit of an attempt whose answer was lost?"""
        ended_ns = as_integer(outcome.get("ended_ns")) if outcome is not None else -1
        if phase in LIVE_PHASES or (start.sent_ns is not None and ended_ns >= start.sent_ns):
            self._state.end_start()
            raise AgainError
        if start.refused is not None:
            self._state.end_start(start.refused)
        elif not self._start_was_sent:
            self._send_start(start)

    # --- the run ---------------------------------------------------------------------------------------------------

    def _begin_to_mirror(self) -> None:
        self._is_mirroring = True
        self._state.follow(self._session, {**self._follow, "offsets": self._mirror.offsets()})

    def _status(self, message: Message) -> None:
        phase, supervisor, outcome, health = as_status(message)
        if not self._is_mirroring:
            start = self._state.pending_start()
            if start is not None:
                self._look(start, phase, outcome)
            return
        self._state.note_status(phase=phase, supervisor=supervisor, outcome=outcome, health=health)
        self._mirror.retry()
        self._state.note_problem(None, self._mirror.problem)

    def _mirror_message(self, message: Message) -> None:
        if message["op"] == "log":
            self._mirror.announce(message)
        elif message["op"] == "file":
            self._mirror.replace(message.get("path"), message.get("text"))
        elif isinstance(sizes := message.get("sizes"), dict):
            if self._mirror.has_all(sizes):
                self._state.note_status(is_synced=self._state.status.outcome is not None)
        else:
            raise MirrorError("it says that all was sent, and not what")

    def _error(self, text: str) -> None:
        if self._state.pending_start() is not None:
            self._state.end_start(StartRefusedError(self._state.status.node, "command", text))
        else:
            self._state.note_problem(None, f"the node says: {text}")
