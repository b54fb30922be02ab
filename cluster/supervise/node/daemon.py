"""How a supervisor begins: refused in words, or as a process that outlives whoever started it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from typing import Any, Callable, Optional

from cluster.code.node.boot import boot_code, pack_modules, with_length
from cluster.supervise.node.attempts import put_aside
from cluster.supervise.node.folder import NodeFiles, beat, lay_files, make_folder, read_json, write_json
from cluster.supervise.node.locks import Lock, RefusedError, take_node, take_run
from cluster.supervise.node.spec import (
    NODE_VARIABLE,
    RANK_LOGS_VARIABLE,
    RUN_ID_VARIABLE,
    Spec,
    SpecError,
    checked_folder,
    checked_node,
    parse_spec,
)
from cluster.supervise.node.supervisor import Supervisor, refusal
from cluster.supervise.node.sweep import sweep

# In the order of their imports: each finds those before it.
MODULES = (
    "cluster.code.node.boot",
    "cluster.supervise.node.processes",
    "cluster.supervise.node.folder",
    "cluster.supervise.node.spec",
    "cluster.supervise.node.locks",
    "cluster.supervise.node.container",
    "cluster.supervise.node.family",
    "cluster.supervise.node.sweep",
    "cluster.supervise.node.attempts",
    "cluster.supervise.node.control_group",
    "cluster.supervise.node.memory",
    "cluster.supervise.node.health",
    "cluster.supervise.node.stacks",
    "cluster.supervise.node.supervisor",
    "cluster.supervise.node.daemon",
)
AGENT_MODULES = ("cluster.code.node.messages", *MODULES, "cluster.supervise.node.tail", "cluster.supervise.node.agent")
_ANSWER_S = 30.0
_FOUND_S = 5.0


def start(message: dict[str, Any], carried: Optional[bytes] = None, *, again: bool = False) -> dict[str, Any]:
    """{"started": pid} once a supervisor of its own owns the run here, else {"refused": {"kind", "text"}}.

    The locks are taken here and inherited by the supervisor, so of two who ask at once one is refused. `carried`: the
    modules as they came over the wire; None: read from this installation. again: this very request was made before,
    and its answer may have been lost: what it began is not begun twice, nor refused.
    """
    locks: list[Lock] = []
    try:
        spec = _prepare(message, locks, again=again)
        pid = _begun_pid(spec) if again else None
        pid = _spawn(spec, locks, carried) if pid is None else pid
    except RefusedError as error:
        for lock in locks:
            lock.release()
        pid = _await_begun(message) if again and error.kind in ("exists", "busy") else None
        return {"refused": {"kind": error.kind, "text": str(error)}} if pid is None else {"started": pid}
    for lock in locks:
        lock.close()
    return {"started": pid}


def _begun_pid(spec: Spec) -> Optional[int]:
    """The supervisor that this very request began, whether it still lives or not; None: it began none."""
    files = NodeFiles(spec.folder, spec.node)
    supervisor = read_json(files.supervisor)
    is_ours = (read_json(files.spec) or {}).get("start_id") == spec.start_id
    return int(supervisor["pid"]) if is_ours and supervisor is not None else None


def _await_begun(message: dict[str, Any]) -> Optional[int]:
    """`_begun_pid`, with time for a request that is being carried out just now."""
    spec, deadline = parse_spec(message), time.monotonic() + _FOUND_S
    while (pid := _begun_pid(spec)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return pid


def run_foreground(message: dict[str, Any]) -> int:
    """Own the run in this process, whose main thread it must be; the exit code for a shell.

    A refusal is printed to stderr and left as an outcome, if the run has none here: nobody else would hear of it.
    """
    locks: list[Lock] = []
    try:
        spec = _prepare(message, locks)
    except RefusedError as error:
        print(f"burst: refused ({error.kind}): {error}", file=sys.stderr)
        if error.kind != "exists":
            _leave_refusal(message, str(error))
        return 1
    code = _own(spec, locks)["exit_code"]
    return 1 if code is None else code if code >= 0 else 128 - code


def main(carried: bytes) -> None:
    """A supervisor, started by `_spawn`: the spec comes on stdin, the answer goes to stdout."""
    size = int(_read(10).decode("ascii"))
    message = json.loads(_read(size).decode("utf-8"))
    if os.fork():
        os._exit(0)  # the parent of the supervisor: who started it need not wait for it
    spec = parse_spec(message["spec"])
    locks = [Lock(str(path), int(descriptor)) for path, descriptor in message["locks"]]
    answer = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.umask(0o077)

    def ready() -> None:
        with contextlib.suppress(OSError):  # who asked may be gone
            os.write(answer, f"{os.getpid()}\n".encode("ascii"))
        os.close(answer)

    try:
        _own(spec, locks, ready)
    except BaseException:
        traceback.print_exc()  # to supervisor.log: nobody else would hear of it
        os._exit(1)
    os._exit(0)


def _prepare(message: dict[str, Any], locks: list[Lock], *, again: bool = False) -> Spec:
    """The checked spec, with all files laid and the locks in `locks`. Raises RefusedError."""
    try:
        spec = parse_spec(message)
    except SpecError as error:
        raise RefusedError("command", str(error)) from error
    locks += take_node(spec)
    locks += take_run(spec)
    files = NodeFiles(spec.folder, spec.node)
    if again and _begun_pid(spec) is not None:
        return spec
    try:
        _clear_way(spec, files)
        lay_files(spec.folder, spec.files)
        write_json(files.spec, spec.to_dict())
        beat(spec.folder, spec.node)
    except OSError as error:
        text = f"cannot write {error.filename or spec.folder}: {error.strerror or error}"
        raise RefusedError("folder", text) from error
    return spec


def _clear_way(spec: Spec, files: NodeFiles) -> None:
    """End and put aside what an earlier attempt of this run left here. Raises RefusedError, OSError."""
    if not os.path.exists(files.supervisor) and not os.path.exists(files.outcome):
        return
    left = sweep(spec.folder, spec.node, spec.run_id)
    if left:
        raise RefusedError("exists", f"processes of an earlier attempt would not die: {left}")
    put_aside(spec)


def _spawn(spec: Spec, locks: list[Lock], carried: Optional[bytes]) -> int:
    """The number of the supervisor, a new Python that shares nothing with this process but the locks."""
    code = boot_code("cluster.supervise.node.daemon", "main(carried)")
    command = [sys.executable or "python3", "-I", "-c", code, "burst-supervisor", spec.run_id, spec.node]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in (RUN_ID_VARIABLE, NODE_VARIABLE, RANK_LOGS_VARIABLE)
    }
    wish = {"spec": spec.to_dict(), "locks": [[lock.path, lock.descriptor] for lock in locks]}
    text = with_length(carried or own_code()) + with_length(json.dumps(wish).encode("ascii"))
    try:
        with open(NodeFiles(spec.folder, spec.node).own_log, "ab") as log:
            process = subprocess.Popen(
                command,
                cwd="/",
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[lock.descriptor for lock in locks],
                start_new_session=True,
            )
        answer, _ = process.communicate(text, timeout=_ANSWER_S)
        return int(answer)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise RefusedError("command", f"the supervisor did not answer in {_ANSWER_S:g} s") from None
    except (OSError, ValueError) as error:
        raise RefusedError("command", f"the supervisor did not start: {error}; see supervisor.log") from error


def own_code() -> bytes:
    """The modules of a supervisor, from this installation."""
    root = os.path.abspath(__file__)
    for _ in range(4):
        root = os.path.dirname(root)
    return pack_modules(MODULES, root)


def _own(spec: Spec, locks: list[Lock], ready: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The outcome; `ready` is called once the run folder names this process."""
    for lock in locks:
        lock.say(spec.run_id, os.getpid())
    try:
        supervisor = Supervisor(spec)
        supervisor.announce()
        ready()
        return supervisor.run()
    finally:
        for lock in locks:
            lock.release()


def _leave_refusal(message: dict[str, Any], text: str) -> None:
    with contextlib.suppress(SpecError, OSError):
        files = NodeFiles(checked_folder(message.get("folder")), checked_node(message.get("node")))
        make_folder(files.state_dir)
        if not os.path.exists(files.outcome):
            write_json(files.outcome, refusal(text))


def _read(size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        data = os.read(0, size)
        if not data:
            os._exit(1)
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
