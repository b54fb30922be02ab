"""One bridge on one node, from the launcher's side: a thread of its own sends, frames are taken by hand."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque

from cluster.access.connection import Connection
from cluster.code.node.boot import OLD_PYTHON
from cluster.errors import ClusterError, SshError, SshFailure
from cluster.remote_text import one_line
from cluster.supervise.bundle import bridge_command, bridge_text
from cluster.supervise.node.frames import Frame, FrameReader, Message, pack_message

_READ_BYTES = 1 << 18
_EPITAPH_S = 3.0
_KEPT_BEATS = 64


class BridgeEndedError(ClusterError):
    """The bridge ended by itself. is_lasting: the next one would, too."""

    def __init__(self, text: str, *, is_lasting: bool) -> None:
        self.text, self.is_lasting = text, is_lasting
        super().__init__(text)


class BeatClock:
    """The node's clock against this machine's, by the round trips of beats: the midpoint of the fastest counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: OrderedDict[int, int] = OrderedDict()
        self._seen: deque[tuple[int, int]] = deque(maxlen=_KEPT_BEATS)  # round trip, offset

    def note_sent(self, number: int) -> None:
        """Beat `number` leaves now."""
        with self._lock:
            self._sent[number] = time.time_ns()
            while len(self._sent) > _KEPT_BEATS:
                self._sent.popitem(last=False)

    def note_answer(self, number: int, node_ns: int) -> None:
        """The answer to beat `number`, given when the node's clock showed `node_ns`, is here."""
        now = time.time_ns()
        with self._lock:
            sent = self._sent.pop(number, None)
            if sent is not None and now >= sent and node_ns > 0:
                self._seen.append((now - sent, node_ns - (sent + now) // 2))

    @property
    def offset_ns(self) -> int:
        """The node's clock minus this machine's; 0 while nothing is known."""
        with self._lock:
            return min(self._seen)[1] if self._seen else 0


class BridgeSession:
    """A bridge that runs on `connection`'s node. `send` never waits; `next` is for one thread; `close` ends it."""

    def __init__(self, connection: Connection, clock: BeatClock) -> None:
        self._process = connection.start(bridge_command())
        self._clock = clock
        self._frames = FrameReader(self._take)
        self._rest, self._place = b"", 0
        self._silence_s = 0.0
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, Message] = OrderedDict()
        self._written: dict[str, tuple[int, Message]] = {}
        self._number = 0
        self._ending = False
        name = f"bridge to {connection.host.name}"
        self._writer = threading.Thread(target=self._write, name=name, daemon=True)
        self._writer.start()

    def send(self, message: Message) -> None:
        """Send it soon. One of the same op that did not leave yet is replaced: only the last counts."""
        with self._changed:
            self._waiting.pop(message["op"], None)
            self._waiting[message["op"]] = message
            self._changed.notify()

    def next(self, silence_s: float) -> Frame | None:
        """The next frame; None at the end. Raises SshError, also after `silence_s` without a byte, and FrameError."""
        self._silence_s = silence_s
        try:
            return self._frames.next()
        except SshError as error:
            if error.kind is not SshFailure.COMMAND_TIMEOUT:
                raise
            raise SshError(error.host, SshFailure.LOST, f"nothing was heard for {silence_s:.3g} s") from error

    def arrived_before(self, beat: int, message: Message) -> bool:
        """Whether `message` had left when beat `beat` did: then the answer to the beat says that it arrived."""
        with self._changed:
            number, written = self._written.get(message["op"], (beat, None))
        return number < beat and written is message

    @property
    def is_ending(self) -> bool:
        """Whether it was told to end."""
        return self._ending

    def epitaph(self) -> BridgeEndedError:
        """Why the bridge ended unasked, in its own words if it left some. Raises SshError when the connection ended."""
        self._process.close_stdin()
        result = self._process.wait(_EPITAPH_S)
        if result.exit_code == 127:
            return BridgeEndedError(f"there is no python3; {OLD_PYTHON}", is_lasting=True)
        said = one_line(result.stderr[-2000:], 300)
        killed = "was killed" if result.exit_code is None else f"ended with {result.exit_code}"
        return BridgeEndedError(
            f"the bridge there {killed}{f': {said}' if said else ''}", is_lasting=OLD_PYTHON in said
        )

    def finish(self) -> None:
        """Send what waits, then end of file: the bridge ends. From any thread; does not wait."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def close(self) -> None:
        """Let go of it at once; it ends when it notices."""
        self.finish()
        self._process.close()

    def _write(self) -> None:
        with contextlib.suppress(SshError, OSError, ValueError):  # the reader hears of a lost connection, too
            self._process.write(bridge_text())
            while (message := self._next_message()) is not None:
                self._process.write(pack_message(message))
        self._process.close_stdin()

    def _next_message(self) -> Message | None:
        """The next message to write, numbered; None at the end."""
        with self._changed:
            while not self._waiting and not self._ending:
                self._changed.wait()
            if not self._waiting:
                return None
            op, message = self._waiting.popitem(last=False)
            self._number += 1
            self._written[op] = (self._number, message)
            if op != "beat":
                return message
            self._clock.note_sent(self._number)
            return {**message, "id": self._number}

    def _take(self, size: int) -> bytes:
        """Up to `size` bytes of what was read; reading in large pieces, for most frames are small."""
        if self._place == len(self._rest):
            self._rest, self._place = self._process.read(_READ_BYTES, self._silence_s), 0
        piece = self._rest[self._place : self._place + size]
        self._place += len(piece)
        return piece
