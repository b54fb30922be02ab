"""Flight records of all ranks, read into who waits for whom. Pure; what a rank sends is checked, never trusted.

In a group all ranks enter the same collectives in the same order. A rank that has entered number 57 and is not through
waits for those that have entered 56 at most; a message waits for its peer. Who waits for nobody is the one.
"""

from __future__ import annotations

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
