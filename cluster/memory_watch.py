"""Host memory of a run while it lives: what its processes hold, and whether the kernel killed one for lack of it.

Only the kernel's own count or log is evidence. What the processes held is a hint: it is sampled, and counts shared
pages once per process.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from cluster.control_group import PROC, OomCounter, memory_limit_bytes, oom_counter
from cluster.failure import KillFacts

KERNEL_LOG = Path("/dev/kmsg")
SAMPLE_INTERVAL_S = 1.0
NEARLY_FULL = 0.9
_LAST_SAMPLES = 10  # a death is known within a few seconds; what was held before that explains nothing
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # a fixed number of the kernel: PROC_PID_INIT_INO
_RECORD_BYTES = 8192  # a record of the kernel's log is never longer
_KILLED = re.compile(r"(?:Out of memory|oom).*Killed process (\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class HostMemory:
    """What the processes of a run held together, most in the last seconds, and what they may hold; bytes."""

    held_bytes: int
    limit_bytes: int | None

    @property
    def nearly_full(self) -> bool:
        """Whether lack of memory is a likely reason for a death that nothing else explains."""
        return self.limit_bytes is not None and self.held_bytes > NEARLY_FULL * self.limit_bytes


@dataclass
class MemoryWatch:
    """Watches the command `root_pid` and its descendants; `sample` is called often and does little."""

    root_pid: int | None = None
    proc: Path = PROC
    kernel_log: Path = KERNEL_LOG
    _started: float = field(default_factory=time.monotonic)
    _next_sample: float = 0.0
    _held: deque[int] = field(default_factory=lambda: deque(maxlen=_LAST_SAMPLES))
    _peaks: dict[int, int] = field(default_factory=dict)
    _counters: dict[int, OomCounter] = field(default_factory=dict)
    _kills_before: dict[OomCounter, int] = field(default_factory=dict)
    _limit: int | None = None

    def __post_init__(self) -> None:
        self._limit = memory_limit_bytes("self", self.proc)
        self._note_counter(os.getpid(), "self")

    def sample(self) -> None:
        """Looks at the processes once a second: resident sets, and the control group of new ones."""
        now = time.monotonic()
        if now < self._next_sample or self.root_pid is None:
            return
        self._next_sample = now + SAMPLE_INTERVAL_S
        held = 0
        for process in _family(self.root_pid):
            with contextlib.suppress(psutil.Error):
                resident = process.memory_info().rss
                held += resident
                self._peaks[process.pid] = max(resident, self._peaks.get(process.pid, 0))
                if process.pid not in self._counters:
                    self._note_counter(process.pid, process.pid)
        self._held.append(held)

    def oom_evidence(self, pid: int | None) -> str | None:
        """Why it is certain that the kernel killed process `pid` (None: any of the run) for lack of memory, or None."""
        if pid is not None and _has_kernel_numbers(self.proc) and _log_names(self.kernel_log, pid, self._started):
            return f"the kernel's log says that it killed process {pid}"
        own = self._counters.get(pid) if pid is not None else None
        for counter in [own] if own is not None else list(self._kills_before):
            after = counter.read()
            if after is not None and after > self._kills_before[counter]:
                whose = "" if counter.of_group else " of the whole machine"
                return f"oom_kill{whose} in {counter.path} rose from {self._kills_before[counter]} to {after}"
        return None

    def kill_facts(self, pid: int | None) -> KillFacts:
        """What is known should SIGKILL have ended process `pid` (None: torchrun)."""
        held, hint = self.host_memory(), None
        if held.nearly_full and held.limit_bytes is not None:
            hint = (
                f"Lack of memory may be the reason: the run's processes held {held.held_bytes / 2**30:.1f} GiB of "
                f"{held.limit_bytes / 2**30:.1f} GiB in their last seconds."
            )
        memory = {
            "where": "host",
            "device": "cpu",
            "peak_bytes": self._peaks.get(pid) if pid is not None else None,
            "peak_source": "resident set of the process, looked at every second",
            "asked_bytes": None,
            "capacity_bytes": held.limit_bytes,
        }
        return KillFacts(self.oom_evidence(pid), hint, memory)

    def host_memory(self) -> HostMemory:
        """What the run held in its last seconds."""
        return HostMemory(max(self._held, default=0), self._limit)

    def _note_counter(self, pid: int, name: int | str) -> None:
        counter = oom_counter(name, self.proc)
        kills = None if counter is None else counter.read()
        if counter is not None and kills is not None:
            self._counters[pid] = counter
            self._kills_before.setdefault(counter, kills)
            limit = memory_limit_bytes(name, self.proc)
            self._limit = min((bound for bound in (self._limit, limit) if bound is not None), default=None)


def _family(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _has_kernel_numbers(proc: Path) -> bool:
    """Whether process numbers here are those of the kernel's log, as they are outside of containers."""
    try:
        return str((proc / "self" / "ns" / "pid").readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _log_names(path: Path, pid: int, since: float) -> bool:
    """Whether the kernel's log says since `since` (monotonic seconds) that process `pid` was killed for lack of memory.

    A record is "priority,number,microseconds,-;text". Most users may not read the log: then it says nothing.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return any(_tells_of(line, pid, since) for line in _records(descriptor))
    finally:
        os.close(descriptor)


def _records(descriptor: int) -> list[str]:
    lines: list[str] = []
    while True:
        try:
            block = os.read(descriptor, _RECORD_BYTES)
        except BlockingIOError:
            return lines  # the end of the kernel's log
        except BrokenPipeError:
            continue  # records were overwritten while we read
        except OSError:
            return lines
        if not block:
            return lines
        lines += block.decode(errors="replace").splitlines()


def _tells_of(line: str, pid: int, since: float) -> bool:
    head, _, text = line.partition(";")
    found = _KILLED.search(text)
    if found is None or int(found[1]) != pid:
        return False
    fields = head.split(",")
    return len(fields) > 2 and fields[2].isdecimal() and int(fields[2]) / 1e6 >= since - 1.0
