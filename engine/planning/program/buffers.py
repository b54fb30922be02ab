"""From values that are written once to buffers.

Programs name every intermediate once (a *value*) and never rotate a buffer by hand. The allocator maps values of one
kind to buffers by linear scan over the time 5*step + phase (pre 0, post 1, tiles 2, wait 3, after 4); a transfer
occupies its rows from post to wait. A buffer passes to a value whose first use is strictly later than the last use of
the old one.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from engine.config.settings import Store
from engine.planning.program.ops import (
    ALL_HEADS,
    Buffer,
    HeadPart,
    Kind,
    LocalOp,
    RankPlan,
    Step,
    Tile,
    Transfer,
    View,
)

PHASES = 5  # of a step


class Rows(NamedTuple):
    """Rows [start, stop) of a block."""

    start: int
    stop: int


class BufferClass(NamedTuple):
    """Kind, heads and memory of values that may share a buffer."""

    kind: Kind
    heads: HeadPart = ALL_HEADS
    where: Store = "device"


class Value(NamedTuple):
    """Rows of a block, on one rank; `number` identifies it there.

    owner      ring rank whose block it is
    argument   name of an input or output of the plan
    shard_of   rank whose shard of the block its rows are counted in (head exchange); None: rows of the block
    """

    number: int
    buffer_class: BufferClass
    rows: Rows
    owner: int
    argument: str | None = None
    shard_of: int | None = None

    @property
    def kind(self) -> Kind:
        """The kind of its rows."""
        return self.buffer_class.kind

    def view(self, rows: Rows) -> View:
        """View of some rows of the block; buffer numbers are value numbers until allocation."""
        assert self.rows.start <= rows.start <= rows.stop <= self.rows.stop, (self, rows)
        return View(self.number, rows.start - self.rows.start, rows.stop - self.rows.start)


def buffer_of_value(value: Value) -> Buffer:
    kind, heads, where = value.buffer_class
    return Buffer(kind, value.rows.stop - value.rows.start, value.argument, heads, where)


def allocate(rank: int, values: list[Value], steps: tuple[Step, ...]) -> RankPlan:
    spans = _lifetimes(steps)
    buffers: list[Buffer] = []
    pools: defaultdict[BufferClass, _Pool] = defaultdict(_Pool)
    buffer_of: dict[int, int] = {}
    order = sorted(
        (v for v in values if v.argument or v.number in spans), key=lambda v: spans.get(v.number, (-1, -1))[0]
    )
    for value in order:
        rows, pool = value.rows.stop - value.rows.start, pools[value.buffer_class]
        chosen = None if value.argument else pool.take(spans[value.number][0])
        if chosen is None:
            chosen = len(buffers)
            buffers.append(buffer_of_value(value))
        elif buffers[chosen].rows < rows:
            buffers[chosen] = replace(buffers[chosen], rows=rows)
        if not value.argument:  # those of arguments live as long as the plan runs
            pool.put(chosen, last_use=spans[value.number][1])
        buffer_of[value.number] = chosen
    return RankPlan(rank, tuple(buffers), tuple(_renumbered(step, buffer_of) for step in steps))


class _Pool:
    """Buffers of one class, for values in the order of their first use."""

    def __init__(self) -> None:
        self._in_use: list[tuple[int, int]] = []  # heap of (last use, buffer)
        self._free: list[int] = []  # heap

    def put(self, buffer: int, *, last_use: int) -> None:
        """Add a buffer that the next values may take after its last use."""
        heapq.heappush(self._in_use, (last_use, buffer))

    def take(self, first_use: int) -> int | None:
        """Take the lowest buffer whose last use is before `first_use`, which never decreases; None: there is none."""
        while self._in_use and self._in_use[0][0] < first_use:
            heapq.heappush(self._free, heapq.heappop(self._in_use)[1])
        return heapq.heappop(self._free) if self._free else None


def _lifetimes(steps: tuple[Step, ...]) -> dict[int, tuple[int, int]]:
    """First and last time at which each value is touched."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    in_flight: dict[int, Transfer] = {}

    def touch(time: int, *views: View | None) -> None:
        for view in views:
            if view is not None:
                first.setdefault(view.buffer, time)
                last[view.buffer] = time

    for step in steps:
        time = PHASES * step.index
        for op in step.pre:
            touch(time, op.dst, op.src)
        for transfer in step.post:
            touch(time + 1, transfer.view, transfer.source)
            in_flight[transfer.tag] = transfer
        for tile in step.tiles:
            touch(time + 2, tile.q, tile.kv, tile.sums, tile.kv_sums)
        for tag in step.wait:
            transfer = in_flight.pop(tag)
            touch(time + 3, transfer.view, transfer.source)
        for op in step.after:
            touch(time + 4, op.dst, op.src)
    return {number: (first[number], last[number]) for number in first}


def _renumbered(step: Step, buffer_of: dict[int, int]) -> Step:
    """The step on views of buffers instead of values."""

    def moved(view: View) -> View:
        return View(buffer_of[view.buffer], view.start, view.stop)

    def moved_op(op: LocalOp) -> LocalOp:
        return LocalOp(op.op, moved(op.dst), op.src and moved(op.src))

    def moved_transfer(end: Transfer) -> Transfer:
        tag, op, channel, peer, view, source, kind = end
        return Transfer(tag, op, channel, peer, moved(view), source and moved(source), kind)

    def moved_tile(tile: Tile) -> Tile:
        q, kv, sums, band, kv_sums, stores, stores_kv, heads = tile
        return Tile(moved(q), moved(kv), moved(sums), band, kv_sums and moved(kv_sums), stores, stores_kv, heads)

    return Step(
        step.index,
        tuple(map(moved_op, step.pre)),
        tuple(map(moved_transfer, step.post)),
        tuple(map(moved_tile, step.tiles)),
        step.wait,
        tuple(map(moved_op, step.after)),
    )
