"""Host memory of a run while it lives: what its processes hold, and whether the kernel killed one for lack of it.

Only the kernel's own count (of control groups, v1 and v2, or of the machine) is evidence. What the processes held is a
hint: it is sampled, and counts shared pages once per process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from engine.runs.process import PROC, memory_groups, read_entry, read_text, usable_bytes

SAMPLE_INTERVAL_S = 1.0
NEARLY_FULL = 0.9
_SILENT = (OSError, ValueError, StopIteration)
_LAST_SAMPLES = 10  # a death is known within a few seconds; what was held before that explains nothing


class OomCounter:
    """A file that counts processes killed for lack of memory. Raises one of `_SILENT` if it does not.

    of_group: it counts the group of the process alone (and groups below it); else the whole machine. before: kills when
    it was first read.
    """

    def __init__(self, path: str, of_group: bool) -> None:
        self.path, self.of_group = path, of_group
        self.before = self._last = self._count()

    def read(self) -> int:
        """Kills so far, or when it could last be read: the group of a container goes with it."""
        with contextlib.suppress(*_SILENT):
            self._last = self._count()
        return self._last

    def _count(self) -> int:
        return next(int(line.split()[1]) for line in read_text(self.path).splitlines() if line.startswith("oom_kill "))


def oom_counter(pid: int | str, proc: str) -> OomCounter | None:
    """The nearest counter of process `pid`: its group's, that of a group around it, or the machine's; None if unknown.

    The kernel counts a kill in the group of the process that it killed, whoever's limit was reached.
    """
    groups = memory_groups(pid, proc)
    files = [os.path.join(folder, name) for folder in groups for name in ("memory.events", "memory.oom_control")]
    for path in [*files, os.path.join(proc, "vmstat")]:
        with contextlib.suppress(*_SILENT):
            return OomCounter(path, path in files)
    return None


class MemoryWatch:
    """Watches processes; `sample` is called often and does little. proc: the folder of procfs."""

    def __init__(self, proc: str = PROC) -> None:
        self._proc, self._next_sample = proc, 0.0
        self._held: deque[int] = deque(maxlen=_LAST_SAMPLES)
        self._peaks: dict[int, int] = {}
        self._counters: dict[str, OomCounter] = {}  # by path
        self._own: dict[int, OomCounter] = {}  # by process
        self._limit = usable_bytes("self", proc)
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
            if pid not in self._own:
                self._note_counter(pid, pid)
        self._held.append(held)
        for counter in self._counters.values():
            counter.read()

    def oom_evidence(self, pid: int | None) -> str | None:
        """Why it is certain that the kernel killed process `pid` (None: any of the run) for lack of memory, or None."""
        own = self._own.get(pid) if pid is not None else None
        for counter in self._counters.values() if own is None else [own]:
            kills = counter.read()
            if kills > counter.before:
                whose = "" if counter.of_group else " of the whole machine"
                return f"oom_kill{whose} in {counter.path} rose from {counter.before} to {kills}"
        return None

    def facts(self, pid: int | None) -> dict[str, Any]:
        """{evidence, hint, memory} should SIGKILL have ended process `pid` (None: the command)."""
        held, hint = max(self._held, default=0), None
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
            "requested_bytes": None,
            "capacity_bytes": self._limit,
        }
        return {"evidence": self.oom_evidence(pid), "hint": hint, "memory": memory}

    def _note_counter(self, pid: int, name: int | str) -> None:
        counter = oom_counter(name, self._proc)
        if counter is not None:
            self._own[pid] = self._counters.setdefault(counter.path, counter)
            bounds = (self._limit, usable_bytes(name, self._proc))
            self._limit = min((bound for bound in bounds if bound is not None), default=None)
