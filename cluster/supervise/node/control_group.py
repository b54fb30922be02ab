"""Memory control groups of a process (cgroup v1 and v2): limits, and how often the kernel killed for lack of memory.

Every function takes the folder of procfs, so that tests can show it another machine.
"""

import contextlib
import os
from typing import NamedTuple, Optional, Union

PROC = "/proc"
_NO_LIMIT = 2**60  # v1 writes the largest page-aligned number for "none"
_MAX_BYTES = 1 << 20


class OomCounter(NamedTuple):
    """A file that counts processes killed for lack of memory.

    of_group: it counts the group of the process alone (and groups below it); else the whole machine.
    """

    path: str
    of_group: bool

    def read(self) -> Optional[int]:
        """Kills so far; None when the file is gone or does not say."""
        with contextlib.suppress(OSError, ValueError):
            for line in _read(self.path).splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return None


def memory_groups(pid: Union[int, str] = "self", proc: str = PROC) -> tuple[str, ...]:
    """Folders of the memory control groups of a process, its own first, then those around it; empty if unknown."""
    with contextlib.suppress(OSError, ValueError):
        membership = _read(os.path.join(proc, str(pid), "cgroup")).splitlines()
        mounts = _read(os.path.join(proc, "self", "mountinfo")).splitlines()
        paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in membership)}
        v1 = next((path for controllers, path in paths.items() if "memory" in controllers.split(",")), None)
        if v1 is not None:
            return _folders(v1, mounts, "cgroup", "memory")
        if "" in paths:
            return _folders(paths[""], mounts, "cgroup2", None)
    return ()


def oom_counter(pid: Union[int, str] = "self", proc: str = PROC) -> Optional[OomCounter]:
    """The nearest counter of process `pid`: its group's, that of a group around it, or the machine's; None if unknown.

    The kernel counts a kill in the group of the process that it killed, whoever's limit was reached.
    """
    groups = memory_groups(pid, proc)
    files = [os.path.join(folder, name) for folder in groups for name in ("memory.events", "memory.oom_control")]
    counters = [OomCounter(path, True) for path in files] + [OomCounter(os.path.join(proc, "vmstat"), False)]
    return next((counter for counter in counters if counter.read() is not None), None)


def memory_limit_bytes(pid: Union[int, str] = "self", proc: str = PROC) -> Optional[int]:
    """Host memory that process `pid` and its group may use: the least of its groups' limits and of the machine."""
    limits = [meminfo_bytes("MemTotal", proc)]
    for folder in memory_groups(pid, proc):
        limits += [_number(os.path.join(folder, name)) for name in ("memory.max", "memory.limit_in_bytes")]
    return min((limit for limit in limits if limit is not None and limit < _NO_LIMIT), default=None)


def meminfo_bytes(name: str, proc: str = PROC) -> Optional[int]:
    """A figure of the machine's memory, such as MemTotal."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _read(os.path.join(proc, "meminfo")).splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return None


def _folders(path: str, mounts: list[str], kind: str, option: Optional[str]) -> tuple[str, ...]:
    """The group `path` and all above it, as far as the hierarchy is mounted here."""
    for line in mounts:
        place, _, source = line.partition(" - ")
        root, point = place.split()[3:5]
        found_kind, _, options = [*source.split(), "", "", ""][:3]
        if found_kind != kind or (option is not None and option not in options.split(",")):
            continue
        # A container without a namespace of its own sees only its part of the hierarchy: `root` of it.
        inside = path[len(root) :] if root != "/" and path.startswith(root) else path
        names = [name for name in inside.split("/") if name and name != ".."]
        return tuple(os.path.join(point, *names[:depth]) for depth in range(len(names), -1, -1))
    return ()


def _number(path: str) -> Optional[int]:
    with contextlib.suppress(OSError, ValueError):
        return int(_read(path))  # "max" is no number: no limit
    return None


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(_MAX_BYTES).decode("utf-8", "replace")
