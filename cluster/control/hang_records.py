"""What ranks of a run that hangs left, read back: flight records into who waits for whom, and the stacks of threads.

Pure; what a rank sends is checked, never trusted, and may be cut anywhere. In a group all ranks enter the same
collectives in the same order. A rank that has entered number 57 and is not through waits for those that have entered 56
at most; a message waits for its peer. Who waits for nobody is the one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cluster.remote_text import one_line
from cluster.values import integer, word

MAX_ENTRIES = 1000
_SAME_SIZES = ("all_reduce", "allreduce", "reduce_scatter", "all_gather", "allgather")


class GroupKey(NamedTuple):
    """Collectives that are numbered together."""

    backend: str
    name: str


@dataclass(frozen=True)
class Collective:
    """One collective as one rank entered it."""

    key: GroupKey
    description: str
    seq: int
    op: str
    is_done: bool
    sizes: str

    def __str__(self) -> str:
        group = self.description if self.description not in ("", "undefined") else self.key.name
        return one_line(f"{self.op} number {self.seq} of group {group}")


@dataclass(frozen=True)
class Flight:
    """The record of one rank. `newest`: its last collective in every group; `peer`: whose message it waits for."""

    rank: int
    collectives: Mapping[tuple[GroupKey, int], Collective] = field(default_factory=dict)
    newest: Mapping[GroupKey, Collective] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    peer: int | None = None
    peer_op: str = ""

    def entered(self, key: GroupKey) -> int:
        """Number of the last collective of that group that the rank has entered; 0: none."""
        return self.newest[key].seq if key in self.newest else 0


@dataclass(frozen=True)
class Edge:
    """Rank `waiter` waits for rank `awaited`, in a collective or for a message. is_sure: the other one agrees."""

    waiter: int
    awaited: int
    is_sure: bool
    collective: Collective | None = None
    message: str = "recv"

    @property
    def undone(self) -> str:
        """What the awaited rank has not done."""
        if self.collective is not None:
            return f"has not entered {self.collective}"
        return "has not taken a message" if self.message == "send" else "has not sent a message"

    @property
    def waits_in(self) -> str:
        """Where the waiting rank is."""
        if self.collective is not None:
            return str(self.collective)
        return f"a message {'to' if self.message == 'send' else 'from'} rank {self.awaited}"


@dataclass(frozen=True)
class Mismatch:
    """Ranks that entered something else than the rest as the same number of the same group."""

    ranks: tuple[int, ...]
    own: Collective
    others: Collective
    is_minority: bool


def read_flight(rank: int, document: Mapping[str, Any] | None) -> Flight | None:
    """The record of `rank`, or None when there is none or it cannot be read."""
    if document is None or not isinstance(document.get("entries"), list):
        return None
    entries = [_read_entry(entry) for entry in document["entries"][-MAX_ENTRIES:] if isinstance(entry, Mapping)]
    found = [entry for entry in entries if entry is not None]
    newest: dict[GroupKey, Collective] = {}
    for entry in found:
        if entry.key not in newest or entry.seq > newest[entry.key].seq:
            newest[entry.key] = entry
    waiting = document.get("waiting")
    return Flight(
        rank,
        {(entry.key, entry.seq): entry for entry in found},
        newest,
        _read_groups(document.get("groups")),
        integer(waiting, "peer"),
        word(waiting, "what", 40) or "",
    )


def wait_edges(flights: Mapping[int, Flight], ranks: Sequence[int]) -> list[Edge]:
    """Who waits for whom, among `ranks`; one without a record is awaited, unsurely, by all it shares a group with."""
    edges = []
    for flight in flights.values():
        if flight.peer is not None and flight.peer in ranks and flight.peer != flight.rank:
            edges.append(Edge(flight.rank, flight.peer, flight.peer in flights, message=flight.peer_op))
        for key, collective in flight.newest.items():
            if collective.is_done:
                continue
            for member in flight.groups.get(key.name, tuple(ranks)):
                if member == flight.rank or member not in ranks:
                    continue
                other = flights.get(member)
                if other is None or other.entered(key) < collective.seq:
                    edges.append(Edge(flight.rank, member, other is not None, collective))
    return edges


def sinks(edges: Sequence[Edge]) -> list[int]:
    """Ranks that others wait for and that wait for nobody; those of whom it is sure, if there are any."""
    waiters = {edge.waiter for edge in edges}
    found = [edge for edge in edges if edge.awaited not in waiters]
    return sorted({edge.awaited for edge in found if edge.is_sure} or {edge.awaited for edge in found})


def find_mismatch(flights: Mapping[int, Flight]) -> Mismatch | None:
    """The earliest collective that some ranks entered as another operation, or with other sizes, than the rest."""
    by_place: dict[tuple[GroupKey, tuple[int, ...], int], dict[int, Collective]] = {}
    for flight in flights.values():
        for (key, seq), collective in flight.collectives.items():
            place = (key, flight.groups.get(key.name, ()), seq)
            by_place.setdefault(place, {})[flight.rank] = collective
    for _, entered in sorted(by_place.items(), key=lambda item: (item[0][2], item[0][0])):
        if found := _mismatch(entered):
            return found
    return None


def _mismatch(entered: Mapping[int, Collective]) -> Mismatch | None:
    signatures = {rank: _signature(collective) for rank, collective in entered.items()}
    counts = Counter(signatures.values())
    if len(counts) < 2 or all(collective.is_done for collective in entered.values()):
        return None
    (common, most), (_, second) = counts.most_common(2)
    odd = tuple(sorted(rank for rank, signature in signatures.items() if signature != common))
    others = next(entered[rank] for rank, signature in signatures.items() if signature == common)
    return Mismatch(odd, entered[odd[0]], others, is_minority=most > second)


def _signature(collective: Collective) -> tuple[str, str]:
    has_equal_sizes = any(name in collective.op for name in _SAME_SIZES)
    return collective.op, collective.sizes if has_equal_sizes else ""


def _read_entry(entry: Mapping[str, Any]) -> Collective | None:
    seq = integer(entry, "seq")
    if seq is None or entry.get("p2p"):
        return None
    backend, _, op = str(entry.get("op", ""))[:200].rpartition(":")
    key = GroupKey(backend, str(entry.get("group", ""))[:200])
    is_done = entry.get("state") == "completed"
    return Collective(key, str(entry.get("desc", ""))[:200], seq, op, is_done, str(entry.get("sizes"))[:500])


def _read_groups(value: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(value, Mapping):
        return {}
    return {
        str(name): tuple(rank for rank in members if isinstance(rank, int))
        for name, members in value.items()
        if isinstance(members, list)
    }


MAX_TEXT = 1_000_000
_HEADER = re.compile(r"(Current thread|Thread) 0x([0-9a-fA-F]+)\b[^()]*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.+)')
# Files of torch whose functions block until other ranks come, and files that only lead there.
_BLOCKING_FILES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_BLOCKING_FUNCTIONS = {
    ("engine/attention/transport.py", "wait"): "a message of the attention",
    ("engine/attention/streams.py", "wait"): "a message of the attention",
    ("torch/distributed/rendezvous.py", "_create_c10d_store"): "the rendezvous",
}
_LEADING_FILES = (
    "torch/_ops.py",
    "torch/utils/_contextlib.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/_tools/",
    "engine/parallel/waits.py",
    "/contextlib.py",
)
_BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int | None
    function: str

    def __str__(self) -> str:
        return one_line(f"{self.function} ({short_path(self.file)}:{self.line if self.line is not None else '?'})")


@dataclass(frozen=True)
class ThreadStack:
    """One thread, the frame that runs first."""

    ident: int
    is_current: bool
    frames: tuple[Frame, ...]

    @property
    def blocking_call(self) -> str | None:
        """Wherein this thread waits for other ranks, as a function of torch or in words, or None."""
        for frame in self.frames:
            if any(part in frame.file for part in _LEADING_FILES):
                continue
            if frame.file.endswith(_BLOCKING_FILES):
                return frame.function
            names = _BLOCKING_FUNCTIONS.items()
            return next(
                (text for (file, name), text in names if frame.file.endswith(file) and frame.function == name), None
            )
        return None


def parse_stacks(text: str) -> tuple[ThreadStack, ...]:
    """The threads of the last dump in `text`, in its order; a file has one dump per request."""
    threads: list[tuple[int, bool, list[Frame]]] = []
    previous_was_frame = False
    for line in text[-MAX_TEXT:].splitlines():
        header, frame = _HEADER.match(line), _FRAME.match(line)
        if line.startswith("# rank "):
            threads = []  # another process writes from here on
        elif header is not None:
            ident = int(header[2], 16)
            if previous_was_frame or any(ident == known for known, _, _ in threads):
                threads = []  # within a dump there is an empty line before every thread but the first
            threads.append((ident, header[1] == "Current thread", []))
        elif frame is not None and threads:
            number = int(frame[2]) if frame[2].isdigit() and len(frame[2]) < 9 else None
            threads[-1][2].append(Frame(frame[1], number, frame[3]))
        previous_was_frame = frame is not None
    return tuple(ThreadStack(ident, current, tuple(frames)) for ident, current, frames in threads)


def main_thread(threads: Sequence[ThreadStack]) -> ThreadStack | None:
    """The thread that runs the program: it began in a module; else the one that took the signal."""
    for thread in threads:
        if thread.frames and (thread.frames[-1].file.startswith("<frozen runpy") or _began_in_module(thread)):
            return thread
    current = next((thread for thread in threads if thread.is_current), None)
    return current or next(reversed(threads), None)


def waits_in(threads: Sequence[ThreadStack]) -> str | None:
    """Wherein the rank waits for others, or None. On a GPU backward runs in a thread of its own."""
    main = main_thread(threads)
    if main is None:
        return None
    if main.frames and main.frames[0].file.endswith(_BACKWARD[0]) and main.frames[0].function == _BACKWARD[1]:
        calls = (thread.blocking_call for thread in threads if thread is not main)
        return next((call for call in calls if call is not None), None)
    return main.blocking_call


def short_path(path: str) -> str:
    """The last parts of a path, from the package on where one is known."""
    for package in ("/torch/", "/engine/", "/burst_cli/", "/cluster/"):
        head, found, tail = path.rpartition(package)
        if found and head:
            return f"{package[1:]}{tail}"
    return "/".join(path.split("/")[-3:])


def _began_in_module(thread: ThreadStack) -> bool:
    return thread.frames[-1].function == "<module>"
