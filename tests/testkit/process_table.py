"""The processes of a run as a test sees them: by the mark in their environment, wherever they moved in the tree."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from engine.runs.process import RUN_ID_VARIABLE
from testkit.waiting import wait_for


def run_processes(run_id: str, *marks: str) -> list[psutil.Process]:
    """The living processes that carry the mark of run `run_id`, and these, without this one."""
    return [one for one in living("environ", f"{RUN_ID_VARIABLE}={run_id}", *marks) if one.pid != os.getpid()]


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
    return living("cmdline", "burst-supervisor", run_id)


def wait_until_gone(run_id: str, wait_s: float) -> list[psutil.Process]:
    """What is left of the run, supervisors included, once nothing is or the time is over."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not [*supervisors(run_id), *run_processes(run_id)], timeout_s=wait_s, pause_s=0.05)
    return [*supervisors(run_id), *run_processes(run_id)]


def open_below(folder: Path) -> list[str]:
    """Files below `folder` that this process has open, those that are gone, too."""
    links = (os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())
    return [link for link in links if link.startswith(f"{folder}/")]


def living(file: str, *words: str) -> list[psutil.Process]:
    """Processes with these words in a file of /proc, zombies left out: they have ended, only their parent is to notice.

    Asked many times a second, so nothing but that file is read of all the others.
    """
    found, wanted = [], {word.encode() for word in words}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):  # another user's process, or one that just ended
            if wanted <= set(Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")):
                process = psutil.Process(pid)
                found += [process] if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else []
    return found
