"""The processes of a run as a test sees them: by the mark in their environment, wherever they moved in the tree."""

from __future__ import annotations

import contextlib
import os

import psutil

from engine.runs import RUN_ID_VARIABLE
from testkit.waiting import wait_for


def run_processes(run_id: str) -> list[psutil.Process]:
    """The living processes that carry the mark of run `run_id`, without this one."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _is_of(process, run_id)]


def kill_run(run_id: str, wait_s: float = 10.0) -> None:
    """Kill every process of the run, and whoever supervises it, until none is found."""

    def is_gone() -> bool:
        left = [*supervisors(run_id), *run_processes(run_id)]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return not left

    wait_for(is_gone, f"the end of {run_id}", wait_s, pause_s=0.05)


def supervisors(run_id: str) -> list[psutil.Process]:
    """The living supervisors of run `run_id`; they do not carry its mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "burst-supervisor" in words and run_id in words and _lives(process):
                found.append(process)
    return found


def wait_until_gone(run_id: str, wait_s: float) -> list[psutil.Process]:
    """What is left of the run, supervisors included, once nothing is or the time is over."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not [*supervisors(run_id), *run_processes(run_id)], timeout_s=wait_s, pause_s=0.05)
    return [*supervisors(run_id), *run_processes(run_id)]


def _is_of(process: psutil.Process, run_id: str) -> bool:
    try:
        return process.environ().get(RUN_ID_VARIABLE) == run_id and _lives(process)
    except (psutil.Error, OSError):
        return False  # another user's process, or one that just ended


def _lives(process: psutil.Process) -> bool:
    """A zombie has ended: only its parent has yet to notice."""
    return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
