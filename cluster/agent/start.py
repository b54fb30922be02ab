"""How a supervisor begins: refused in words, or as a process that outlives whoever started it; how all of it ends.

What an earlier attempt of the same run left in a node's run folder goes to attempts/<N>/:

nodes/<node>/*                        whole, but for the lock
logs/<node>/rank<NNNN>.*.json         errors, states and flight records; logs are continued, not moved
metrics.jsonl events.jsonl summary.json   of the node with rank 0: several nodes may share one folder
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import pwd
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cluster.agent.folder import (
    LEAD_LOGS,
    Document,
    Lock,
    NodeFiles,
    await_end,
    holder,
    is_alive,
    make_folder,
    read_json,
    request_stop,
    take_lock,
    write_json,
    write_text,
)
from cluster.agent.messages import (
    RANK_LOGS_VARIABLE,
    Spec,
    SpecError,
    checked_folder,
    checked_name,
    parse_spec,
    safe_name,
    write_all,
)
from cluster.agent.processes import Family, ProcessLabels, send_signal
from cluster.agent.supervisor import Supervisor, container_of, refusal
from engine.runs.process import NODE_VARIABLE, RUN_ID_VARIABLE

_LEAVE_S = 5.0  # one that has written the outcome of this very run surely is, however busy its machine
_FOUND_S = 5.0
_ANSWER_S = 50.0  # to end what an earlier attempt left may take long
_FROM = "import sys; sys.path.insert(0, sys.argv.pop(1)); from cluster.agent.__main__ import main; main()"


class RefusedError(Exception):
    """A node does not start its part of the run; kind as in `StartRefusedError`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind

    @property
    def answer(self) -> Document:
        """As the launcher is told."""
        return {"refused": {"kind": self.kind, "text": str(self)}}


def start(message: Any, *, again: bool = False) -> Document:
    """{"started": pid} once a supervisor of its own owns the run here, else {"refused": {"kind", "text"}}.

    again: this very request was made before, and its answer may have been lost: what it began is not begun twice, nor
    refused.
    """
    try:
        return _spawn(_parsed(message), again)
    except RefusedError as error:
        return error.answer


