"""From single-assignment values to buffers.

Planners name every intermediate once (a *value*) and never rotate a buffer by hand. The allocator maps values of one
kind to slots by linear scan over the time 5*step + phase (pre 0, post 1, tiles 2, wait 3, after 4); a transfer
occupies its rows from post to wait. A slot passes to a value whose first use is strictly later than the last use of
the old one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from engine.config.settings import Store
from engine.planning.schedule.first_writes import store_first
from engine.planning.schedule.plan import (
    AttentionPlan,
    Channel,
    Direction,
    HeadPart,
    Kind,
    LocalOp,
    OpName,
    RankPlan,
    Slot,
    Step,
    Tile,
    Transfer,
    View,
)

if TYPE_CHECKING:
    from engine.planning.sequence.mask import Band

Phase = Literal["pre", "after"]

PHASES = 5  # of a step


class Rows(NamedTuple):
    """Rows [start, stop) of a block."""

    start: int
    stop: int


class Home(NamedTuple):
    """Kind, heads and memory of values that may share a buffer."""

    kind: Kind
    heads: HeadPart = HeadPart()
    where: Store = "device"


class Value(NamedTuple):
    """Rows of one rank's block, held by `rank`, written once; `number` identifies it on that rank."""

    number: int
    rank: int
    home: Home
    rows: Rows
    pin: str | None = None

    @property
    def kind(self) -> Kind:
        """What its rows hold."""
        return self.home.kind

    @property
    def whole(self) -> Part:
        """All its rows."""
        return self, self.rows

    def view(self, rows: Rows) -> View:
        """View of some rows of the block; slot numbers are value numbers until allocation."""
        assert self.rows.start <= rows.start <= rows.stop <= self.rows.stop, (self, rows)
        return View(self.number, rows.start - self.rows.start, rows.stop - self.rows.start)


Part = tuple[Value, Rows]  # some rows of a value


@dataclass
class _Draft:
    pre: list[LocalOp] = field(default_factory=list)
    post: list[Transfer] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    wait: list[int] = field(default_factory=list)
    after: list[LocalOp] = field(default_factory=list)

    def frozen(self, index: int) -> Step:
        return Step(index, tuple(self.pre), tuple(self.post), tuple(self.tiles), tuple(self.wait), tuple(self.after))


class PlanBuilder:
    """Collects values, tiles, local ops and messages of a group; only those of the ranks in `only` are kept."""

    def __init__(self, direction: Direction, size: int, only: Collection[int] | None = None) -> None:
        self.direction = direction
        self.size = size
        self.ranks = tuple(range(size)) if only is None else tuple(sorted(only))
        self.kept = frozenset(self.ranks)
        self._values: dict[int, list[Value]] = {rank: [] for rank in self.ranks}
        self._drafts: dict[int, defaultdict[int, _Draft]] = {rank: defaultdict(_Draft) for rank in self.ranks}
        self._messages: defaultdict[tuple[int, int], int] = defaultdict(int)

    def value(self, rank: int, home: Home, rows: Rows, pin: str | None = None) -> Value:
        """A new value; on ranks that are not kept it stands for what they have."""
        if rank not in self.kept:
            return Value(-1, rank, home, rows, pin)
        value = Value(len(self._values[rank]), rank, home, rows, pin)
        self._values[rank].append(value)
        return value

    def tile(self, step: int, band: Band, q: Value, kv: Value, sums: Value, kv_sums: Value | None) -> None:
        """Compute a band between a block's queries and keys on the rank of `q` at `step`."""
        if q.rank in self.kept:
            q_rows, k_rows = Rows(band.q_start, band.q_stop), Rows(band.k_start, band.k_stop)
            acc_kv = kv_sums.view(k_rows) if kv_sums else None
            tile = Tile(q.view(q_rows), kv.view(k_rows), sums.view(q_rows), band.from_0(), acc_kv)
            self._drafts[q.rank][step].tiles.append(tile)

    def op(self, step: int, phase: Phase, op: OpName, dst: Part, src: Part | None = None) -> None:
        """Run a local op on the rank of `dst` before the posts or after the waits of a step; none without rows."""
        value, rows = dst
        if value.rank in self.kept and rows.start < rows.stop:
            draft = self._drafts[value.rank][step]
            found = LocalOp(op, value.view(rows), src[0].view(src[1]) if src else None)
            (draft.pre if phase == "pre" else draft.after).append(found)

    def message(self, post: int, wait: int, channel: Channel, src: Part, dst: Part) -> None:
        """Move rows to as many on another rank: both ends at once."""
        (source, src_rows), (target, dst_rows) = src, dst
        assert post <= wait, (post, wait)
        assert (source.rank != target.rank, source.home) == (True, target.home), (src, dst)
        assert src_rows.stop - src_rows.start == dst_rows.stop - dst_rows.start, (src, dst)
        if source.rank in self.kept or target.rank in self.kept:
            number = self._number(source.rank, target.rank)
            if source.rank in self.kept:
                send = Transfer(number, "send", channel, target.rank, source.view(src_rows))
                self._end(post, wait, source.rank, send)
            if target.rank in self.kept:
                recv = Transfer(number, "recv", channel, source.rank, target.view(dst_rows))
                self._end(post, wait, target.rank, recv)

    def move(self, post: int, wait: int, src: Value, dst: Value, rows: Rows) -> None:
        """Load (host to device) or store (device to host) `rows` of one rank's block."""
        assert post <= wait, (post, wait)
        assert (src.rank, src.home[:2]) == (dst.rank, dst.home[:2]), (src, dst)
        if src.rank not in self.kept:
            return
        assert {src.home.where, dst.home.where} == {"device", "host"}, (src, dst)
        op: Literal["load", "store"] = "load" if src.home.where == "host" else "store"
        channel = Channel.TO_DEVICE if op == "load" else Channel.TO_HOST
        number = self._number(src.rank, dst.rank)
        transfer = Transfer(number, op, channel, dst.rank, dst.view(rows), src.view(rows))
        self._end(post, wait, dst.rank, transfer)

    def _number(self, src: int, dst: int) -> int:
        """A number of its own for every message; one that depends on earlier messages of the same two ranks only, so
        that both agree although each plans without what does not touch it.
        """
        before = self._messages[src, dst]
        self._messages[src, dst] += 1
        return (before * self.size + src) * self.size + dst

    def _end(self, post: int, wait: int, rank: int, transfer: Transfer) -> None:
        self._drafts[rank][post].post.append(transfer)
        self._drafts[rank][wait].wait.append(transfer.message)

    def build(self) -> AttentionPlan:
        """The plan with values mapped to slots; steps at which no rank does anything are dropped."""
        used = sorted({step for drafts in self._drafts.values() for step in drafts})
        index = {step: position for position, step in enumerate(used)}
        plans = {}
        for rank in self.ranks:
            drafts, values = self._drafts[rank], self._values[rank]
            steps = tuple(draft.frozen(index[step]) for step, draft in sorted(drafts.items()))
            plans[rank] = _allocate(rank, values, store_first(steps, list(map(_slot_of, values))))
        return AttentionPlan(self.direction, self.size, plans)


