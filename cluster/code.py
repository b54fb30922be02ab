"""Code on its way to nodes: that of the agent, which leaves nothing there, and that of the ranks, which stays.

The agent's is one zip for the stdin of a command. The ranks' is an archive named by its content (equal sources give
equal names and equal bytes) for the nodes that lack it; where all share a folder, for the first one.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import secrets
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.agent.messages import READY, Message, MessageError, MessageReader, code_id_of, pack
from cluster.errors import ClusterError, SshError
from cluster.plan_nodes import node_root
from cluster.remote_text import one_line
from cluster.ssh.connection import Connect, Connection
from cluster.ssh.hosts import Host, fan_out, fold_nodes
from cluster.survey.section import FIND_PYTHON, Question, program_question
from engine.config.cluster import ClusterConfig

OLD_PYTHON = "burst needs Python 3.9 or newer as python3, or as cluster.python of nodes without containers"
_NODE_FILES = (
    *("cluster/__init__.py", "cluster/agent/*.py", "cluster/image/__init__.py", "cluster/image/node/*.py"),
    *("engine/__init__.py", "engine/runs/__init__.py", "engine/runs/process.py"),
)
_ROOT = Path(__file__).resolve().parent.parent
# The code lies in a file without a name, which Python imports from and other processes may inherit.
_BEGIN = f"""
import base64, importlib, json, os, sys, tempfile
if sys.version_info < (3, 9): sys.exit("{OLD_PYTHON}")
code = os.memfd_create("burst") if hasattr(os, "memfd_create") else os.dup(tempfile.TemporaryFile().fileno())
sys.path.insert(0, f"/proc/self/fd/{{code}}")
""".lstrip()
_BOOT = f"""{_BEGIN}
def take(size):
    parts = b""
    while len(parts) < size:
        data = os.read(0, size - len(parts))
        if not data: sys.exit(1)
        parts += data
    return parts
os.write(code, take(int(take(10))))
importlib.import_module(sys.argv.pop(1)).main()
""".strip()
_CHOOSE = f'{FIND_PYTHON}find_python "$1" || {{ echo "{OLD_PYTHON}" >&2; exit 1; }}\nshift\nexec "$python" "$@"'
_AGENT = ("cluster.agent.__main__", "burst-agent")
_EPITAPH_S = 3.0
_NOISE_BYTES = 64 << 10  # of a login shell
_READ_BYTES = 1 << 18
MAX_ANSWER_BYTES = 4 << 20


@functools.cache
def node_code() -> bytes:
    """All that runs on nodes, a zip behind its length in ten digits."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as code:
        for path in (path for pattern in _NODE_FILES for path in sorted(_ROOT.glob(pattern))):
            code.writestr(str(path.relative_to(_ROOT)), path.read_bytes())
    return f"{stream.tell():010d}".encode("ascii") + stream.getvalue()


def agent_question(name: str, limit_s: int, module: str, function: str, given: Mapping[str, Any]) -> Question:
    """What `function` of a module of the agent returns of `given`, as one JSON value; its code travels along."""
    code = base64.b64encode(node_code()[10:]).decode("ascii")
    answer = f"importlib.import_module({module!r}).{function}(json.loads({json.dumps(given)!r}))"
    program = f"{_BEGIN}os.write(code, base64.b64decode({code!r}))\nprint(json.dumps({answer}))\n"
    return program_question(name, limit_s, program)


class NoAnswerError(ClusterError):
    """A program on a node did not answer; `is_python_missing` when there was nothing to run it."""

    def __init__(self, text: str, *, is_python_missing: bool = False) -> None:
        super().__init__(text)
        self.is_python_missing = is_python_missing


