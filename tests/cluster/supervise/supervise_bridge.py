"""A launcher's end of a bridge over pipes, and a mirror of a few lines."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testkit.waiting import wait_for

from cluster.supervise.bundle import bridge_command, bridge_text
from cluster.supervise.node.frames import Frame, FrameError, FrameReader, Message, pack_message


class BridgeClient:
    """A bridge of this machine. `mirror`: bytes of every log so far, kept over bridges by its user."""

    def __init__(self, mirror: dict[str, bytearray] | None = None, *, read: bool = True) -> None:
        self.mirror = {} if mirror is None else mirror
        self.files: dict[str, str] = {}
        self.messages: list[Message] = []
        self.frames = 0
        self._numbers: dict[int, str] = {}
        self.process = subprocess.Popen(
            bridge_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        assert self.process.stdout is not None
        self._reader = FrameReader(self.process.stdout.read)
        self._lock = threading.Lock()
        self.write(bridge_text())
        self._thread = threading.Thread(target=self._work, daemon=True)
        if read:
            self._thread.start()

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    def say(self, op: str, **words: Any) -> None:
        self.write(pack_message({"op": op, **words}))

    def follow(self, folder: Path | str, node: str, *, lead: bool = False) -> None:
        """Follow, from where the mirror ends."""
        offsets = {path: len(data) for path, data in self.mirror.items()}
        self.say("follow", folder=str(folder), node=node, lead=lead, offsets=offsets)

    def all(self, op: str) -> list[Message]:
        return [message for message in self.messages if message["op"] == op]

    def wait(self, op: str, timeout_s: float = 200.0, accept: Callable[[Message], Any] = bool) -> Message:
        """The newest message with that op that is accepted, once there is one."""
        told = wait_for(lambda: [*filter(accept, self.all(op))], lambda: f"{op}; {self.messages[-5:]}", timeout_s)
        return told[-1]

    def close(self) -> int:
        """End of file on its stdin; its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self._end()

    def kill(self) -> int:
        self.process.kill()
        return self._end()

    def _end(self) -> int:
        code = self.process.wait(200)
        if self._thread.is_alive():
            self._thread.join(10)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return code

    def _work(self) -> None:
        while True:
            try:
                frame = self._reader.next()
            except (FrameError, ValueError):
                return  # it was killed within a frame
            if frame is None:
                return
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        self.frames += 1
        if frame.message is None:
            log = self.mirror[self._numbers[frame.blob]]
            assert frame.offset == len(log), (self._numbers[frame.blob], frame.offset, len(log))
            log += frame.data
            return
        message = frame.message
        if message["op"] == "log":
            self._numbers[message["number"]] = message["path"]
            if message["replace"]:
                self.mirror[message["path"]] = bytearray()
            self.mirror.setdefault(message["path"], bytearray())
        elif message["op"] == "file":
            self.files[message["path"]] = message["text"]
        self.messages.append(message)
