"""What is left of a run on a node goes: its supervisor, its processes, its container."""

import contextlib
import os
import signal
import time
from typing import Any, Optional

from cluster.supervise.node.container import Container
from cluster.supervise.node.family import Family, Marks
from cluster.supervise.node.folder import NodeFiles, is_alive, read_json, request_stop
from cluster.supervise.node.locks import RefusedError, holder, node_lock_path, take_lock
from cluster.supervise.node.processes import send_signal
from cluster.supervise.node.spec import SpecError, parse_spec

_ASK_S = 5.0
_KILL_S = 8.0
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
                lock = take_lock(path, 0.0)
                if lock is not None:
                    lock.release()


def _end_supervisor(files: NodeFiles, supervisor: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        request_stop(files.folder, files.node, "sweep", 0.0)
    if not _await_end(supervisor, _ASK_S) and supervisor["pid"] != os.getpid():
        send_signal(supervisor["pid"], supervisor["pid_start"], signal.SIGKILL)
        _await_end(supervisor, _KILL_S)  # until then it holds the locks


def _await_end(supervisor: dict[str, Any], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while is_alive(supervisor) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(supervisor)


def _container(run_id: str, spec: Optional[dict[str, Any]]) -> Optional[Container]:
    try:
        parsed = parse_spec(spec)
    except SpecError:
        return None
    return Container(parsed.engine, parsed.container, run_id) if parsed.container and parsed.run_id == run_id else None
