"""Processes as the kernel shows them: when they started, whose child they are, what their environment says."""

import contextlib
import ctypes
import os
from typing import NamedTuple, Optional

_MAX_ENVIRON_BYTES = 8 << 20
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PIDFD_OPEN = 434  # the number of the system call, the same on every machine
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_libc = ctypes.CDLL(None, use_errno=True)


class Entry(NamedTuple):
    """One process. start: tells a reused pid apart. status: as of waitpid, once it is a zombie that we may look at."""

    pid: int
    parent: int
    state: str
    start: str
    status: int

    @property
    def lives(self) -> bool:
        """A zombie has ended: only its parent has yet to notice."""
        return self.state not in ("Z", "X", "x")


def read_entry(pid: int) -> Optional[Entry]:
    """What is known of process `pid`; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode("ascii", "replace")
        fields = text.rpartition(")")[2].split()  # the name in parentheses may itself hold spaces and parentheses
        return Entry(pid, int(fields[1]), fields[0], fields[19], int(fields[49]))
    except (OSError, ValueError, IndexError):
        return None


def process_start(pid: int) -> Optional[str]:
    """When process `pid` started, in a form that tells a reused pid apart; None when no such process lives."""
    entry = read_entry(pid)
    return entry.start if entry is not None and entry.lives else None


def read_environ(pid: int) -> Optional[dict[bytes, bytes]]:
    """The environment process `pid` was started with; None when it is not ours to see."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            data = file.read(_MAX_ENVIRON_BYTES)
    except OSError:
        return None
    pairs = (item.partition(b"=") for item in data.split(b"\0"))
    return {name: value for name, _, value in pairs if name}


def is_own(pid: int) -> bool:
    """Whether process `pid` runs as this user."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False


def resident_bytes(pid: int) -> Optional[int]:
    """The resident set of process `pid`; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def cpu_seconds(pid: int) -> Optional[float]:
    """Processor time that process `pid` has used; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return round((int(fields[11]) + int(fields[12])) / _TICKS_PER_S, 2)
    except (OSError, ValueError, IndexError):
        return None


def inner_pids(pid: int) -> list[int]:
    """The numbers by which process `pid` is known here and inside of its container."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file.read().splitlines():
            if line.startswith(b"NSpid:"):
                return [int(number) for number in line.split()[1:]]
    return [pid]


def open_pidfd(pid: int, start: str) -> Optional[int]:
    """A descriptor that becomes readable when that process ends; None where the kernel has none (Linux < 5.3)."""
    descriptor = int(_libc.syscall(ctypes.c_long(_PIDFD_OPEN), ctypes.c_long(pid), ctypes.c_long(0)))
    if descriptor < 0:
        return None
    if process_start(pid) != start:
        os.close(descriptor)
        return None
    return descriptor


def all_pids() -> list[int]:
    """Numbers of all processes that are to be seen."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def exit_code(status: int) -> int:
    """A status of waitpid as an exit code; a signal is negative."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def send_signal(pid: int, start: str, number: int) -> bool:
    """Send a signal to process `pid` if it is still the one that began at `start`; whether that was so."""
    if process_start(pid) != start:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def die_with_parent(number: int) -> None:
    """Ask the kernel to send this process signal `number` when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, number)


def become_subreaper() -> bool:
    """From now on orphans below this process become its children; whether the kernel agreed."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    return int(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)) == 0
