"""From single-assignment values to buffers.

Planners name every intermediate once (a *value*) and never rotate a buffer by hand. The allocator maps values of one
kind to slots by linear scan over the time 5*step + phase (pre 0, post 1, tiles 2, wait 3, after 4); a transfer
occupies its rows from post to wait. A slot passes to a value whose first use is strictly later than the last use of
the old one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from engine.planning.schedule.first_writes import store_first
from engine.planning.schedule.plan import (
    AttentionPlan,
    Channel,
    Direction,
    HeadPart,
    Kind,
    LocalOp,
    RankPlan,
    Slot,
    Step,
    Tile,
    Transfer,
    View,
)

PHASES = {"pre": 0, "post": 1, "tiles": 2, "wait": 3, "after": 4}


class Rows(NamedTuple):
    """Rows [start, stop) of a block."""

    start: int
    stop: int

    def hull(self, other: Rows | None) -> Rows:
        """Smallest range that contains both."""
        return self if other is None else Rows(min(self.start, other.start), max(self.stop, other.stop))


class Home(NamedTuple):
    """Kind, heads and memory of values that may share a buffer."""

    kind: Kind
    heads: HeadPart = HeadPart()
    where: Literal["device", "host"] = "device"


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

    def on(self, rank: int) -> Value:
        """The same value as one who numbers ranks otherwise calls it."""
        return self if rank == self.rank else Value(self.number, rank, *self[2:])

    def view(self, rows: Rows | None = None) -> View:
        """View of some rows of the block (all by default); slot numbers are value numbers until allocation."""
        rows = rows or self.rows
        assert self.rows.start <= rows.start <= rows.stop <= self.rows.stop, (self, rows)
        return View(self.number, rows.start - self.rows.start, rows.stop - self.rows.start)


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

    def value(self, rank: int, home: Home | Kind, rows: Rows, pin: str | None = None) -> Value:
        """A new value (of all heads on the device, if only its kind is given); on ranks that are not kept it only
        carries its rows.
        """
        home = home if isinstance(home, Home) else Home(home)
        if rank not in self.kept:
            return Value(-1, rank, home, rows, pin)
        value = Value(len(self._values[rank]), rank, home, rows, pin)
        self._values[rank].append(value)
        return value

    def tile(self, step: int, rank: int, tile: Tile) -> None:
        """Compute `tile` on `rank` at `step`."""
        if rank in self.kept:
            self._drafts[rank][step].tiles.append(tile)

    def op(self, step: int, phase: Literal["pre", "after"], rank: int, op: LocalOp) -> None:
        """Run a local op on `rank` before the posts or after the waits of `step`."""
        if rank in self.kept:
            draft = self._drafts[rank][step]
            (draft.pre if phase == "pre" else draft.after).append(op)

    def message(self, post: int, wait: int, channel: Channel, src: Value, dst: Value, rows: Rows) -> None:
        """Move `rows` from `src` to `dst` on another rank: both ends at once. Rows count from each block's start."""
        self.message_between(post, wait, channel, (src, rows), (dst, rows))

    def message_between(
        self, post: int, wait: int, channel: Channel, source: tuple[Value, Rows], target: tuple[Value, Rows]
    ) -> None:
        """As `message`, between rows that are numbered differently at both ends."""
        (src, src_rows), (dst, dst_rows) = source, target
        assert post <= wait, (post, wait)
        assert (src.rank != dst.rank, src.home) == (True, dst.home), (src, dst)
        assert src_rows.stop - src_rows.start == dst_rows.stop - dst_rows.start, (src_rows, dst_rows)
        if src.rank not in self.kept and dst.rank not in self.kept:
            return
        number = self._number(src.rank, dst.rank)
        self._end(post, wait, src, Transfer(number, "send", channel, dst.rank, src.view(src_rows)))
        self._end(post, wait, dst, Transfer(number, "recv", channel, src.rank, dst.view(dst_rows)))

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
        self._end(post, wait, dst, Transfer(number, op, channel, dst.rank, dst.view(rows), src.view(rows)))

    def _number(self, src: int, dst: int) -> int:
        """A number of its own for every message; one that depends on earlier messages of the same two ranks only, so
        that both agree although each plans without what does not touch it.
        """
        before = self._messages[src, dst]
        self._messages[src, dst] += 1
        return (before * self.size + src) * self.size + dst

    def _end(self, post: int, wait: int, value: Value, transfer: Transfer) -> None:
        if value.rank in self.kept:
            self._drafts[value.rank][post].post.append(transfer)
            self._drafts[value.rank][wait].wait.append(transfer.message)

    def build(self) -> AttentionPlan:
        """The plan with values mapped to slots; steps at which no rank does anything are dropped."""
        used = sorted({step for drafts in self._drafts.values() for step in drafts})
        index = {step: position for position, step in enumerate(used)}
        plans = {}
        for rank in self.ranks:
            drafts = self._drafts[rank]
            steps = tuple(draft.frozen(index[step]) for step, draft in sorted(drafts.items()))
            values = self._values[rank]
            plans[rank] = _allocate(rank, values, store_first(steps, {v.number: _slot_of(v) for v in values}))
        return AttentionPlan(self.direction, self.size, plans)