class NodeProgram:
    """The agent, or another program, on the node of `connection`, for one thread; it ends when it is let go of.

    on_bytes: told whenever something came. words: its module, and its name in lists of processes.
    """

    def __init__(
        self, connection: Connection, on_bytes: Callable[[], None] = lambda: None, words: Sequence[str] = _AGENT
    ) -> None:
        self._text = node_code()
        python = connection.host.python
        choice = ("python3",) if python is None else ("sh", "-c", _CHOOSE, "burst", python)
        self._process = connection.start((*choice, "-I", "-c", _BOOT, *words))
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


@dataclass(frozen=True)
class CodeArchive:
    """code_id: see `cluster.agent.code`. data: a zip that Python imports from."""

    code_id: str
    data: bytes


class CodeError(ClusterError):
    """The code cannot be brought to a node."""


def build_archive(root: Path = _ROOT) -> CodeArchive:
    """The archive of the engine below `root`, this installation: what ranks import of us. No dates, no owners."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for path in sorted((root / "engine").rglob("*.py")):
            member = zipfile.ZipInfo(path.relative_to(root).as_posix())
            archive.writestr(member, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return CodeArchive(code_id_of(stream.getvalue()), stream.getvalue())


MAX_SAVED = 5
_DAY_S = 86400.0
_SHARED_AGE_S = 30 * _DAY_S  # who else uses a shared folder cannot be seen from one node
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class CodeFolder:
    """Where the code of a run lies. root: the folder of all code on a node, which may begin with ~/. is_shared: all
    nodes see one folder there."""

    root: str
    is_shared: bool


def code_folder(cluster: ClusterConfig, user: str) -> CodeFolder:
    """The place that the configuration means. user: tells users of a shared folder apart."""
    if cluster.shared_folder is not None:
        return CodeFolder(shared_subfolder(cluster.shared_folder, user, "code"), True)
    return CodeFolder(f"{node_root(cluster)}/code", False)


def shared_subfolder(shared_folder: str, user: str, what: str) -> str:
    """The folder of a user's `what` in the folder that all nodes share."""
    return f"{shared_folder.rstrip('/')}/.burst-{user}/{what}"


def upload_code(
    hosts: Sequence[Host],
    archive: CodeArchive,
    place: CodeFolder,
    connect: Connect,
    folders: Mapping[str, Sequence[str]] = {},
    private: Sequence[str] = (),
) -> None:
    """Raises CodeError with all nodes that do not have it now.

    folders: more of them to be made, by node. private: those of all nodes that must be this user's alone.
    """
    question = {
        "root": place.root,
        "code_id": archive.code_id,
        "nonce": secrets.token_hex(8),
        "keep": MAX_SAVED,
        "age_s": _SHARED_AGE_S if place.is_shared else _DAY_S,
        "private": list(private),
    }

    def on_all(hosts: Sequence[Host], data: bytes) -> None:
        def work(host: Host) -> None:
            wish = {**question, "folders": list(folders.get(host.name, ()))}
            with connect(host) as connection, contextlib.closing(NodeProgram(connection)) as program:
                try:
                    answer, _ = program.ask({"install": wish}, data, silence_s=_TIMEOUT_S)
                except NoAnswerError as error:
                    raise CodeError(f"cannot lay the code of the ranks: {error}") from error
            state = one_line(str(answer.get("state", "")), 300)
            if state != "good" and data:
                raise CodeError(f"cannot lay the code of the ranks: {state}")
            if state != "good":
                text = f"{place.root} on it does not hold the code that the first node wrote there ({state})"
                raise CodeError(f"{text}; is cluster.shared_folder shared by all nodes?")

        failed: dict[str, list[str]] = {}
        for name, outcome in fan_out(hosts, work).items():
            if outcome.error is not None:
                failed.setdefault(str(outcome.error).removeprefix(f"{name}: "), []).append(name)
        if failed:
            raise CodeError("\n".join(f"{fold_nodes(names)}: {text}" for text, names in failed.items()))

    first, others = (hosts[:1], hosts[1:]) if place.is_shared else (hosts, [])
    on_all(first, archive.data)
    on_all(others, b"")  # sharing is proven, not believed: every other node must see what the first one wrote
