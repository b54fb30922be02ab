"""Host memory of a machine and of its control groups, v1 and v2. Runs on nodes too: Python 3.9, standard library only.

Functions take the folder of procfs, so that tests can show them another machine.
"""

from __future__ import annotations

import contextlib
import os

PROC = "/proc"
_NO_LIMIT = 2**60  # v1 writes the largest page-aligned number for "none"
_MAX_BYTES = 1 << 20


def meminfo_bytes(name: str, proc: str = PROC) -> int | None:
    """A figure of the machine's memory, such as MemTotal; None when it does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in read_text(os.path.join(proc, "meminfo")).splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return None


def group_limit_bytes(pid: int | str = "self", proc: str = PROC) -> int | None:
    """The tightest limit of the control groups of process `pid`; None: there is none."""
    limits = []
    for folder in memory_groups(pid, proc):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
                limits.append(int(read_text(os.path.join(folder, name))))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def usable_bytes(pid: int | str = "self", proc: str = PROC) -> int | None:
    """Host memory that process `pid` and its group may use: the machine's, within the limit of its control groups."""
    bounds = (meminfo_bytes("MemTotal", proc), group_limit_bytes(pid, proc))
    return min((bound for bound in bounds if bound is not None), default=None)


def memory_groups(pid: int | str = "self", proc: str = PROC) -> tuple[str, ...]:
    """Folders of the memory control groups of a process, its own first, then those around it; empty if unknown."""
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
    """The group `path` and all above it, as far as the hierarchy is mounted here."""
    for line in mounts:
        place, _, source = line.partition(" - ")
        root, point = place.split()[3:5]
        found_kind, _, options = [*source.split(), "", "", ""][:3]
        if found_kind != kind or (option and option not in options.split(",")):
            continue
        # A container without a namespace of its own sees only its part of the hierarchy: `root` of it.
        inside = path[len(root) :] if root != "/" and path.startswith(root) else path
        names = [name for name in inside.split("/") if name and name != ".."]
        return tuple(os.path.join(point, *names[:depth]) for depth in range(len(names), -1, -1))
    return ()


def read_text(path: str) -> str:
    """The beginning of a file of the kernel. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(_MAX_BYTES).decode("utf-8", "replace")
