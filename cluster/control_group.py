"""Memory control groups of a process (cgroup v1 and v2): limits, and how often the kernel killed for lack of memory.

Every function takes the folder of procfs, so that tests can show it another machine.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_NO_LIMIT = 2**60  # v1 writes the largest page-aligned number for "none"


@dataclass(frozen=True)
class OomCounter:
    """A file that counts processes killed for lack of memory.

    of_group: it counts the group of the process alone (and groups below it); else the whole machine.
    """

    path: Path
    of_group: bool

    def read(self) -> int | None:
        """Kills so far; None when the file is gone or does not say."""
        with contextlib.suppress(OSError, ValueError):
            for line in self.path.read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return None


def memory_groups(pid: int | str = "self", proc: Path = PROC) -> tuple[Path, ...]:
    """Folders of the memory control groups of a process, its own first, then those around it; empty if unknown."""
    with contextlib.suppress(OSError):
        membership = (proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
        mounts = (proc / "self" / "mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in membership)}
        v1 = next((path for controllers, path in paths.items() if "memory" in controllers.split(",")), None)
        if v1 is not None:
            return _folders(v1, mounts, "cgroup", "memory")
        if "" in paths:
            return _folders(paths[""], mounts, "cgroup2", None)
    return ()


def oom_counter(pid: int | str = "self", proc: Path = PROC) -> OomCounter | None:
    """The nearest counter of process `pid`: its group's, that of a group around it, or the machine's; None if unknown.

    The kernel counts a kill in the group of the process that it killed, whoever's limit was reached.
    """
    files = [folder / name for folder in memory_groups(pid, proc) for name in ("memory.events", "memory.oom_control")]
    counters = [*(OomCounter(path, of_group=True) for path in files), OomCounter(proc / "vmstat", of_group=False)]
    return next((counter for counter in counters if counter.read() is not None), None)


def memory_limit_bytes(pid: int | str = "self", proc: Path = PROC) -> int | None:
    """Host memory that process `pid` and its group may use: the least of its groups' limits and of the machine."""
    limits = [_machine_bytes(proc)]
    for folder in memory_groups(pid, proc):
        limits += [_number(folder / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return min((limit for limit in limits if limit is not None and limit < _NO_LIMIT), default=None)


def _folders(path: str, mounts: list[str], kind: str, option: str | None) -> tuple[Path, ...]:
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
        return tuple(Path(point, *names[:depth]) for depth in range(len(names), -1, -1))
    return ()


def _machine_bytes(proc: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "meminfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    return None


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii", errors="replace"))  # "max" is no number: no limit
    return None
