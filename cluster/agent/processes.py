"""The processes of one run on one node, wherever they moved in the process tree, and its ranks.

torchrun gives every rank a session of its own, and ranks outlive a killed torchrun. So a process belongs to the run
when its environment holds both marks (run id and node: nodes of a testbed share one process table), when it descends
from such a process or from the started command, or when it is an orphan that fell to this supervisor. Nothing else is
ever signalled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from engine.runs.process import NODE_VARIABLE, RUN_ID_VARIABLE, Entry, process_start, read_entry

_MAX_ENVIRON_BYTES = 8 << 20
_PR_SET_CHILD_SUBREAPER = 36
_PIDFD_OPEN = 434  # the number of the system call, the same on every machine
_libc = ctypes.CDLL(None)


def read_environ(pid: int) -> dict[bytes, bytes] | None:
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


def inner_pids(pid: int) -> list[int]:
    """The numbers by which process `pid` is known here and inside of its container."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file.read().splitlines():
            if line.startswith(b"NSpid:"):
                return [int(number) for number in line.split()[1:]]
    return [pid]


def all_pids() -> list[int]:
    """Numbers of all processes that are to be seen, in ascending order."""
    try:
        return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    except OSError:
        return []


def send_signal(pid: int, start: str, number: int) -> None:
    """Send a signal to process `pid` if it is still the one that began at `start`."""
    if process_start(pid) == start:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def become_subreaper() -> None:
    """From now on orphans below this process become its children."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


_YOUNG_S = 10.0  # a process gets its environment by exec, some time after it was forked
_LOOK_S = 0.2  # how often new processes are looked for
_FULL_LOOK_S = 10.0  # how often all are looked at again: a number may belong to another process by now
_POLL_S = 0.05
_ECHOES = {None: 1, 0: 2, -signal.SIGTERM: 2, 130: 2, 143: 2}  # ends that mostly follow another's; None: nobody saw how


class Helpers:
    """Children of this process that are no part of the run; known before anyone can take them for members."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pids: set[int] = set()

    def pids(self) -> set[int]:
        """Numbers of those that have not been waited for."""
        with self._lock:
            return set(self._pids)

    def run(self, words: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        """The end of a command and what it printed. Raises OSError, subprocess.TimeoutExpired."""
        environment, pipe = dict(os.environ, LC_ALL="C"), subprocess.PIPE
        with self._lock:
            child = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
            )
            self._pids.add(child.pid)
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise
        finally:
            with self._lock:
                self._pids.discard(child.pid)
        return subprocess.CompletedProcess(words, child.returncode, out, err)


class ProcessLabels(NamedTuple):
    """What every process of a run on a node carries in its environment."""

    run_id: str
    node: str

    def match(self, environ: dict[bytes, bytes] | None) -> bool:
        """Whether `environ` holds both."""
        wanted = {RUN_ID_VARIABLE: self.run_id, NODE_VARIABLE: self.node}
        return environ is not None and all(environ.get(os.fsencode(k)) == os.fsencode(v) for k, v in wanted.items())


class Rank(NamedTuple):
    """The process of one rank."""

    rank: int
    pid: int
    start: str

    def entry(self) -> Entry | None:
        """What is known of it now; None when its number is nobody's or another's."""
        return read_entry(self.pid, self.start)

    @property
    def state(self) -> str:
        """As the kernel names it, or gone."""
        entry = self.entry()
        return "gone" if entry is None else entry.state


class Death(NamedTuple):
    """A rank that ended. exit_code: None when nobody here could see it; negative: the signal."""

    rank: int
    pid: int
    exit_code: int | None
    at_ns: int


class _Seen:
    """What is known of one number in the process table."""

    __slots__ = ("is_member", "rank", "start", "young_until")

    def __init__(self, start: str, young_until: float) -> None:
        self.start, self.young_until = start, young_until
        self.is_member, self.rank = False, -1


