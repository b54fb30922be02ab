"""Attention with gathered K,V: every rank sends its rows straight to every reader; gradients go straight home.

    inner=2, outer=2, rank 0, d=+1       step 0      1         2           3           4 (backward)
    tile with the block of               0 (own)     1         2           3
    K,V arrive before                                step 0    step 1      step 2
    dK,dV leave at                                             1 -> 1      2 -> 2      3 -> 3

All K,V messages are posted at step 0, those of node mates on a channel of their own, and each is waited for one step
before the tile that reads it: the own tile comes first, node mates next, and what is slow has their tiles to arrive.
The schedule is the ring's with its hops taken out: at every step each rank reads one block and is read by one rank, so
that nobody receives two gradients at once, and sums at home form in a fixed order, in fp32.

Costs P-1 blocks of memory, and no rank waits for another's tiles. With `prefetch_steps=n` a block is posted n steps
before its wait instead, and n + 2 blocks of memory suffice; where a channel completes what was posted together only
as a whole (NCCL), blocks then also arrive one by one. Bytes without pruning: (P-1)*C forward, backward
(P-1)*C for K,V and (P-1)*C*(gradient bytes)/2 for dK,dV; the schedule of Megatron's all-gather (then reduce-scatter),
but only rows that the reader needs are sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from engine.attention.allocate import Lane, PlanBuilder, Rows, Value
from engine.attention.mask import Visibility
from engine.attention.plan import AttentionPlan, Channel, Kind, LocalOp, Tile
from engine.attention.planners.ring import Operands, Ring, initialise_sums, pinned_operands
from engine.attention.planners.rows import needed_rows


def plan_gather_forward(visibility: Visibility, ring: Ring, only: Collection[int] | None = None) -> AttentionPlan:
    """Forward plan. Pins q, kv, acc on every rank of `only` (None: all)."""
    builder = PlanBuilder("forward", ring.size, only)
    gather(visibility, ring, builder, pinned_operands(visibility, ring, builder, "kv"))
    return builder.build()


def plan_gather_backward(visibility: Visibility, ring: Ring, only: Collection[int] | None = None) -> AttentionPlan:
    """Backward plan. Pins qx, kv, dq, dkv on every rank of `only` (None: all)."""
    builder = PlanBuilder("backward", ring.size, only)
    gather(visibility, ring, builder, pinned_operands(visibility, ring, builder, "kv"))
    return builder.build()


def gather(visibility: Visibility, ring: Ring, builder: PlanBuilder | Lane, operands: Operands) -> None:
    """Emit one pass of attention over the ranks of `ring` into the builder; its `direction` says which pass.

    Of the ring's habits direction, narrow_gradients, whole_blocks and prefetch_steps apply. Backward gathers K,V again.
    """
    _Gathering(visibility, ring, builder, operands).emit()


class _Visit(NamedTuple):
    """Rank `reader` works on `rows` of the block of `home` at `step`."""

    step: int
    reader: int
    home: int
    rows: Rows


class _Gathering:
    """Emits one pass; all methods write into the builder. What touches no planned rank is skipped."""

    def __init__(self, visibility: Visibility, ring: Ring, builder: PlanBuilder | Lane, operands: Operands) -> None:
        assert visibility.layout.size == ring.size, (visibility.layout.size, ring.size)
        assert not ring.keeps_last, "gathered K,V have no last block; backward_order must be same"
        self.visibility = visibility
        self.ring = ring
        self.builder = builder
        self.operands = operands
        self.backward = builder.direction == "backward"
        self.needed = needed_rows(
            visibility, "kv", blocks=builder.ranks, readers=builder.ranks, whole_blocks=ring.whole_blocks
        )

    def emit(self) -> None:
        """Emit every tile with what it reads and leaves; messages of one step in the order of their readers' tiles."""
        initialise_sums(self.builder, self.operands)
        for visit in self._visits():
            self._compute(visit, self._receive(visit))
        if isinstance(self.builder, Lane):  # the same for all members, whatever they have to do
            self.builder.reach(self.ring.size - 1 + self.backward)

    def _visits(self) -> Iterator[_Visit]:
        """Visits that touch planned ranks, by step."""
        ring, kept = self.ring, frozenset(self.builder.ranks)
        for step in range(ring.size):
            cycle, index = divmod(step, ring.inner)
            homes = kept | {ring.visitor(rank, -cycle, -index) for rank in kept}
            for home in sorted(homes):
                reader = ring.visitor(home, cycle, index)
                rows = self.needed.rows(home, reader)
                if rows.start < rows.stop:
                    yield _Visit(step, reader, home, rows)

    def _receive(self, visit: _Visit) -> Value:
        """The block at its reader."""
        own = self.operands.kv[visit.home]
        if visit.reader == visit.home:
            return own
        arrived = self.builder.value(visit.reader, own.kind, visit.rows)
        channel = self._channel(visit, Channel.PAYLOAD_INNER, Channel.PAYLOAD_OUTER)
        wait, ahead = visit.step - 1, self.ring.prefetch_steps
        self.builder.message(0 if ahead is None else max(0, wait - ahead), wait, channel, own, arrived, visit.rows)
        return arrived

    def _compute(self, visit: _Visit, kv: Value) -> None:
        operands, reader = self.operands, visit.reader
        kv_sums: Value | None = None
        if self.backward:
            kv_sums = operands.kv_sums[reader] if reader == visit.home else self._send_sums(visit)
        if reader not in self.builder.ranks:
            return
        for band in self.visibility.bands(reader, visit.home):
            q_rows, k_rows = Rows(band.q_start, band.q_stop), Rows(band.k_start, band.k_stop)
            tile = Tile(
                operands.query[reader].view(q_rows),
                kv.view(k_rows),
                operands.sums[reader].view(q_rows),
                kv_sums.view(k_rows) if kv_sums else None,
                band.low,
                band.high,
            )
            self.builder.tile(visit.step, reader, tile)

    def _send_sums(self, visit: _Visit) -> Value:
        """Where a reader sums its part of dK,dV of a block, which goes home during the next step's tile."""
        step, rows = visit.step + 1, visit.rows
        part = wire = self.builder.value(visit.reader, Kind.DKV, rows)
        self.builder.op(visit.step, "pre", visit.reader, LocalOp("init", part.view()))
        if self.ring.narrow_gradients:
            wire = self.builder.value(visit.reader, Kind.DKV_WIRE, rows)
            self.builder.op(step, "pre", visit.reader, LocalOp("copy", wire.view(), part.view()))
        arrived = self.builder.value(visit.home, wire.kind, rows)
        channel = self._channel(visit, Channel.GRADIENT_INNER, Channel.GRADIENT_OUTER)
        self.builder.message(step, step, channel, wire, arrived, rows)
        target = self.operands.kv_sums[visit.home]
        self.builder.op(step, "after", visit.home, LocalOp("add", target.view(rows), arrived.view()))
        return part

    def _channel(self, visit: _Visit, inner: Channel, outer: Channel) -> Channel:
        return inner if visit.reader // self.ring.inner == visit.home // self.ring.inner else outer
