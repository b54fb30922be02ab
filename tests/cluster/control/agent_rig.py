"""Agents without SSH and without processes: the node's own agent in a thread, or a script in its place.

`FakeNode` is a run folder on a "node" whose supervisor is only written down. `Wire` is where connections come from; it
cuts them after so many bytes, refuses to connect, and counts what went through.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import time_ns as now_ns
from typing import Any, BinaryIO

from testkit.connections import FakeConnection, FakeProcess
from testkit.waiting import WAIT_S, wait_for

from cluster.agent.messages import READY, Message, MessageReader, Spec, pack
from cluster.agent.serve import Agent
from cluster.control.link import NodeLink
from cluster.control.ssh_link import LinkTiming, NodeTask, SshLink
from cluster.errors import SshError
from cluster.ssh.hosts import Host
from engine.runs.process import process_start

HOST = Host("node1", "127.0.0.1")
NODE = HOST.name
LOG = f"logs/{NODE}/rank0000.log"
FAST = LinkTiming(first_pause_s=0.01, longest_pause_s=0.05, silence_s=60.0, start_s=60.0)
RUN_ID = "20260101-000000-abcdef"

Script = Callable[["Stream"], None]


class Stream:
    """What an agent sees: `next` gives the launcher's questions, `write` sends bytes."""

    def __init__(self, line: socket.socket, file: BinaryIO) -> None:
        self.write = line.sendall
        file.read(int(file.read(10) or b"0"))  # the agent's own modules come first
        self.write(READY)
        self._reader = MessageReader(file.read, 1 << 20)

    def next(self) -> Message | None:
        """The next question; None at the end."""
        found = self._reader.next()
        return None if found is None else found[0]

    def say(self, data: bytes = b"", **answer: Any) -> None:
        """An answer."""
        self.write(pack({"got_ns": now_ns(), "now_ns": now_ns(), **answer}, data))

    def wait_for_end(self) -> None:
        """Read until the launcher is gone, and answer nothing."""
        with contextlib.suppress(OSError):
            while self.next() is not None:
                pass


class Wire:
    """The way to the node, as links want it from a pool.

    scripts: what the next agents are; when there are none left, `script`. cuts: after how many bytes the next lines
    are cut (None: not). refusals: errors that the next connects give. fell: how agents end.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.scripts: deque[Script] = deque()
        self.cuts: deque[int | None] = deque()
        self.refusals: deque[SshError] = deque()
        self.fell: dict[str, Any] = {"exit_code": 1, "stderr": b"Traceback: the agent\x1b[31m fell"}
        self.connects = 0
        self.processes: list[FakeProcess] = []
        self.on_connect: Callable[[], object] = lambda: None

    def connect(self, host: Host) -> FakeConnection:
        self.on_connect()
        self.connects += 1
        if self.refusals:
            raise self.refusals.popleft()
        return FakeConnection(HOST, self._open)

    def _open(self, argv: Sequence[str]) -> FakeProcess:
        assert argv[0] == "python3", "a link speaks with its node through the agent, and runs no other command"
        script = self.scripts.popleft() if self.scripts else self.script

        def serve(line: socket.socket) -> None:
            with line.makefile("rb") as file:
                script(Stream(line, file))

        cut_after = self.cuts.popleft() if self.cuts else None
        self.processes.append(FakeProcess(NODE, serve, cut_after=cut_after, **self.fell))
        return self.processes[-1]

    def cut(self) -> None:
        """Cut what stands now."""
        for process in self.processes:
            process.cut()


class FakeNode:
    """A node's run folder with a supervisor that is only written down; `serve` is the real agent upon it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for part in ("logs", "nodes"):
            (folder / part / NODE).mkdir(parents=True, exist_ok=True)
        self.wire = Wire(self.serve)

    def serve(self, stream: Stream) -> None:
        """One agent, as long as its launcher asks."""
        agent = Agent()
        while (question := stream.next()) is not None:
            stream.write(pack(*agent.answer(question)))

    def link(self, run: Path, timing: LinkTiming = FAST, **more: Any) -> SshLink:
        """A link over the wire."""
        return SshLink(HOST, self.wire.connect, NodeTask(run, NODE, str(self.folder), lead=True), timing, **more)

    def append(self, path: str, data: bytes) -> None:
        """More of a log."""
        with (self.folder / path).open("ab") as file:
            file.write(data)

    def run_on(self) -> None:
        """The supervisor lives: it is this process."""
        pid = os.getpid()
        facts = {"pid": pid, "pid_start": process_start(pid), "host": socket.gethostname()}
        self.write("supervisor.json", {**facts, "phase": "running"})

    def end(self, **facts: Any) -> None:
        """The supervisor left an outcome."""
        self.write("outcome.json", {"exit_code": 0, "cause": "exit", **facts})

    def write(self, name: str, document: Message) -> None:
        """A file of the supervisor."""
        path = self.folder / "nodes" / NODE / name
        path.with_name(f".{name}").write_text(json.dumps(document))
        path.with_name(f".{name}").replace(path)

    def read(self, name: str) -> Message | None:
        """A request to the supervisor, or what it wrote."""
        path = self.folder / "nodes" / NODE / name
        return json.loads(path.read_text()) if path.exists() else None


def status(phase: str = "running", **facts: object) -> Message:
    """A status as an agent sends it."""
    return {"phase": phase, "supervisor": {}, "outcome": None, "health": None, **facts}


def spec_of(node: FakeNode) -> Spec:
    """What is started on it."""
    argv = ("true",)
    return Spec(RUN_ID, NODE, 0, 1, 0, 2, str(node.folder), argv, "/", {"KEY": "value"}, (("config.yaml", "a: 1"),))


def wait_for_ends(timeout_s: float = 60.0) -> None:
    """Return once the threads of all links, which are closed, have ended."""
    wait_for(lambda: all(f"link to {NODE}" != thread.name for thread in threading.enumerate()), "links", timeout_s)


@contextlib.contextmanager
def closing(*links: SshLink) -> Iterator[None]:
    """Close links at the end, and see that their threads end."""
    try:
        yield
    finally:
        for link in links:
            link.close()
        wait_for_ends()


def begin(link: NodeLink, spec: Spec, timeout_s: float = WAIT_S) -> None:
    """Return once what `spec` says has begun. Raises StartRefusedError."""
    link.start(spec)
    status = wait_for(lambda: (seen := link.poll()) and (seen.has_started or seen.refusal) and seen, "start", timeout_s)
    if status.refusal is not None:
        raise status.refusal


def swept(link: NodeLink, timeout_s: float = WAIT_S) -> tuple[int, ...]:
    """What is left once the node is swept."""
    link.sweep()
    return tuple(wait_for(lambda: (seen := link.poll()).swept is not None and (seen.swept,), "sweep", timeout_s)[0])
