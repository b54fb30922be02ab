"""How a supervisor begins: refused in words, or as a process that outlives whoever started it; how all of it ends.

What an earlier attempt of the same run left in a node's run folder goes to attempts/<N>/:

nodes/<node>/*                        whole, but for the lock
logs/<node>/rank<NNNN>.*.json         errors, states and flight records; logs are continued, not moved
metrics.jsonl events.jsonl summary.json   of the node with rank 0: several nodes may share one folder
"""

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, Callable, Optional

from cluster.agent.folder import (
    LEAD_LOGS,
    Lock,
    NodeFiles,
    beat,
    holder,
    is_alive,
    lay_files,
    make_folder,
    read_json,
    request_stop,
    safe_name,
    take_lock,
    write_json,
)
from cluster.agent.messages import RANK_LOGS_VARIABLE, Spec, SpecError, checked_folder, checked_node, parse_spec
from cluster.agent.processes import NODE_VARIABLE, RUN_ID_VARIABLE, Family, Marks, send_signal
from cluster.agent.supervisor import Container, Supervisor, refusal

_LEAVE_S = 5.0  # one that has written the outcome of this very run surely is, however busy its machine
_POLL_S = 0.05


class RefusedError(Exception):
    """A node does not start its part of the run; kind as in `StartRefusedError`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def lock_folder(base: str = "/tmp") -> str:
    """Where this user's runs lock nodes: not in a home, which nodes may share, for the lock is of the machine."""
    return os.path.join(base, f"burst-{os.geteuid()}")