class Family:
    """The members as of the last `refresh`.

    ranks: which numbers may be ranks of this node. helpers: numbers of this process' own children that are not members.
    any_owner: processes of other users may be members, as in containers; else nobody can pass one of his off as a rank.
    """

    def __init__(
        self,
        marks: ProcessLabels,
        ranks: range = range(0),
        helpers: Callable[[], set[int]] = set,
        any_owner: bool = True,
    ) -> None:
        self.marks, self.child = marks, 0
        self.ranks: dict[int, Rank] = {}
        self.deaths: list[Death] = []
        self._rank_numbers, self._helpers, self._any_owner = ranks, helpers, any_owner
        self._me = os.getpid()
        self._seen: dict[int, _Seen] = {}
        self._next_look = self._next_full_look = 0.0
        self._ends = Ends()
        self._adopts = False  # whether orphans fall to this process

    def refresh(self, full: bool = False) -> None:
        """Notice who came and who went. `full`: look at every process of the machine, as before anything final."""
        now = time.monotonic()
        self._notice_ends()
        full = full or now >= self._next_full_look
        if full or now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._next_full_look = now + _FULL_LOOK_S if full else self._next_full_look
            self._look(now, full)

    def wait(self, timeout_s: float) -> None:
        """Return when a rank or the command has ended, or the time is over."""
        self._ends.wait(timeout_s)

    def watch_child(self, pid: int) -> None:
        """Process `pid`, a child of this one, is the started command."""
        self.child, self._adopts = pid, True
        self._ends.watch(pid, process_start(pid) or "")

    def remove_child(self) -> None:
        """The command has been waited for: its number may soon be another's."""
        self._ends.forget(self.child)
        self.child = 0

    def members(self) -> list[int]:
        """Numbers of the living members."""
        return [pid for pid, seen in self._seen.items() if seen.is_member]

    def living_ranks(self) -> list[Rank]:
        """The ranks that live, by number."""
        dead = {death.rank for death in self.deaths}
        return [self.ranks[number] for number in sorted(self.ranks) if number not in dead]

    def signal(self, number: int, spare: Collection[int] = ()) -> None:
        """Send a signal to every member but those of `spare`."""
        for pid in self.members():
            if pid not in spare:
                send_signal(pid, self._seen[pid].start, number)

    def kill_all(self, number: int, wait_s: float) -> list[int]:
        """Kill every member until none is found; the numbers of those that would not die in `wait_s`."""
        deadline = time.monotonic() + wait_s
        while True:
            self.refresh(full=True)
            left = self.members()
            if not left or time.monotonic() > deadline:
                return sorted(left)
            self.signal(number)
            time.sleep(_POLL_S)

    def _notice_ends(self) -> None:
        """Bury those that ended. Of ranks that ended between two looks, one that was not merely told to comes first."""
        deaths: list[Death] = []
        for pid in self.members():
            seen = self._seen[pid]
            entry = read_entry(pid, seen.start)
            if entry is not None and entry.lives:
                continue
            if seen.rank >= 0:
                deaths.append(Death(seen.rank, pid, None if entry is None else entry.exit_code, time.time_ns()))
                self._ends.forget(pid)
            if entry is not None and entry.parent == self._me and pid != self.child:
                with contextlib.suppress(ChildProcessError):  # an orphan that fell to us
                    os.waitpid(pid, os.WNOHANG)
            del self._seen[pid]
        self.deaths += sorted(deaths, key=lambda death: _ECHOES.get(death.exit_code, 0))

    def _look(self, now: float, full: bool) -> None:
        """Find new members among the processes that are new, or too young to be sure of; `full`: among all."""
        pids, is_first = all_pids(), not self._seen
        alien = {self._me, *self._helpers()}
        self._seen = {pid: self._seen[pid] for pid in self._seen.keys() & {*pids, *self.members()}}
        # In ascending order parents mostly come before their children; the rest is found by the next look.
        for pid in pids:
            seen = self._seen.get(pid)
            is_due = seen is None or (seen.rank < 0 and now < seen.young_until) or (full and not seen.is_member)
            if is_due and pid not in alien:
                self._examine(pid, now, is_first)

    def _examine(self, pid: int, now: float, is_first: bool) -> None:
        entry = read_entry(pid)
        if entry is None or not entry.lives:
            return
        seen = self._seen.get(pid)
        if seen is None or seen.start != entry.start:  # who was here before us may be old
            seen = self._seen[pid] = _Seen(entry.start, now + _YOUNG_S - (entry.age_s if is_first else 0.0))
        environ = read_environ(pid) if self._any_owner or is_own(pid) else None
        if not seen.is_member:
            parent = self._seen.get(entry.parent)
            descends = parent is not None and parent.is_member
            is_orphan = self._adopts and entry.parent == self._me
            seen.is_member = pid == self.child or descends or is_orphan or self.marks.match(environ)
        if seen.is_member and environ is not None:
            self._note_rank(entry, seen, environ)

    def _note_rank(self, entry: Entry, seen: _Seen, environ: dict[bytes, bytes]) -> None:
        """A rank carries RANK and its parent does not; its workers inherit that from it."""
        text = environ.get(b"RANK", b"")
        if not text.isdigit() or len(text) > 8 or not self.marks.match(environ):
            return
        number = int(text)
        if number not in self._rank_numbers or number in self.ranks:
            return
        parent = read_environ(entry.parent) if entry.parent in self._seen else None
        if parent is not None and parent.get(b"RANK") == text and self.marks.match(parent):
            return
        self.ranks[number] = Rank(number, entry.pid, entry.start)
        seen.rank = number
        self._ends.watch(entry.pid, entry.start)


class Ends:
    """Wakes up as soon as a watched process ends: its parent reaps it soon, and then its exit code is gone."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._descriptors: dict[int, int] = {}

    def watch(self, pid: int, start: str) -> None:
        """Watch process `pid`; where the kernel cannot (Linux < 5.3), nothing happens."""
        descriptor = int(_libc.syscall(ctypes.c_long(_PIDFD_OPEN), ctypes.c_long(pid), ctypes.c_long(0)))
        if descriptor < 0:
            return
        if process_start(pid) != start:
            os.close(descriptor)
            return
        self._descriptors[pid] = descriptor
        self._poll.register(descriptor, select.POLLIN)

    def forget(self, pid: int) -> None:
        """Watch it no more."""
        descriptor = self._descriptors.pop(pid, None)
        if descriptor is not None:
            self._poll.unregister(descriptor)
            os.close(descriptor)

    def wait(self, timeout_s: float) -> None:
        """Return when one has ended or the time is over."""
        self._poll.poll(timeout_s * 1000)
