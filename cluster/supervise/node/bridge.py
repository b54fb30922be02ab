"""One SSH exec's worth of reach into a node: requests become files, files become frames.

It holds no state: killed at any moment, the next one goes on from the offsets that it is told. The supervisor does not
depend on it. See `cluster/supervise/node/frames.py` for the frames.

    launcher  start {spec}  follow {folder, node, lead, offsets}  beat {id}  stop {cause, grace_s}  stacks {nonce}
              sweep {}  bye {}
    bridge    hello {host, now_ns, python}  started {pid}  refused {kind, text}  status {phase, supervisor, outcome,
              health}  beat {id, now_ns}  log {number, path, replace, size}, then data frames of that number
              file {path, text}  synced {sizes}  swept {left}  error {text}
"""

import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from typing import Any, Callable, Optional

from cluster.supervise.node.daemon import start
from cluster.supervise.node.folder import NodeFiles, beat, read_json, read_status, request_stacks, request_stop
from cluster.supervise.node.frames import FrameError, FrameReader, Message, pack_data, pack_message
from cluster.supervise.node.spec import SpecError, checked_folder, checked_node, checked_run_id, seconds
from cluster.supervise.node.sweep import sweep
from cluster.supervise.node.tail import NodeTail, Piece

_POLL_S = 0.1
_STATUS_S = 0.2
_IDLE_POLL_S = 1.0
_IDLE_AFTER_S = 10.0
_STATUS_EVERY_S = 2.0
_SILENCE_S = 60.0
_MAX_OFFSETS = 20000
_MAX_STREAMS = 60000
_MAX_WAITING = 1000  # answers that nobody takes: then the launcher is gone


class Bridge:
    """`write` takes all of some bytes and may block; it is called from the thread of `pump` alone."""

    def __init__(self, write: Callable[[bytes], None], carried: Optional[bytes] = None) -> None:
        self._write, self._carried = write, carried
        self._answers: deque[bytes] = deque()
        self._wake = threading.Event()
        self._tail: Optional[NodeTail] = None
        self._place: Optional[dict[str, str]] = None
        self._is_over = False
        self._heard_at = time.monotonic()
        self._beats = 0

    # --- what the launcher says, in a thread of its own ------------------------------------------------------------

    def listen(self, reader: FrameReader) -> None:
        """Do what the launcher says until it has no more to say; problems become messages."""
        self._say({"op": "hello", "host": socket.gethostname(), "now_ns": time.time_ns(), "python": _python()})
        try:
            while not self._is_over:
                frame = reader.next()
                if frame is None:
                    break
                if frame.message is None:
                    raise FrameError("the launcher sent bytes")
                self._heard_at = time.monotonic()
                self._obey(frame.message)
        except FrameError as error:
            self._say({"op": "error", "text": str(error)})
        finally:
            self._is_over = True
            self._wake.set()

    def _obey(self, message: Message) -> None:
        operations: dict[str, Callable[[Message], None]] = {
            "start": self._start,
            "follow": self._follow,
            "beat": self._beat,
            "stop": self._stop,
            "stacks": self._stacks,
            "sweep": self._sweep,
            "bye": self._bye,
        }
        act = operations.get(message["op"])
        if act is None:
            self._say({"op": "error", "text": "there is no operation {!r}".format(message["op"][:40])})
            return
        try:
            act(message)
        except (SpecError, KeyError, TypeError, ValueError) as error:
            self._say({"op": "error", "text": "{}: {}".format(message["op"], error)})
        except OSError as error:
            text = "{}: {}: {}".format(message["op"], error.filename or "the run folder", error.strerror or error)
            self._say({"op": "error", "text": text})

    def _start(self, message: Message) -> None:
        self._say(start(message["spec"], self._carried))

    def _follow(self, message: Message) -> None:
        folder, node = checked_folder(message.get("folder")), checked_node(message.get("node"))
        offsets = message.get("offsets") or {}
        if not isinstance(offsets, dict) or len(offsets) > _MAX_OFFSETS:
            raise SpecError("offsets is no object")
        for path, offset in offsets.items():
            if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < 1 << 50:
                raise SpecError(f"the offset of {str(path)[:100]!r} is no number of bytes")
        self._place = {"folder": folder, "node": node}
        self._tail = NodeTail(folder, node, bool(message.get("lead")), offsets)

    def _beat(self, message: Message) -> None:
        self._beats += 1
        try:
            if self._place is not None:
                beat(self._place["folder"], self._place["node"])
        finally:
            self._say({"op": "beat", "id": message.get("id"), "now_ns": time.time_ns()})

    def _stop(self, message: Message) -> None:
        place = self._followed()
        cause, grace = str(message.get("cause", ""))[:200], seconds(message.get("grace_s"), "grace_s")
        request_stop(place["folder"], place["node"], cause, grace)

    def _stacks(self, message: Message) -> None:
        place = self._followed()
        request_stacks(place["folder"], place["node"], checked_run_id(message.get("nonce")))

    def _sweep(self, message: Message) -> None:
        place = self._followed()
        started = read_json(NodeFiles(place["folder"], place["node"]).spec) or {}
        run_id = checked_run_id(started.get("run_id") or os.path.basename(place["folder"]))

        def work() -> None:
            try:
                self._say({"op": "swept", "left": sweep(place["folder"], place["node"], run_id)})
            except Exception as error:  # nobody else hears of it, and the launcher would wait for ever
                self._say({"op": "error", "text": f"sweep: {type(error).__name__}: {error}"})

        thread = threading.Thread(target=work, name="sweep")
        thread.daemon = True
        thread.start()

    def _bye(self, message: Message) -> None:
        self._is_over = True

    def _followed(self) -> dict[str, str]:
        if self._place is None:
            raise SpecError("nothing is followed")
        return self._place

    def _say(self, message: Message) -> None:
        if len(self._answers) < _MAX_WAITING:
            self._answers.append(pack_message(message))
        self._wake.set()

    # --- what the node has to tell, in the main thread ---------------------------------------------------------------

    def pump(self) -> None:
        """Send answers, status and files until the launcher is gone. Raises OSError when nobody reads any more."""
        status = _Status()
        files = _Files()
        while True:
            self._flush()
            if self._is_over:
                self._flush()
                return
            if self._beats and time.monotonic() > self._heard_at + _SILENCE_S:
                return  # a connection that is dead without anybody saying so
            tail, place = self._tail, self._place
            if tail is None or place is None:
                self._wait(_POLL_S)
                continue
            now = time.monotonic()
            if files.due(now, tail):
                files.send(tail, self._send)
            message = status.look(now, place)
            if message is not None:
                self._write(pack_message(message))
            if files.is_complete(tail, status.is_final):
                self._write(pack_message({"op": "synced", "sizes": tail.sizes()}))
            if tail.streams_used() > _MAX_STREAMS:
                self._write(pack_message({"op": "error", "text": "too many streams: connect again"}))
                return
            if not files.is_busy:
                self._wait(min(files.poll_s, _STATUS_S))

    def _send(self, item: Any) -> None:
        self._flush()
        if isinstance(item, Piece):
            if item.begins:
                head = {"op": "log", "number": item.number, "path": item.path, "replace": item.replace}
                self._write(pack_message({**head, "size": item.size} if item.size is not None else head))
            if item.data:
                self._write(pack_data(item.number, item.offset, item.data))
            return
        self._write(pack_message({"op": "file", "path": item.path, "text": item.data.decode("utf-8", "replace")}))

    def _flush(self) -> None:
        while self._answers:
            self._write(self._answers.popleft())

    def _wait(self, seconds_: float) -> None:
        self._wake.wait(seconds_)
        self._wake.clear()