class Span(NamedTuple):
    """Steps at which messages are posted and waited for."""

    post: int
    wait: int


def _slot_of(value: Value) -> Slot:
    kind, heads, where = value.home
    return Slot(kind, value.rows.stop - value.rows.start, value.pin, heads, where)


def _allocate(rank: int, values: list[Value], steps: tuple[Step, ...]) -> RankPlan:
    spans = _lifetimes(steps)
    slots: list[Slot] = []
    free_after: list[int | None] = []  # last use of each slot; None: never reused
    alike: defaultdict[Home, list[int]] = defaultdict(list)  # slots
    slot_of: dict[int, int] = {}
    order = sorted((v for v in values if v.pin or v.number in spans), key=lambda v: spans.get(v.number, (-1, -1))[0])
    for value in order:
        rows = value.rows.stop - value.rows.start
        chosen = None if value.pin else _free_slot(alike[value.home], free_after, spans[value.number][0])
        if chosen is None:
            chosen = len(slots)
            slots.append(_slot_of(value))
            free_after.append(None)
            alike[value.home].append(chosen)
        if slots[chosen].rows < rows:
            slots[chosen] = replace(slots[chosen], rows=rows)
        free_after[chosen] = None if value.pin else spans[value.number][1]
        slot_of[value.number] = chosen
    return RankPlan(rank, tuple(slots), tuple(_renumbered(step, slot_of) for step in steps))


def _free_slot(alike: list[int], free_after: list[int | None], start: int) -> int | None:
    for index in alike:
        last = free_after[index]
        if last is not None and last < start:
            return index
    return None


def _lifetimes(steps: tuple[Step, ...]) -> dict[int, tuple[int, int]]:
    """First and last time at which each value is touched."""
    spans: dict[int, tuple[int, int]] = {}
    in_flight: dict[int, Transfer] = {}
    for step in steps:
        in_flight.update((transfer.message, transfer) for transfer in step.post)
        waited = [in_flight.pop(message) for message in step.wait]
        for phase, items in enumerate((step.pre, step.post, step.tiles, waited, step.after)):
            time = PHASES * step.index + phase
            for view in itertools.chain.from_iterable(items):
                if isinstance(view, View):
                    spans[view.slot] = spans.get(view.slot, (time, time))[0], time
    return spans


_Item = TypeVar("_Item", LocalOp, Transfer, Tile)


def _renumbered(step: Step, slot_of: dict[int, int]) -> Step:
    def renumbered(x: Any) -> Any:
        return View(slot_of[x.slot], x.start, x.stop) if isinstance(x, View) else x

    def moved(items: tuple[_Item, ...]) -> tuple[_Item, ...]:
        return tuple(type(item)(*map(renumbered, item)) for item in items)

    return Step(step.index, moved(step.pre), moved(step.post), moved(step.tiles), step.wait, moved(step.after))
