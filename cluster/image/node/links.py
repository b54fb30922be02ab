"""Sending blobs to whoever asks for them, and receiving them from whoever sends. Python 3.6, standard library only.

The receiver says what it lacks and from which byte on; the sender follows files that may still grow. So every node of a
chain passes on what it has, and a new sender can take over at any byte.
"""

import collections
import threading
import time
from typing import Callable, Counter, Deque, Iterable, List, Optional, Tuple

from cluster.image.node.blobs import BlobFolder, Source
from cluster.image.node.frames import MAX_DATA_BYTES, Frame, FrameError, Message, pack_data, pack_message

PING_S = 5.0
MAX_CORRUPT = 3
_WAIT_S = 0.2


class ReceiveError(Exception):
    """This node cannot take what it is sent: its disk is full, or bytes arrive damaged again and again."""


class Limiter:
    """At most `rate` bytes per second through `take`, shared by all threads that use it; None: as fast as it goes."""

    def __init__(self, rate: Optional[float]) -> None:
        self._rate = rate
        # Small pieces at small rates: nobody may be silent for long.
        self.piece_bytes = MAX_DATA_BYTES if not rate else int(min(MAX_DATA_BYTES, max(1024, rate / 20)))
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Wait until `size` bytes may go."""
        if not self._rate:
            return
        with self._lock:
            start = max(time.time(), self._free_at)
            self._free_at = start + size / self._rate
        time.sleep(max(0.0, start - time.time()))


class Sender:
    """A thread that writes messages and the blobs that were asked for; messages overtake data.

    `on_end(text)` is called once, from that thread: "" after `close`, else what went wrong.
    """

    def __init__(
        self, write: Callable[[bytes], None], source: Source, limiter: Limiter, on_end: Callable[[str], None]
    ) -> None:
        self._write, self._source, self._limiter, self._on_end = write, source, limiter, on_end
        self._wake = threading.Condition()
        self._messages: Deque[Message] = collections.deque()
        self._requests: Deque[Tuple[int, int]] = collections.deque()
        self._closed = False
        self._generation: Optional[int] = None
        self.sent_bytes = 0
        self._thread = threading.Thread(target=self._run, name="sender")
        self._thread.daemon = True

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def message(self, message: Message) -> None:
        """Send `message` before any more data."""
        with self._wake:
            self._messages.append(message)
            self._wake.notify()

    def request(self, blobs: Iterable[Tuple[int, int]]) -> None:
        """Send these blobs, each from an offset on, after those asked for before."""
        with self._wake:
            self._requests.extend(blobs)
            self._wake.notify()

    def forget_requests(self) -> None:
        """Send no more data; messages still go."""
        with self._wake:
            self._requests.clear()
            self._generation = None

    def close(self) -> None:
        """End the thread after the messages that wait."""
        with self._wake:
            self._closed = True
            self._requests.clear()
            self._wake.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        problem = ""
        try:
            while self._step():
                pass
        except Exception as error:  # whatever it is, the peer gets nothing more: its owner must hear of it
            problem = str(error) or type(error).__name__
        self._on_end(problem)

    def _step(self) -> bool:
        with self._wake:
            if not self._messages and not self._requests and not self._closed:
                self._wake.wait(PING_S)
            if self._messages:
                message: Optional[Message] = self._messages.popleft()
            elif self._closed:
                return False
            else:
                message = None if self._requests else {"op": "ping"}
            request = self._requests[0] if self._requests else None
        if message is not None:
            self._write(pack_message(message))
        elif request is not None:
            self._send_some(request)
        return True

    def _send_some(self, request: Tuple[int, int]) -> None:
        blob, offset = request
        size = self._source.size(blob)
        if offset >= size:
            self._replace(request, None, None)
            return
        generation, path, ready = self._source.follow(blob, offset, self._generation, _WAIT_S)
        if self._generation is not None and generation != self._generation:
            self._write(pack_message({"op": "restart", "blob": blob}))
            self._replace(request, (blob, 0), generation)
            return
        self._generation = generation
        if path is None:
            return
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(min(ready, self._limiter.piece_bytes))
        except FileNotFoundError:  # renamed or dropped in this moment: the next look tells
            return
        if not data:
            raise FrameError(f"blob {blob} is shorter than it should be")
        self._limiter.take(len(data))
        self._write(pack_data(blob, offset, data))
        self.sent_bytes += len(data)
        self._replace(request, (blob, offset + len(data)), generation)

    def _replace(self, old: Tuple[int, int], new: Optional[Tuple[int, int]], generation: Optional[int]) -> None:
        with self._wake:
            if self._requests and self._requests[0] == old:
                self._requests.popleft()
                if new is not None:
                    self._requests.appendleft(new)
                self._generation = generation if new is not None else None


class Receiver:
    """Puts what one sender at a time delivers into a `BlobFolder`; a new sender takes over where the old one stood.

    on_blob(number) and on_corrupt(number) tell of blobs that became whole, rightly or wrongly.
    """

    def __init__(
        self,
        folder: BlobFolder,
        fetch: Iterable[int],
        on_blob: Callable[[int], None],
        on_corrupt: Callable[[int], None],
    ) -> None:
        self._folder, self._on_blob, self._on_corrupt = folder, on_blob, on_corrupt
        self.fetch = [int(number) for number in fetch]
        if any(number not in folder.blobs for number in self.fetch):
            raise FrameError("a blob to fetch is not in this push")
        self._lock = threading.RLock()
        self._token = 0
        self._reply: Optional[Callable[[Message], None]] = None
        self._corrupt: Counter[int] = collections.Counter()

    def attach(self, reply: Callable[[Message], None]) -> int:
        """A token for the frames of a new sender, which is told by `reply` what is wanted; older tokens are void."""
        with self._lock:
            self._token += 1
            self._reply = reply
            self._want(number for number in self.fetch if not self._folder.is_complete(number))
            return self._token

    def fetch_also(self, numbers: Iterable[int]) -> None:
        """Want these blobs, too, from the next sender."""
        with self._lock:
            self.fetch += [number for number in numbers if number not in self.fetch]

    def frame(self, token: int, frame: Frame) -> bool:
        """Take one frame; False if its sender was replaced. FrameError: the sender fails, ReceiveError: we do."""
        with self._lock:
            if token != self._token:
                return False
            number = frame.blob
            if frame.message is not None:
                if frame.message["op"] == "restart":
                    number = frame.message.get("blob", -1)
                    if number in self.fetch and not self._folder.is_complete(number):
                        self._folder.drop(number)
                return True
            if number not in self.fetch:
                raise FrameError(f"blob {number} was not asked for")
            if not self._folder.is_complete(number):
                self._append(number, frame)
            return True

    def _append(self, number: int, frame: Frame) -> None:
        try:
            right = self._folder.append(number, frame.offset, frame.data)
        except OSError as error:
            text = f"cannot write into {self._folder.folder}: {error.strerror or error}"
            raise ReceiveError(text) from error
        if not right:
            self._corrupt[number] += 1
            self._on_corrupt(number)
            if self._corrupt[number] >= MAX_CORRUPT:
                raise ReceiveError(f"layer {number} arrived damaged {MAX_CORRUPT} times")
            self._want([number])
        elif self._folder.is_complete(number):
            self._on_blob(number)

    def _want(self, numbers: Iterable[int]) -> None:
        wanted = [[number, self._folder.length(number)] for number in numbers]
        if self._reply is not None:
            self._reply({"op": "want", "blobs": wanted})


def wanted_blobs(message: Message) -> List[Tuple[int, int]]:
    """What a `want` message asks for. Raises FrameError if it makes no sense."""
    rows = message.get("blobs")
    if not isinstance(rows, list):
        raise FrameError("a want names no blobs")
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or not all(isinstance(part, int) and part >= 0 for part in row):
            raise FrameError("a want makes no sense")
    return [(row[0], row[1]) for row in rows]