class Span(NamedTuple):
    """Steps at which messages are posted and waited for."""

    post: int
    wait: int


class Lane:
    """The builder as one ring sees it, which may be one of several.

    Members are numbered from 0, steps from `first_step`; values are of some of the heads. With `spans` each of the
    ring's steps takes several, given by its number; what comes after the last takes one.
    """

    def __init__(
        self,
        builder: PlanBuilder,
        members: Sequence[int],
        heads: HeadPart,
        *,
        first_step: int = 0,
        spans: Sequence[Span] = (),
    ) -> None:
        self.direction = builder.direction
        self.ranks = tuple(index for index, rank in enumerate(members) if rank in builder.ranks)
        self.last_step = first_step  # of all members, kept or not
        self._builder = builder
        self._members = tuple(members)
        self._first_step = first_step
        self._heads = heads
        self._spans = spans

    def value(self, rank: int, home: Home | Kind, rows: Rows, pin: str | None = None) -> Value:
        """As PlanBuilder.value, of this lane's heads unless `home` says otherwise."""
        home = home if isinstance(home, Home) else Home(home, self._heads)
        return self._builder.value(self._members[rank], home, rows, pin).on(rank)

    def tile(self, step: int, rank: int, tile: Tile) -> None:
        """As PlanBuilder.tile."""
        self._builder.tile(self._at(step).post, self._members[rank], tile)

    def op(self, step: int, phase: Literal["pre", "after"], rank: int, op: LocalOp) -> None:
        """As PlanBuilder.op."""
        span = self._at(step)
        self._builder.op(span.post if phase == "pre" else span.wait, phase, self._members[rank], op)

    def message(self, post: int, wait: int, channel: Channel, src: Value, dst: Value, rows: Rows) -> None:
        """As PlanBuilder.message."""
        outside = (src.on(self._members[src.rank]), dst.on(self._members[dst.rank]))
        self._builder.message(self._at(post).post, self._at(wait).wait, channel, *outside, rows)

    def reach(self, step: int) -> None:
        """Count `step` as used, for planners that skip what touches no planned rank."""
        self._at(step)

    def _at(self, step: int) -> Span:
        if not self._spans:
            self.last_step = max(self.last_step, self._first_step + step)
            return Span(self._first_step + step, self._first_step + step)
        late = step - len(self._spans)
        return self._spans[step] if late < 0 else Span(*[self._spans[-1].wait + 1 + late] * 2)


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

    def touch(views: Iterable[View | None], time: int) -> None:
        for view in views:
            if view is not None:
                first, last = spans.get(view.slot, (time, time))
                spans[view.slot] = (min(first, time), max(last, time))

    in_flight: dict[int, tuple[View | None, ...]] = {}
    for step in steps:
        time = 5 * step.index
        for op in step.pre:
            touch((op.dst, op.src), time + PHASES["pre"])
        for transfer in step.post:
            in_flight[transfer.message] = (transfer.view, transfer.source)
            touch(in_flight[transfer.message], time + PHASES["post"])
        for tile in step.tiles:
            touch((tile.q, tile.kv, tile.acc, tile.acc_kv), time + PHASES["tiles"])
        for message in step.wait:
            touch(in_flight[message], time + PHASES["wait"])
        for op in step.after:
            touch((op.dst, op.src), time + PHASES["after"])
    return spans


def _renumbered(step: Step, slot_of: dict[int, int]) -> Step:
    def moved(view: View) -> View:
        return View(slot_of[view.slot], view.start, view.stop)

    def moved_op(op: LocalOp) -> LocalOp:
        return LocalOp(op.op, moved(op.dst), moved(op.src) if op.src else None)

    return Step(
        step.index,
        tuple(moved_op(op) for op in step.pre),
        tuple(
            Transfer(t.message, t.op, t.channel, t.peer, moved(t.view), moved(t.source) if t.source else None)
            for t in step.post
        ),
        tuple(
            t._replace(q=moved(t.q), kv=moved(t.kv), acc=moved(t.acc), acc_kv=moved(t.acc_kv) if t.acc_kv else None)
            for t in step.tiles
        ),
        step.wait,
        tuple(moved_op(op) for op in step.after),
    )
