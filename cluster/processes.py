"""Finding and stopping the processes of one run, wherever they moved in the process tree.

torchrun gives every rank a session of its own, and ranks outlive a killed torchrun; so a process belongs to a run when
its environment holds BURST_RUN_ID=<run id>, or when it descends from the command that was started. Nothing else is ever
signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

import psutil

from engine.runs import RUN_ID_VARIABLE

_POLL_S = 0.05


def run_processes(run_id: str, root_pid: int | None = None) -> list[psutil.Process]:
    """The living processes of run `run_id`, without this one; `root_pid` adds a process and all its descendants."""
    found = {process.pid: process for process in psutil.process_iter() if _marked(process, run_id)}
    if root_pid is not None:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(root_pid)
            found.update((process.pid, process) for process in [root, *root.children(recursive=True)])
    found.pop(os.getpid(), None)
    return [process for process in found.values() if _lives(process)]


def signal_processes(processes: Iterable[psutil.Process], signal_number: int) -> None:
    """Send `signal_number` to each of `processes` that still lives (psutil guards against reused pids)."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal_number)


def kill_run(run_id: str, root_pid: int | None = None, *, wait_s: float = 10.0) -> list[int]:
    """Kill every process of the run until none is found; the pids of those that could not be killed in `wait_s`."""
    deadline = time.monotonic() + wait_s
    while remaining := run_processes(run_id, root_pid):
        if time.monotonic() > deadline:
            return sorted(process.pid for process in remaining)
        signal_processes(remaining, signal.SIGKILL)
        time.sleep(_POLL_S)
    return []


def _marked(process: psutil.Process, run_id: str) -> bool:
    try:
        return process.environ().get(RUN_ID_VARIABLE) == run_id
    except (psutil.Error, OSError):
        return False  # another user's process, or one that just ended


def _lives(process: psutil.Process) -> bool:
    """A zombie has ended: only its parent has yet to notice."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False
