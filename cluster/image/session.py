"""One agent on one node, as the launcher talks to it: frames to its stdin, its messages as events."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.access.connection import Connection, RemoteProcess
from cluster.errors import SshError
from cluster.image.bundle import agent_command, agent_text
from cluster.image.node.blobs import Source
from cluster.image.node.frames import FrameError, FrameReader, Message, pack_message
from cluster.image.node.links import Limiter, Sender, wanted_blobs
from cluster.remote_text import one_line

_READ_BYTES = 1 << 16
_GONE = "is gone from the store of the launcher; run the command again"
_END_S = 5.0

OnMessage = Callable[[str, Message], None]


class StoredBlobs(Source):
    """The packed layers of one push, in the store of this machine: whole from the start."""

    def __init__(self, paths: Mapping[int, tuple[Path, int]]) -> None:
        self._paths = dict(paths)

    def size(self, number: int) -> int:
        """Bytes of blob `number`."""
        if number not in self._paths:
            raise FrameError(f"there is no blob {number}")
        return self._paths[number][1]

    def follow(self, number: int, offset: int, generation: int | None, wait_s: float) -> tuple[int, str | None, int]:
        """See `Source.follow`."""
        path, size = self._paths[number]
        if not path.exists():
            raise FrameError(f"{path} {_GONE}")
        return 0, str(path), size - offset


class AgentSession:
    """The agent on `connection`'s node. `on_message(node, message)` is called from a thread of the session.

    Messages with the op "gone" come from the session itself: the agent, or the way to it, ended. `close` ends it.
    """

    def __init__(self, connection: Connection, limiter: Limiter, on_message: OnMessage) -> None:
        self.connection, self.node = connection, connection.host.name
        self.heard_at = time.monotonic()
        self.is_abandoned = False
        self._goodbye: threading.Thread | None = None
        self._on_message = on_message
        self._process: RemoteProcess = connection.start(agent_command())
        self._closing = False
        self._source = _Switch()
        self._feed_problem = ""
        self._sender = Sender(self._write, self._source, limiter, self._sending_ended)
        self._text: bytes = agent_text()
        self._reader = threading.Thread(target=self._read, name=f"agent {self.node}", daemon=True)
        self._sender.start()
        self._reader.start()

    def send(self, message: Message) -> None:
        """Send a message; it overtakes blobs."""
        self._sender.message(message)

    def offer(self, source: Source) -> None:
        """What the agent may ask for."""
        self._source.source = source

    def stop_feeding(self) -> None:
        """Send no more blobs."""
        self._sender.forget_requests()

    @property
    def fed_bytes(self) -> int:
        """Bytes of blobs that were sent from here."""
        return self._sender.sent_bytes

    def finish(self, message: Message) -> None:
        """Send a last message, and wait shortly for the agent to end."""
        self._closing = True
        self._sender.message(message)
        self._sender.close()
        self._sender.join(_END_S)
        self._process.close_stdin()
        self._reader.join(_END_S)
        self._process.close()

    def close(self) -> None:
        """Break off: the agent notices that its stdin ended, clears up and ends."""
        self._closing = True
        self._sender.close()
        self._process.close()

    def abandon(self, *, sweep: bool = False) -> None:
        """Break off without waiting: on a dead link even saying goodbye takes its time. Ends the connection, too.

        `sweep`: the agent was killed; another one clears up first, if the node still answers.
        """
        if not self.is_abandoned:
            self.is_abandoned = self._closing = True
            name = f"abandon {self.node}"
            self._goodbye = threading.Thread(target=self._abandon, args=(sweep,), name=name, daemon=True)
            self._goodbye.start()

    def join_abandoned(self, timeout_s: float) -> None:
        """Give what `abandon` began a little time."""
        if self._goodbye is not None:
            self._goodbye.join(timeout_s)

    def _abandon(self, sweep: bool) -> None:
        if sweep:
            self._sweep()
        self.connection.close()
        self._sender.close()
        self._process.close()

    def _sweep(self) -> None:
        message = pack_message({"op": "sweep", "node": self.node})
        with contextlib.suppress(SshError):
            self.connection.run(agent_command(), stdin=agent_text() + message, timeout_s=_END_S)

    def _write(self, data: bytes) -> None:
        text, self._text = self._text, b""
        self._process.write(text + data)

    def _sending_ended(self, problem: str) -> None:
        if problem and not self._closing:
            if problem.endswith(_GONE):  # else it is the node that broke off, and it knows best why
                self._feed_problem = one_line(problem, 300)
            self._process.close_stdin()

    def _read(self) -> None:
        problem = ""
        reader = FrameReader(lambda size: self._process.read(min(size, _READ_BYTES)))
        try:
            while (frame := reader.next()) is not None:
                self.heard_at = time.monotonic()
                if frame.message is None:
                    raise FrameError("an agent sends no data")
                if frame.message["op"] == "want":
                    self._sender.request(wanted_blobs(frame.message))
                else:
                    self._on_message(self.node, frame.message)
        except (FrameError, SshError, OSError, ValueError) as error:  # the last two: read while it is being closed
            problem = one_line(str(error))
        self._on_message(self.node, {"op": "gone", "error": self._epitaph(problem)})

    def _epitaph(self, problem: str) -> str:
        """Why the agent ended, in its own words if there are any."""
        if self._closing:
            return "closed"
        if self._feed_problem:
            self._process.close_stdin()
            return self._feed_problem
        self._process.close_stdin()
        with contextlib.suppress(SshError):
            result = self._process.wait(_END_S)
            if result.exit_code == 127:
                return "no python3 on this node; burst needs Python 3.6 or newer there to bring an image"
            said = one_line(result.stderr[-2000:], 300)
            killed = "was killed" if result.exit_code is None else f"ended with {result.exit_code}"
            return f"its agent {killed}{f': {said}' if said else ''}"
        return problem or "the connection was lost"


class _Switch(Source):
    """A source that is known only later."""

    def __init__(self) -> None:
        self.source: Source | None = None

    def size(self, number: int) -> int:
        return self._real().size(number)

    def follow(self, number: int, offset: int, generation: int | None, wait_s: float) -> tuple[int, str | None, int]:
        return self._real().follow(number, offset, generation, wait_s)

    def _real(self) -> Source:
        if self.source is None:
            raise FrameError("blobs were asked for before any were offered")
        return self.source