def _spawn(spec: Spec, again: bool) -> Document:
    """What the supervisor answers, a new Python that shares nothing with this process. Raises RefusedError."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    command = [sys.executable, "-I", "-c", _FROM, root, "burst-supervisor", spec.run_id, spec.node]
    ours = (RUN_ID_VARIABLE, NODE_VARIABLE, RANK_LOGS_VARIABLE)
    environment, pipe = {name: value for name, value in os.environ.items() if name not in ours}, subprocess.PIPE
    # Code that was sent lies in an open file without a name, see `cluster.code`.
    sent = [int(os.path.basename(root))] if root.startswith("/proc/self/fd/") else []
    try:
        process = subprocess.Popen(
            command,
            cwd="/",
            env=environment,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            pass_fds=sent,
            start_new_session=True,
        )
        request = json.dumps({"spec": spec._asdict(), "again": again}).encode("ascii")
        said, complained = process.communicate(request, _ANSWER_S)
        return dict(json.loads(said))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise RefusedError("command", f"the supervisor did not answer in {_ANSWER_S:g} s") from None
    except OSError as error:
        raise RefusedError("command", f"the supervisor did not start: {error}") from error
    except ValueError:
        last = complained.decode("utf-8", "replace").strip()[-500:]
        raise RefusedError("command", f"the supervisor did not start: {last}") from None


def supervise() -> None:
    """The supervisor that `start` asks for on stdin: nobody's child, answered on stdout."""
    if os.fork():
        os._exit(0)
    os.umask(0o077)
    asked, out = json.load(sys.stdin), os.dup(1)
    spec = parse_spec(asked["spec"])

    def answer(said: Document) -> None:
        with contextlib.suppress(OSError):  # who asked may be gone
            write_all(out, json.dumps(said).encode("ascii"))
        os.close(out)

    def ready(pid: int) -> None:
        """From now on this process has nothing to do with who started it."""
        log = os.open(NodeFiles(spec.folder, spec.node).own_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(log)
        os.close(nothing)
        answer({"started": pid})

    try:
        _own(spec, ready, again=asked["again"])
    except RefusedError as error:
        has_started = asked["again"] and error.kind in ("exists", "busy")
        pid = _await_start(spec) if has_started else None
        answer(error.answer if pid is None else {"started": pid})


def run_foreground(message: Any) -> int:
    """Own the run in this process, whose main thread it must be; the exit code for a shell.

    A refusal is printed to stderr and left as an outcome, if the run has none here: nobody else would hear of it.
    """
    try:
        outcome = _own(_parsed(message))
    except RefusedError as error:
        print(f"burst: refused ({error.kind}): {error}", file=sys.stderr)
        if error.kind != "exists":
            _leave_refusal(message, str(error))
        return 1
    return int(outcome["exit_code"] != 0)


def _parsed(message: Any) -> Spec:
    try:
        return parse_spec(message)
    except SpecError as error:
        raise RefusedError("command", str(error)) from error


def _own(spec: Spec, ready: Callable[[int], None] = lambda pid: None, *, again: bool = False) -> Document:
    """The outcome; empty when this very request began it before. Raises RefusedError.

    ready: told which process is the supervisor, once the run folder names it.
    """
    with contextlib.ExitStack() as held:
        try:
            for lock in _take_locks(spec):
                held.callback(lock.release)
            begun = _started_pid(spec) if again else None
            if begun is None:
                _lay(spec)
        except OSError as error:
            text = f"cannot use {error.filename or spec.folder}: {error.strerror or error}"
            raise RefusedError("folder", text) from error
        if begun is not None:
            ready(begun)
            return {}
        supervisor = Supervisor(spec)
        supervisor.tell()
        ready(os.getpid())
        return supervisor.run()


def _started_pid(spec: Spec) -> int | None:
    """The supervisor that this very request began, whether it still lives or not; None: it began none."""
    files = NodeFiles(spec.folder, spec.node)
    supervisor = read_json(files.supervisor)
    is_ours = (read_json(files.spec) or {}).get("start_id") == spec.start_id
    return int(supervisor["pid"]) if is_ours and supervisor is not None else None


def _await_start(spec: Spec) -> int | None:
    """`_started_pid`, with time for a request that is being carried out just now."""
    deadline = time.monotonic() + _FOUND_S
    while (pid := _started_pid(spec)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return pid


def _lay(spec: Spec) -> None:
    """End and put aside what an earlier attempt left here, then lay all files. Raises RefusedError, OSError."""
    files = NodeFiles(spec.folder, spec.node)
    if os.path.exists(files.supervisor) or os.path.exists(files.outcome):
        left = _end_all(files, spec.run_id, read_json(files.spec))
        if left:
            raise RefusedError("exists", f"processes of an earlier attempt would not die: {left}")
        _put_aside(files, is_lead=spec.node_rank == 0)
    for name, text in spec.files:
        path = os.path.join(spec.folder, name)
        make_folder(os.path.dirname(path))
        write_text(path, text, mode=0o700 if name.endswith(".sh") else 0o600)
    write_json(files.spec, spec._replace(files=())._asdict())


def _leave_refusal(message: Any, text: str) -> None:
    with contextlib.suppress(SpecError, OSError):
        files = NodeFiles(checked_folder(message.get("folder")), checked_name(message.get("node"), "node"))
        make_folder(files.state_dir)
        if not os.path.exists(files.outcome):
            write_json(files.outcome, refusal(text))


def _put_aside(files: NodeFiles, *, is_lead: bool) -> None:
    """Make room for another attempt: everything goes to the first attempts/<N> in which this node has nothing yet."""
    number, within = 1, os.path.join("nodes", files.name)
    while os.path.isdir(os.path.join(files.folder, "attempts", str(number), within)):
        number += 1
    left = [(files.state_dir, name, within) for name in os.listdir(files.state_dir) if name != "supervisor.lock"]
    logs = (name for name in os.listdir(files.log_dir) if name.startswith("rank") and name.endswith(".json"))
    left += [(files.log_dir, name, "") for name in logs]
    left += [(files.folder, name, "") for name in (*LEAD_LOGS, "summary.json") if is_lead]
    for folder, name, place in left:
        target = os.path.join(files.folder, "attempts", str(number), place)
        make_folder(target)
        if os.path.isfile(os.path.join(folder, name)):
            os.replace(os.path.join(folder, name), os.path.join(target, name))


# --- who holds the node and the run ---------------------------------------------------------------------------------


def lock_folder(base: str = "/tmp") -> str:
    """Where this user's runs lock nodes: not in a home, which nodes may share, for the lock is of the machine.

    Others can read there, and nobody else can write: so users see each other's runs, see `active_locks`.
    """
    return os.path.join(base, f"burst-{os.geteuid()}")


def node_lock_path(node: str, base: str = "/tmp") -> str:
    """The file that this user's runs lock on node `node`; its folder is made. Raises RefusedError, OSError."""
    folder = lock_folder(base)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o755)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise RefusedError("folder", f"{folder} is not a folder of this user; its owner or root must remove it")
    if stat.S_IMODE(status.st_mode) != 0o755:
        os.chmod(folder, 0o755)
    return os.path.join(folder, safe_name(node) + ".lock")


class ActiveLock(NamedTuple):
    """A lock that a living process holds. name: of its file, without the ending. uid: of the user whose run it is."""

    name: str
    run_id: str
    uid: int


def active_locks(base: str = "/tmp") -> Iterator[ActiveLock]:
    """The nodes that runs of all users hold on this machine.

    Held is what the kernel's table says: taking a lock to find out could get in somebody's way. Believed is only what
    lies in a folder of the user whose number it has, so that nobody can lock a node in another one's name.
    """
    try:
        with open("/proc/locks") as file:
            inodes = {line.split()[-3].split(":")[-1] for line in file if line.split()[1] == "FLOCK"}
    except OSError:
        return
    for folder in glob.glob(os.path.join(glob.escape(base), "burst-[0-9]*")):
        with contextlib.suppress(OSError):
            status = os.lstat(folder)
            if not stat.S_ISDIR(status.st_mode) or os.path.basename(folder) != f"burst-{status.st_uid}":
                continue
            for entry in os.scandir(folder):
                found = entry.stat(follow_symlinks=False)
                is_lock = entry.name.endswith(".lock") and stat.S_ISREG(found.st_mode)
                if is_lock and found.st_uid == status.st_uid and str(found.st_ino) in inodes:
                    yield ActiveLock(entry.name[:-5], holder(entry.path).get("run_id", "?"), status.st_uid)


def user_name(uid: int) -> str:
    """The name of a user, for people."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _refuse_other_users(node: str) -> None:
    """Raise RefusedError while a run of another user holds `node`. Two that start at once may both be refused."""
    for lock in active_locks():
        if lock.name == safe_name(node) and lock.uid != os.geteuid():
            who = f"run {lock.run_id} of {user_name(lock.uid)} holds this node"
            raise RefusedError("busy", f"{who}; wait for its end, or use other nodes")


def _take_locks(spec: Spec) -> Iterator[Lock]:
    """That of the node, if `spec` asks for it, and that of this run on it. Raises RefusedError, OSError.

    Two attempts of one run never live at once on a node, whoever asks for them.
    """
    files = NodeFiles(spec.folder, spec.node)
    if spec.exclusive:
        path = node_lock_path(spec.node)
        yield _take(path, spec)
        os.chmod(path, 0o644)  # other users of the node read there who holds it
        _refuse_other_users(spec.node)
    make_folder(files.state_dir)
    make_folder(files.log_dir)
    if os.stat(files.folder).st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, "it belongs to another user", files.folder)
    wait_s = _LEAVE_S if os.path.exists(files.outcome) else 0.0
    yield _take(files.lock, spec, wait_s)
    supervisor = read_json(files.supervisor)
    if not await_end(supervisor, wait_s):  # on a file system without locks
        raise RefusedError("exists", f"this run has a supervisor here already (pid {(supervisor or {}).get('pid')})")


def _take(path: str, spec: Spec, wait_s: float = 1.0) -> Lock:
    """The lock on `path`, with our name in it. Raises RefusedError naming its holder, OSError."""
    lock = take_lock(path, wait_s)
    if lock is not None:
        lock.say(spec.run_id, os.getpid())
        return lock
    other = {"run_id": "unknown", "pid": "unknown", "since": "unknown", **holder(path)}
    if other["run_id"] == spec.run_id or path == NodeFiles(spec.folder, spec.node).lock:
        raise RefusedError("exists", f"this run has a supervisor here already (pid {other['pid']})")
    who = f"run {other['run_id']} holds this node (pid {other['pid']}, since {other['since']})"
    raise RefusedError("busy", f"{who}; wait for its end or cancel it")


_ASK_S = 5.0
_KILL_S = 8.0
_CLOSING_S = 1.0  # a process that dies gives up its memory, by which it is known, before its files
_CONTAINER_S = 15.0


def sweep(folder: str, node: str, run_id: str, spec: Any = None) -> list[int]:
    """Numbers of the processes that would not die. A living supervisor is asked first, so that it leaves an outcome.

    `spec`: as it was started; None: as it stands in the run folder.
    """
    files = NodeFiles(folder, node)
    left = _end_all(files, run_id, spec or read_json(files.spec))
    with contextlib.suppress(OSError, RefusedError):
        for path in (files.lock, node_lock_path(files.node)):
            # Nobody may hold it any more, but this run was the last to do so.
            lock = take_lock(path, _CLOSING_S) if holder(path).get("run_id") == run_id else None
            if lock is not None:
                lock.release()
    return left


def _end_all(files: NodeFiles, run_id: str, spec: Any) -> list[int]:
    supervisor = read_json(files.supervisor)
    if is_alive(supervisor) and supervisor is not None and supervisor.get("run_id") == run_id:
        with contextlib.suppress(OSError):
            request_stop(files.folder, files.node, "sweep", 0.0)
        if not await_end(supervisor, _ASK_S):
            send_signal(supervisor["pid"], supervisor["pid_start"], signal.SIGKILL)
            await_end(supervisor, _KILL_S)  # until then it holds the locks
    left = Family(ProcessLabels(run_id, files.node)).kill_all(signal.SIGKILL, _KILL_S)
    with contextlib.suppress(SpecError):
        parsed = parse_spec(spec)
        container = container_of(parsed)
        if container is not None and parsed.run_id == run_id:
            container.remove(_CONTAINER_S)
    return left
