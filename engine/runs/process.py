"""Facts and settings of operating-system processes, and the host memory of a machine and of its control groups.

Runs on nodes too: Python 3.9, standard library only. Functions take the folder of procfs, so that tests can show them
another machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple

RUN_ID_VARIABLE = "BURST_RUN_ID"  # in the environment of every process of a launched run
NODE_VARIABLE = "BURST_NODE"  # likewise: the node's name in the launch plan, which need not be its host name
# torch up to 2.8 reads the second name only, newer ones both.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_PR_SET_PDEATHSIG = 1
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_libc = ctypes.CDLL(None)


class Entry(NamedTuple):
    """One process. start: distinguishes reused pids. status: that of waitpid, for a zombie that may be inspected."""

    pid: int
    parent: int
    state: str
    start: str
    status: int
    cpu_s: float
    resident_bytes: int

    @property
    def lives(self) -> bool:
        """Whether it has ended; a zombie has, though its parent has not waited for it yet."""
        return self.state not in ("Z", "X", "x")

    @property
    def exit_code(self) -> int:
        """Exit code of a zombie; negative for a signal."""
        return -os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else os.WEXITSTATUS(self.status)

    @property
    def age_s(self) -> float:
        """Return the seconds since it started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(self.start) / _TICKS_PER_S


def read_entry(pid: int, start: str | None = None) -> Entry | None:
    """Read the state of process `pid`; None if there is no such process, or none that started at `start`."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode("ascii", "replace")
        fields = text.rpartition(")")[2].split()  # the name in parentheses may itself hold spaces and parentheses
        cpu_s = round((int(fields[11]) + int(fields[12])) / _TICKS_PER_S, 2)
        resident_bytes = int(fields[21]) * _PAGE_BYTES
        entry = Entry(pid, int(fields[1]), fields[0], fields[19], int(fields[49]), cpu_s, resident_bytes)
    except (OSError, ValueError, IndexError):
        return None
    return entry if start in (None, entry.start) else None


def process_start(pid: int) -> str | None:
    """Return the start time of process `pid`, which distinguishes reused pids; None if there is no such process."""
    entry = read_entry(pid)
    return entry.start if entry is not None and entry.lives else None


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process `signal_number` when its parent dies.

    torchrun leaves its ranks behind when it is killed, and a killed launcher would leave torchrun behind.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number))


def prefer_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Let torch, which is imported later, grow device memory in place, which avoids fragmentation.

    An allocator that is configured already is not changed.
    """
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def redirect_output(path: Path) -> None:
    """Send standard output and error of this process and its children to `path` (appended), on the descriptor level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


# --- host memory ------------------------------------------------------------------------------------------------------


PROC = "/proc"
_NO_LIMIT = 2**60  # v1 writes the largest page-aligned number for "none"
_MAX_BYTES = 1 << 20


def meminfo_bytes(name: str, proc: str = PROC) -> int | None:
    """Return a figure of /proc/meminfo, such as MemTotal, in bytes; None if it is not there."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in read_text(os.path.join(proc, "meminfo")).splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return None


def group_limit_bytes(pid: int | str = "self", proc: str = PROC) -> int | None:
    """Return the smallest memory limit of the control groups of process `pid`; None without a limit."""
    limits = []
    for folder in memory_groups(pid, proc):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
                limits.append(int(read_text(os.path.join(folder, name))))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def usable_bytes(pid: int | str = "self", proc: str = PROC) -> int | None:
    """Return the host memory that process `pid` may use: the machine's, within the limits of its control groups."""
    bounds = (meminfo_bytes("MemTotal", proc), group_limit_bytes(pid, proc))
    return min((bound for bound in bounds if bound is not None), default=None)


def memory_groups(pid: int | str = "self", proc: str = PROC) -> tuple[str, ...]:
    """Return the folders of the memory control groups of a process, innermost first; empty if unknown."""
    with contextlib.suppress(OSError, ValueError):
        membership = read_text(os.path.join(proc, str(pid), "cgroup")).splitlines()
        mounts = read_text(os.path.join(proc, "self", "mountinfo")).splitlines()
        paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in membership)}
        v1 = next((path for controllers, path in paths.items() if "memory" in controllers.split(",")), None)
        if v1 is not None:
            return _folders(v1, mounts, "cgroup", "memory")
        if "" in paths:
            return _folders(paths[""], mounts, "cgroup2", "")
    return ()


def _folders(path: str, mounts: list[str], kind: str, option: str) -> tuple[str, ...]:
    """Return the folders of the group `path` and its parents, as far as the hierarchy is mounted."""
    for line in mounts:
        place, _, source = line.partition(" - ")
        root, point = place.split()[3:5]
        found_kind, _, options = [*source.split(), "", "", ""][:3]
        if found_kind != kind or (option and option not in options.split(",")):
            continue
        # A container without a cgroup namespace sees only its part of the hierarchy, from `root` on.
        inside = path[len(root) :] if root != "/" and path.startswith(root) else path
        names = [name for name in inside.split("/") if name and name != ".."]
        return tuple(os.path.join(point, *names[:depth]) for depth in range(len(names), -1, -1))
    return ()


def read_text(path: str) -> str:
    """Read the beginning of a kernel file. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(_MAX_BYTES).decode("utf-8", "replace")
