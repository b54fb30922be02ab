"""Host memory of a run while it lives: what its processes hold, and whether the kernel killed one for lack of it.

Only the kernel's own count (of control groups, v1 and v2, or of the machine) is evidence. What the processes held is a
hint: it is sampled, and counts shared pages once per process. Functions take the folder of procfs, so that tests can
show them another machine.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional, Union

from cluster.agent.processes import read_entry

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


SAMPLE_INTERVAL_S = 1.0
NEARLY_FULL = 0.9
_LAST_SAMPLES = 10  # a death is known within a few seconds; what was held before that explains nothing


class MemoryWatch:
    """Watches processes; `sample` is called often and does little."""

    def __init__(self, proc: str = PROC) -> None:
        self._proc = proc
        self._next_sample = 0.0
        self._held: deque[int] = deque(maxlen=_LAST_SAMPLES)
        self._peaks: dict[int, int] = {}
        self._counters: dict[int, OomCounter] = {}
        self._before: dict[OomCounter, int] = {}
        self._now: dict[OomCounter, int] = {}
        self._limit = memory_limit_bytes("self", proc)
        self._note_counter(os.getpid(), "self")

    def sample(self, pids: Iterable[int]) -> None:
        """Looks at these processes once a second: resident sets, and the control group of new ones."""
        now = time.monotonic()
        if now < self._next_sample:
            return
        self._next_sample = now + SAMPLE_INTERVAL_S
        held = 0
        for pid in pids:
            entry = read_entry(pid)
            if entry is None:
                continue
            held += entry.resident_bytes
            self._peaks[pid] = max(entry.resident_bytes, self._peaks.get(pid, 0))
            if pid not in self._counters:
                self._note_counter(pid, pid)
        self._held.append(held)
        for counter in self._before:
            self._read(counter)

    def oom_evidence(self, pid: Optional[int]) -> Optional[str]:
        """Why it is certain that the kernel killed process `pid` (None: any of the run) for lack of memory, or None."""
        own = self._counters.get(pid) if pid is not None else None
        for counter in [own] if own is not None else list(self._before):
            before, after = self._before[counter], self._read(counter)
            if after > before:
                whose = "" if counter.of_group else " of the whole machine"
                return f"oom_kill{whose} in {counter.path} rose from {before} to {after}"
        return None

    def facts(self, pid: Optional[int]) -> dict[str, Any]:
        """{evidence, hint, memory} should SIGKILL have ended process `pid` (None: the command)."""
        held, hint = self.held_bytes(), None
        if self._limit is not None and held > NEARLY_FULL * self._limit:
            hint = (
                f"Lack of memory may be the reason: the run's processes held {held / 2**30:.1f} GiB of "
                f"{self._limit / 2**30:.1f} GiB in their last seconds."
            )
        memory = {
            "where": "host",
            "device": "cpu",
            "peak_bytes": self._peaks.get(pid) if pid is not None else None,
            "peak_source": "resident set of the process, looked at every second",
            "asked_bytes": None,
            "capacity_bytes": self._limit,
        }
        return {"evidence": self.oom_evidence(pid), "hint": hint, "memory": memory}

    def held_bytes(self) -> int:
        """What the processes held together, most in the last seconds."""
        return max(self._held, default=0)

    def _note_counter(self, pid: int, name: Union[int, str]) -> None:
        counter = oom_counter(name, self._proc)
        kills = None if counter is None else counter.read()
        if counter is not None and kills is not None:
            self._counters[pid] = counter
            self._before.setdefault(counter, kills)
            limit = memory_limit_bytes(name, self._proc)
            self._limit = min((bound for bound in (self._limit, limit) if bound is not None), default=None)

    def _read(self, counter: OomCounter) -> int:
        """What it says now, or said last: the group of a container goes with it."""
        kills = counter.read()
        if kills is not None:
            self._now[counter] = kills
        return self._now.get(counter, self._before[counter])