class _Status:
    """When the launcher is told the node's status: on every change, and every two seconds."""

    def __init__(self) -> None:
        self.is_final = False
        self._sent: Optional[Message] = None
        self._next_look = self._next_send = 0.0

    def look(self, now: float, place: dict[str, str]) -> Optional[Message]:
        """The message to send, if one is due."""
        if now < self._next_look:
            return None
        self._next_look = now + _STATUS_S
        message = {"op": "status", **read_status(place["folder"], place["node"])}
        self.is_final = message["phase"] in ("ended", "lost")
        if message == self._sent and now < self._next_send:
            return None
        self._sent, self._next_send = message, now + _STATUS_EVERY_S
        return message


class _Files:
    """When files are looked at: at once while there is more, seldom while nothing changes."""

    def __init__(self) -> None:
        self.is_busy = False
        self._tail: Optional[NodeTail] = None
        self._changed_at = self._next = 0.0
        self._looks_at_end = 0
        self._synced: Optional[dict[str, int]] = None

    @property
    def poll_s(self) -> float:
        """Seconds between two looks."""
        return _POLL_S if time.monotonic() < self._changed_at + _IDLE_AFTER_S else _IDLE_POLL_S

    def due(self, now: float, tail: NodeTail) -> bool:
        """Whether to look now."""
        if tail is not self._tail:
            self._tail, self._synced, self._looks_at_end = tail, None, 0
            self._changed_at, self._next = now, now
        return self.is_busy or now >= self._next

    def send(self, tail: NodeTail, send: Callable[[Any], None]) -> None:
        """One round over all files."""
        count = 0
        for item in tail.round():
            send(item)
            count += 1
        now = time.monotonic()
        self.is_busy = count > 0
        if count:
            self._changed_at = now
            self._looks_at_end = 0
        self._next = now + self.poll_s

    def is_complete(self, tail: NodeTail, is_final: bool) -> bool:
        """Whether to say now that everything was sent: a whole look after the end found nothing, and it is news."""
        if not is_final or self.is_busy:
            self._looks_at_end = 0
            return False
        self._looks_at_end += 1
        if self._looks_at_end == 1:
            self._next = 0.0  # this look may have begun before the end
            return False
        sizes = tail.sizes()
        if sizes == self._synced:
            return False
        self._synced = sizes
        return True


def main(carried: bytes) -> None:
    """Serve the launcher at the other end of stdin and stdout until it says `bye` or is gone."""
    out = os.dup(1)
    os.dup2(2, 1)  # what anything prints must not get between frames

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(out, view) :]

    bridge = Bridge(write, carried)
    reader = FrameReader(lambda size: os.read(0, size))
    thread = threading.Thread(target=bridge.listen, args=(reader,), name="listen")
    thread.daemon = True
    thread.start()
    try:
        bridge.pump()
    except OSError:
        os._exit(0)  # the launcher is gone
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # a thread still reads


def _python() -> str:
    return "{}.{}.{}".format(*sys.version_info[:3])