def node_lock_path(node: str, base: str = "/tmp") -> str:
    """The file that this user's runs lock on node `node`; its folder is made. Raises RefusedError."""
    folder = lock_folder(base)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        status = os.lstat(folder)
    except OSError as error:
        raise RefusedError("folder", f"cannot use {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise RefusedError("folder", f"{folder} is not a folder of this user; its owner or root must remove it")
    if stat.S_IMODE(status.st_mode) & 0o077:
        os.chmod(folder, 0o700)
    return os.path.join(folder, safe_name(node) + ".lock")


def take_node(spec: Spec) -> list[Lock]:
    """The lock of the node for `spec`, if it asks for one. Raises RefusedError naming the holder."""
    if not spec.exclusive:
        return []
    path = node_lock_path(spec.node)
    try:
        lock = take_lock(path)
    except OSError as error:
        raise RefusedError("folder", f"cannot lock {path}: {error.strerror}") from error
    if lock is None:
        other = holder(path)
        if other.get("run_id") == spec.run_id:
            raise RefusedError("exists", "this run has a supervisor here already (pid {})".format(other.get("pid")))
        raise RefusedError(
            "busy",
            "run {} holds this node (pid {}, since {}); wait for its end or cancel it".format(
                other.get("run_id", "unknown"), other.get("pid", "unknown"), other.get("since", "unknown")
            ),
        )
    lock.say(spec.run_id, os.getpid())
    return [lock]


def take_run(spec: Spec) -> list[Lock]:
    """The lock of this run on this node, in its folder, which is made. Raises RefusedError.

    Two attempts of one run never live at once on a node, whoever asks for them.
    """
    files = NodeFiles(spec.folder, spec.node)
    try:
        make_folder(files.state_dir)
        make_folder(files.log_dir)
        if os.stat(files.folder).st_uid not in (os.geteuid(), 0):
            raise PermissionError(errno.EPERM, "it belongs to another user", files.folder)
        wait_s = _LEAVE_S if os.path.exists(files.outcome) else 0.0
        lock = take_lock(files.lock, wait_s)
    except OSError as error:
        text = f"cannot use {error.filename or spec.folder}: {error.strerror or error}"
        raise RefusedError("folder", text) from error
    if lock is None:
        raise RefusedError("exists", f"this run has a supervisor here already ({files.folder})")
    supervisor = read_json(files.supervisor)
    if not _await_end(supervisor, wait_s):  # on a file system without locks
        lock.close()
        raise RefusedError("exists", f"this run has a supervisor here already (pid {(supervisor or {}).get('pid')})")
    return [lock]


_ASK_S = 5.0
_KILL_S = 8.0
_CLOSING_S = 1.0  # a process that dies gives up its memory, by which it is known, before its files
_CONTAINER_S = 15.0


def sweep(folder: str, node: str, run_id: str, spec: Optional[dict[str, Any]] = None) -> list[int]:
    """Numbers of the processes that would not die. A living supervisor is asked first, so that it leaves an outcome.

    `spec`: as it was started; None: as it stands in the run folder.
    """
    files = NodeFiles(folder, node)
    supervisor = read_json(files.supervisor)
    if is_alive(supervisor) and supervisor is not None and supervisor.get("run_id") == run_id:
        _end_supervisor(files, supervisor)
    left = Family(Marks(run_id, node)).kill_until_gone(signal.SIGKILL, _KILL_S)
    container = _container(run_id, spec or read_json(files.spec))
    if container is not None:
        container.remove(_CONTAINER_S)
    forget_locks(files, run_id)
    return left


def forget_locks(files: NodeFiles, run_id: str) -> None:
    """Remove the files of locks that nobody holds any more and that this run was the last to hold."""
    with contextlib.suppress(OSError, RefusedError):
        for path in (files.lock, node_lock_path(files.node)):
            if holder(path).get("run_id") == run_id:
                lock = take_lock(path, _CLOSING_S)
                if lock is not None:
                    lock.release()


def _end_supervisor(files: NodeFiles, supervisor: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        request_stop(files.folder, files.node, "sweep", 0.0)
    if not _await_end(supervisor, _ASK_S) and supervisor["pid"] != os.getpid():
        send_signal(supervisor["pid"], supervisor["pid_start"], signal.SIGKILL)
        _await_end(supervisor, _KILL_S)  # until then it holds the locks


def _await_end(supervisor: Optional[dict[str, Any]], wait_s: float) -> bool:
    """Whether the supervisor ends in that time, or has."""
    deadline = time.monotonic() + wait_s
    while is_alive(supervisor) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return not is_alive(supervisor)


def _container(run_id: str, spec: Optional[dict[str, Any]]) -> Optional[Container]:
    try:
        parsed = parse_spec(spec)
    except SpecError:
        return None
    return Container(parsed.engine, parsed.container, run_id) if parsed.container and parsed.run_id == run_id else None


def put_aside(spec: Spec) -> None:
    """Make room for another attempt of `spec`'s run. Raises OSError."""
    files = NodeFiles(spec.folder, spec.node)
    target = _free_place(files)
    for source, name in _left_files(files, spec.node_rank == 0):
        path = os.path.join(target, name)
        make_folder(os.path.dirname(path))
        with contextlib.suppress(FileNotFoundError):
            os.replace(source, path)


def _left_files(files: NodeFiles, is_lead: bool) -> Iterator[tuple[str, str]]:
    """Path and name below attempts/<N> of everything to move."""
    for name in sorted(os.listdir(files.state_dir)):
        path = os.path.join(files.state_dir, name)
        if path != files.lock and os.path.isfile(path):
            yield path, os.path.join("nodes", files.name, name)
    for name in sorted(os.listdir(files.log_dir)):
        if name.startswith("rank") and name.endswith(".json"):
            yield os.path.join(files.log_dir, name), name
    for name in (*LEAD_LOGS, "summary.json"):
        path = os.path.join(files.folder, name)
        if is_lead and os.path.isfile(path):
            yield path, name


def _free_place(files: NodeFiles) -> str:
    """The first attempts/<N> in which this node has nothing yet."""
    number = 1
    while True:
        place = os.path.join(files.folder, "attempts", str(number))
        if not os.path.isdir(os.path.join(place, "nodes", files.name)):
            return place
        number += 1


_FROM = "import sys; sys.path.insert(0, sys.argv.pop(1)); from cluster.agent.__main__ import main; main()"
_ANSWER_S = 30.0
_FOUND_S = 5.0


def start(message: dict[str, Any], *, again: bool = False) -> dict[str, Any]:
    """{"started": pid} once a supervisor of its own owns the run here, else {"refused": {"kind", "text"}}.

    The locks are taken here and inherited by the supervisor, so of two who ask at once one is refused. again: this very
    request was made before, and its answer may have been lost: what it began is not begun twice, nor refused.
    """
    locks: list[Lock] = []
    try:
        spec = _prepare(message, locks, again=again)
        pid = _begun_pid(spec) if again else None
        pid = _spawn(spec, locks) if pid is None else pid
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
    return int(_own(spec, locks)["exit_code"] != 0)


def supervise(node: str, folder: str, locks: list[str]) -> None:
    """The supervisor that `_spawn` starts, with the locks that it inherits; its number goes to stdout."""
    spec = parse_spec(read_json(NodeFiles(folder, node).spec))
    if os.fork():
        os._exit(0)  # the parent of the supervisor: who started it need not wait for it
    pairs = (lock.partition(":") for lock in locks)
    answer = os.dup(1)
    os.dup2(2, 1)
    os.umask(0o077)

    def ready() -> None:
        with contextlib.suppress(OSError):  # who asked may be gone
            os.write(answer, f"{os.getpid()}\n".encode("ascii"))
        os.close(answer)

    try:
        _own(spec, [Lock(path, int(descriptor)) for descriptor, _, path in pairs], ready)
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
        write_json(files.spec, spec._replace(files=())._asdict())
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


def _spawn(spec: Spec, locks: list[Lock]) -> int:
    """The number of the supervisor, a new Python that shares nothing with this process but the locks."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    words = [spec.run_id, spec.node, spec.folder, *(f"{lock.descriptor}:{lock.path}" for lock in locks)]
    command = [sys.executable or "python3", "-I", "-c", _FROM, root, "burst-supervisor", *words]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in (RUN_ID_VARIABLE, NODE_VARIABLE, RANK_LOGS_VARIABLE)
    }
    # Code that was sent lies in an open file without a name, see `cluster.code`.
    sent = [int(os.path.basename(root))] if root.startswith("/proc/self/fd/") else []
    try:
        with open(NodeFiles(spec.folder, spec.node).own_log, "ab") as log:
            process = subprocess.Popen(
                command,
                cwd="/",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[*sent, *(lock.descriptor for lock in locks)],
                start_new_session=True,
            )
        answer, _ = process.communicate(timeout=_ANSWER_S)
        return int(answer)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise RefusedError("command", f"the supervisor did not answer in {_ANSWER_S:g} s") from None
    except (OSError, ValueError) as error:
        raise RefusedError("command", f"the supervisor did not start: {error}; see supervisor.log") from error


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
