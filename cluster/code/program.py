"""Programs for nodes: their code is one zip for the stdin of a command. Nothing is installed there, nothing stays."""

from __future__ import annotations

import contextlib
import functools
import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster.agent.messages import READY, Message, MessageError, MessageReader, pack
from cluster.errors import ClusterError, SshError
from cluster.remote_text import one_line
from cluster.ssh.connection import Connection

OLD_PYTHON = "burst needs Python 3.9 or newer as python3"
_NODE_FILES = ("cluster/__init__.py", "cluster/agent/*.py", "cluster/image/__init__.py", "cluster/image/node/*.py")
_ROOT = Path(__file__).resolve().parent.parent.parent
# The code lies in a file without a name, which Python imports from and other processes may inherit.
_BOOT = f"""
import importlib, os, sys, tempfile
if sys.version_info < (3, 9): sys.exit("{OLD_PYTHON}")
def take(size):
    parts = b""
    while len(parts) < size:
        data = os.read(0, size - len(parts))
        if not data: sys.exit(1)
        parts += data
    return parts
code = os.memfd_create("burst") if hasattr(os, "memfd_create") else os.dup(tempfile.TemporaryFile().fileno())
os.write(code, take(int(take(10))))
sys.path.insert(0, f"/proc/self/fd/{{code}}")
importlib.import_module(sys.argv.pop(1)).main()
""".strip()
_EPITAPH_S = 3.0
_NOISE_BYTES = 64 << 10  # of a login shell
_READ_BYTES = 1 << 18
MAX_ANSWER_BYTES = 4 << 20


def program_words(module: str, name: str) -> tuple[str, ...]:
    """The command that reads `node_code` from its stdin and calls `main` of `module`; `name` is for process lists."""
    return ("python3", "-I", "-c", _BOOT, module, name)


@functools.cache
def node_code() -> bytes:
    """All that runs on nodes, a zip behind its length in ten digits."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as code:
        for path in (path for pattern in _NODE_FILES for path in sorted(_ROOT.glob(pattern))):
            code.writestr(str(path.relative_to(_ROOT)), path.read_bytes())
    return f"{stream.tell():010d}".encode("ascii") + stream.getvalue()


class NoAnswerError(ClusterError):
    """A program on a node did not answer; `is_python_missing` when there was nothing to run it."""

    def __init__(self, text: str, *, is_python_missing: bool = False) -> None:
        super().__init__(text)
        self.is_python_missing = is_python_missing


class NodeProgram:
    """The agent on the node of `connection`, for one thread. on_bytes: told whenever something came."""

    def __init__(self, connection: Connection, on_bytes: Callable[[], None] = lambda: None) -> None:
        self._text = node_code()
        self._process = connection.start(program_words("cluster.agent.__main__", "burst-agent"))
        self._reader = MessageReader(self._read, MAX_ANSWER_BYTES)
        self._on_bytes, self._silence_s = on_bytes, 0.0
        self._rest = b""  # came with what was read before

    def ask(self, question: Message, data: bytes = b"", *, silence_s: float) -> tuple[Message, bytes]:
        """Its answer. Raises SshError, also after `silence_s` without a byte, and NoAnswerError."""
        self._silence_s, text, self._text = silence_s, self._text, b""
        with contextlib.suppress(SshError):  # why it no longer reads is told by what it says
            self._process.write(text + pack(question, data))
        try:
            if text:
                self._await_ready()
            found = self._reader.next()
        except MessageError as error:
            raise NoAnswerError(f"it sends what makes no sense: {error}") from error
        if found is None:
            raise self._epitaph()
        return found

    def close(self) -> None:
        """Let go of it; it ends when it notices."""
        self._process.close()

    def _await_ready(self) -> None:
        seen = b""
        while READY not in seen:
            piece = self._read(_READ_BYTES)
            seen += piece
            if not piece:
                raise self._epitaph()
            if len(seen) > _NOISE_BYTES and READY not in seen:
                raise MessageError("it says much, and nothing of ours")
        self._rest = seen.partition(READY)[2]

    def _read(self, size: int) -> bytes:
        if not self._rest:
            self._rest = self._process.read(_READ_BYTES, self._silence_s)
            if self._rest:
                self._on_bytes()
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece

    def _epitaph(self) -> NoAnswerError:
        """Why it ended unasked, in its own words if it left some. Raises SshError when the connection ended."""
        self._process.close_stdin()
        result = self._process.wait(_EPITAPH_S)
        if result.exit_code == 127:
            return NoAnswerError(f"there is no python3; {OLD_PYTHON}", is_python_missing=True)
        said = one_line(result.stderr[-300:], 300)
        code = "was killed" if result.exit_code is None else f"ended with {result.exit_code}"
        text = f"python3 there {code} without an answer{f': {said}' if said else ''}"
        return NoAnswerError(text, is_python_missing=OLD_PYTHON in said)


def ask_program(connection: Connection, question: Mapping[str, Any], data: bytes = b"", *, timeout_s: float) -> Message:
    """The agent's answer to one question. Raises SshError when the connection fails, NoAnswerError when it does."""
    program = NodeProgram(connection)
    try:
        return program.ask(dict(question), data, silence_s=timeout_s)[0]
    finally:
        program.close()
