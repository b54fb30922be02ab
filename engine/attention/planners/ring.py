"""Ring attention in one or two levels: flat ring, striped ring, topology-aware double ring, kv or q circulation.

`outer` rings of `inner` ranks: rank = n * inner + l. With direction d = -1 (towards lower ranks; causal zigzag then
moves up to a quarter fewer bytes than with +1) block (m, k) is visited at cycle o and inner step i by rank (m + d*o,
k + d*i), at step o * inner + i:

    inner=3, outer=2, block of rank (0,0), d=+1     step 0     1     2     3     4     5
    backward_order="same"                           (0,0) (0,1) (0,2) (1,0) (1,1) (1,2)
    "same", tail_steps=2 (5': half of the own tile) (0,0) (0,1) (1,0) (1,1) (1,2) (0,2) 6: (0,0)'
    "reversed" (d=-1 in backward)                   (1,2) (1,1) (1,0) (0,2) (0,1) (0,0)

Payload (K,V, or Q,dO,lse,scale): inner hops one step before their reader, hidden behind a tile; the block with which a
cycle starts goes to the next ring at the cycle's first step and has the whole cycle to arrive.
Gradients (dK,dV or dQ) of visited blocks are summed along each cycle, one step behind the payload, on channels of
their own. The home node's sum returns inside the ring; every other cycle's sum makes one outer hop to the home node's
rank of the same index (the relay), where sums gather before one last inner hop. The home tile's own gradient never
travels. Hops per block: payload outer*(inner-1) + outer-1; gradients the same + 1 inner (2 levels), or inner-1 (one
level).

Tail: the last gradients' way home has no tile to hide behind, one outer and one inner hop long. `tail_steps` keeps work
of the own node for it. Reversed: forward leaves the last block it held, which backward starts from instead of the own
one; blocks come home with their gradients: one inner hop fewer, nothing without a tile to hide behind. Forward
then carries all rows that anybody needs to the end, and backward carries them home, where "same" sends on less and
less. A forward pass that runs again for some queries carries what these need, and the last block comes in one message.

Only rows that somebody needs are sent, and only visits with something to compute are made.
Sources: Liu et al. 2023 (Ring Attention), Brandon et al. 2023 (striped), Gu et al. 2024 (LoongTrain's double ring),
Sun et al. 2024 (BurstAttention: circulating Q in backward); the reversed order is that of Megatron-LM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from engine.attention.allocate import Lane, PlanBuilder, Rows, Value
from engine.attention.mask import Band, Visibility
from engine.attention.plan import AttentionPlan, Channel, Kind, LocalOp, Tile
from engine.attention.planners.rows import Flags, Integers, RowTable, halves, hull, needed_rows
from engine.errors import PlanError

Circulates = Literal["kv", "q"]
Number = TypeVar("Number", int, Integers)


@dataclass(frozen=True)
class Ring:
    """Shape and habits of the circulation.

    inner, outer           ranks per ring, number of rings
    direction              +1 towards higher ranks, -1 towards lower ones; a reversed backward goes the other way, so
                           that it takes the same Ring as its forward
    narrow_gradients       gradients travel in the wire's dtype instead of fp32 (sums are fp32 all the same)
    whole_blocks           send whole blocks to everybody, needed or not (the published schedules; for comparison)
    own_gradient_travels   the home tile's gradient takes part in the circulation (the published schedules)
    backward_order         "reversed": forward keeps the last block (`kv_last`), a kv backward starts from it
    tail_steps             0 to inner: tiles that backward keeps for its end, half of the own one and those of
                           tail_steps - 1 node mates; no more than 1 helps one level. Not for the reversed order
    prefetch_steps         gathered K,V only: steps from the post of a block to its wait; None: all posted at step 0
    """

    inner: int
    outer: int = 1
    direction: Literal[-1, 1] = -1
    narrow_gradients: bool = False
    whole_blocks: bool = False
    own_gradient_travels: bool = False
    backward_order: Literal["same", "reversed"] = "same"
    tail_steps: int = 0
    prefetch_steps: int | None = None

    @property
    def size(self) -> int:
        """Number of ranks, and of steps that have tiles."""
        return self.inner * self.outer

    @property
    def keeps_last(self) -> bool:
        """Whether forward leaves its last block for backward; a ring of one rank holds its own only."""
        return self.backward_order == "reversed" and self.size > 1

    def visitor(self, home: Number, cycle: Number, index: Number) -> Number:
        """Rank that works on the block of `home` at inner step `index` of `cycle`; numbers or arrays of them."""
        node, local = divmod(home, self.inner)
        node = (node + self.direction * cycle) % self.outer
        return node * self.inner + (local + self.direction * index) % self.inner

    def last_home(self, rank: int) -> int:
        """Home of the block that `rank` holds last in forward."""
        node, local = divmod(rank, self.inner)
        node = (node + self.direction) % self.outer
        return node * self.inner + (local + self.direction) % self.inner


def preferred_direction(circulates: Circulates, outer: int, *, backward: bool) -> Literal[-1, 1]:
    """Direction that moves fewer bytes under causal zigzag (any other layout: equal).

    Downwards the payload shrinks early; upwards the gradients of a flat kv ring stay half as long for longer.
    """
    return 1 if backward and circulates == "kv" and outer == 1 else -1


def plan_forward(visibility: Visibility, ring: Ring, only: Collection[int] | None = None) -> AttentionPlan:
    """Forward plan: K,V circulate, (out, lse) stay. Pins q, kv, acc on every rank of `only` (None: all), and kv_last
    for a reversed backward.
    """
    builder = PlanBuilder("forward", ring.size, only)
    circulate(visibility, ring, "kv", builder, pinned_operands(visibility, ring, builder, "kv"))
    return builder.build()


def plan_backward(
    visibility: Visibility, ring: Ring, circulates: Circulates, only: Collection[int] | None = None
) -> AttentionPlan:
    """Backward plan. Pins qx, kv (kv_last for the reversed order), dq, dkv on every rank of `only` (None: all).

    kv: K,V and dK,dV circulate; q: Q, dO, lse, scale and dQ circulate while K,V,dK,dV stay.
    """
    builder = PlanBuilder("backward", ring.size, only)
    circulate(visibility, ring, circulates, builder, pinned_operands(visibility, ring, builder, circulates))
    return builder.build()


@dataclass(frozen=True)
class Operands:
    """What a circulation works on, one value per ring rank: query (Q; backward QX or QO), kv, sums (ACC; backward DQ)
    and in backward kv_sums (DKV). It initialises the sums.

    Where `ring.keeps_last`, forward writes kv_last, and backward is given the same as its `kv`: that of rank r has the
    rows of the block of `ring.last_home(r)`. Backward then never touches a rank's own K and V.
    """

    query: list[Value]
    kv: list[Value]
    sums: list[Value]
    kv_sums: list[Value]
    kv_last: list[Value] = field(default_factory=list)


def circulate(
    visibility: Visibility, ring: Ring, circulates: Circulates, builder: PlanBuilder | Lane, operands: Operands
) -> None:
    """Emit one pass of attention over a ring into the builder; its `direction` says which pass."""
    _Circulation(visibility, ring, circulates, builder, operands).emit()


def initialise_sums(builder: PlanBuilder | Lane, operands: Operands) -> None:
    """Zero all accumulators before the first tile."""
    for value in (*operands.sums, *operands.kv_sums):
        if value.rows.stop:
            builder.op(0, "pre", value.rank, LocalOp("init", value.view()))


def query_kind(circulates: Circulates) -> Kind:
    """What backward knows of queries: `out` need not travel, and is at hand where they stay."""
    return Kind.QX if circulates == "q" else Kind.QO


def pinned_operands(visibility: Visibility, ring: Ring, builder: PlanBuilder, circulates: Circulates) -> Operands:
    """Inputs and outputs of a plan that is nothing but one circulation, pinned under their names.

    Where the mask stops queries at a position, acc has the rows before it only.
    """
    layout = visibility.layout

    def pinned(kind: Kind, pin: str | None = None) -> list[Value]:
        homes = [ring.last_home(rank) if pin == "kv_last" else rank for rank in range(layout.size)]
        pin = pin or kind.value
        return [builder.value(rank, kind, Rows(0, layout.rows(home)), pin) for rank, home in enumerate(homes)]

    if builder.direction == "backward":
        kv = pinned(Kind.KV, "kv_last" if ring.keeps_last else None)
        return Operands(pinned(query_kind(circulates), "qx"), kv, pinned(Kind.DQ), pinned(Kind.DKV))
    kv_last = pinned(Kind.KV, "kv_last") if ring.keeps_last else []
    asked = [Rows(0, visibility.query_rows(rank)) for rank in range(layout.size)]
    sums = [builder.value(rank, Kind.ACC, rows, Kind.ACC.value) for rank, rows in enumerate(asked)]
    return Operands(pinned(Kind.Q), pinned(Kind.KV), sums, [], kv_last)


class _Place(NamedTuple):
    """Where a block is at one step of its way around the ring; each rank is visited once."""

    cycle: int
    inner_step: int


_START = _Place(0, 0)


@dataclass(frozen=True)
class _Journey:
    """One block's way around the ring, and the values it makes on planned ranks."""

    home: int
    held: dict[_Place, Value] = field(default_factory=dict)  # the block
    sums: dict[_Place, Value] = field(default_factory=dict)


class _Circulation:
    """Emits one pass; all methods write into the builder. What touches no planned rank is skipped: arrays over all
    visits [home, cycle, inner step] say what does, and only that is emitted one by one.
    """

    def __init__(
        self,
        visibility: Visibility,
        ring: Ring,
        circulates: Circulates,
        builder: PlanBuilder | Lane,
        operands: Operands,
    ) -> None:
        assert visibility.layout.size == ring.size, (visibility.layout.size, ring.size)
        self.visibility = visibility
        self.ring = ring
        self.circulates = circulates
        self.builder = builder
        self.kept = frozenset(builder.ranks)
        self.backward = builder.direction == "backward"
        self.reversed = self.backward and ring.keeps_last
        if self.reversed and circulates == "q":
            raise PlanError("ring: a reversed backward starts from the last kv held; got q circulation; circulate kv")
        self.tail = min(ring.tail_steps, ring.inner) if self.backward and not self.reversed else 0
        self.operands = operands
        self.query, self.kv = operands.query, operands.kv
        self.sums, self.kv_sums = operands.sums, operands.kv_sums
        self.payload = self.kv if circulates == "kv" else self.query
        self.gradient_kind = Kind.DKV if circulates == "kv" else Kind.DQ
        narrow = {Kind.DKV: Kind.DKV_WIRE, Kind.DQ: Kind.DQ_WIRE}
        self.wire_kind = narrow[self.gradient_kind] if ring.narrow_gradients else self.gradient_kind
        # If only some ask, few rows travel the whole way, and the last block better comes by itself.
        self.shortcut = ring.keeps_last and not self.backward and visibility.mask.query_stop is not None
        self.step = self._steps()
        self.rank = self._ranks()
        self.planned = np.isin(self.rank, builder.ranks)
        self.at_planned_node = np.repeat(
            np.isin(range(ring.size), builder.ranks).reshape(ring.outer, -1).any(axis=1), ring.inner
        )
        self.needed = self._needed()
        self._find_messages()
        if self.backward:
            self._find_gradients()

    def emit(self) -> None:
        """Emit every block's journey."""
        initialise_sums(self.builder, self.operands)
        messages, tiles = _by_home(self.received), _by_home(self.needed.exists & self.planned)
        if self.backward:
            sums, ends = _by_home(self.chained), _by_home(self.ends)
        for home in range(self.ring.size):
            journey = _Journey(home)
            self._send_payload(journey, messages[home])
            for place in tiles[home]:
                self._compute(journey, place)
            if self.backward:
                for place in sums[home]:
                    self._pass_sum_on(journey, place)
                self._return_gradients(journey, ends[home])
        if isinstance(self.builder, Lane):  # the same for all members, whatever they have to do
            self.builder.reach(self.ring.size - 1 + 2 * self.backward)

    def _steps(self) -> dict[_Place, int]:
        """The step of every (cycle, inner step): the own node first, but for what is kept for the tail."""
        inner, late = self.ring.inner, max(0, self.tail - 1)
        remote = [_Place(cycle, index) for cycle in range(1, self.ring.outer) for index in range(inner)]
        own = [_Place(0, index) for index in range(inner)]
        return {place: step for step, place in enumerate([*own[: inner - late], *remote, *own[inner - late :]])}

    def _ranks(self) -> Integers:
        """Rank at which each block is: backward may go back from where forward ended."""
        homes, cycles, indices = np.ogrid[: self.ring.size, : self.ring.outer, : self.ring.inner]
        if self.reversed:
            cycles, indices = -1 - cycles, -1 - indices
        return self.ring.visitor(homes, cycles, indices)

    def _needed(self) -> RowTable:
        """Rows of the block that are sent to each visit, as far as planned ranks take part: visits at their nodes, and
        all visits of the blocks that they start, take between nodes, hold last or gather the gradients of.
        """
        homes = np.arange(self.ring.size)
        whole_way = self.at_planned_node | self.planned[:, :, 0].any(axis=1) | self.planned[:, -1].any(axis=1)
        blocks, readers = np.flatnonzero(whole_way).tolist(), np.flatnonzero(self.at_planned_node).tolist()

        def table(visibility: Visibility) -> RowTable:
            whole = self.ring.whole_blocks
            return needed_rows(visibility, self.circulates, blocks=blocks, readers=readers, whole_blocks=whole)

        by_rank = table(self.visibility)
        index = homes[:, None, None], self.rank
        needed = RowTable(by_rank.start[index], by_rank.stop[index])
        if self.ring.keeps_last and not self.backward:
            # All queries take part in the backward pass that starts from the last block, even if only some do now.
            everybody = Visibility(self.visibility.mask.all_queries(), self.visibility.layout)
            last = (table(everybody) if self.shortcut else by_rank).hull(axis=1)
            needed.start[:, -1, -1], needed.stop[:, -1, -1] = last
        return needed

    # ---- payload ------------------------------------------------------------------------------------------------

    def _find_messages(self) -> None:
        """Which visits receive the block, with which rows and from which visit of the same cycle (the first visit of a
        cycle: from that of which cycle).
        """
        passed_on = np.ones(self.rank.shape, dtype=np.bool_)
        passed_on[:, 0, 0] = False
        passed_on[:, -1, -1] &= not self.shortcut
        readers = self.needed.where(passed_on)
        self.carried = readers.from_here_on(axis=2)
        cycles = RowTable(self.carried.start[:, :, 0], self.carried.stop[:, :, 0])
        receives = readers.exists
        receives[:, 1:, 0] = cycles.exists[:, 1:]
        self.source = _before(receives, axis=2, otherwise=0)
        source_is_planned = np.take_along_axis(self.planned, self.source, axis=2)
        self.source[:, :, 0] = _before(cycles.exists, axis=1, otherwise=0)
        source_is_planned[:, :, 0] = np.take_along_axis(self.planned[:, :, 0], self.source[:, :, 0], axis=1)
        self.carried.start[:, :, 0], self.carried.stop[:, :, 0] = cycles.from_here_on(axis=1)
        self.received = receives & (self.planned | source_is_planned)

    def _send_payload(self, journey: _Journey, received: list[_Place]) -> None:
        """Messages that bring the block to all who need it."""
        journey.held[_START] = self.payload[int(self.rank[journey.home, 0, 0])]
        if self.shortcut:
            self._send_last(journey)
        for place in received:
            step, source = self.step[place], int(self.source[journey.home, *place])
            if place.inner_step:
                before, when = _Place(place.cycle, source), (step - 1, step - 1, Channel.PAYLOAD_INNER)
            else:
                before = _Place(source, 0)
                when = (self.step[_Place(place.cycle - 1, 0)], step - 1, Channel.PAYLOAD_OUTER)
            self._pass_on(journey, when, before, place, self.carried.rows(journey.home, *place))

    def _send_last(self, journey: _Journey) -> None:
        """The message that brings the block straight to who keeps it, hidden behind the tiles of the last cycle."""
        place = _Place(self.ring.outer - 1, self.ring.inner - 1)
        rows = self.needed.rows(journey.home, *place)
        if rows.start >= rows.stop:
            return
        wait = self.step[place] - 1
        if place.cycle == 0:
            when = (wait, wait, Channel.PAYLOAD_INNER)
        else:
            when = (min(self.step[_Place(place.cycle, 0)], wait), wait, Channel.PAYLOAD_OUTER)
        self._pass_on(journey, when, _START, place, rows)

    def _pass_on(
        self, journey: _Journey, when: tuple[int, int, Channel], before: _Place, after: _Place, rows: Rows
    ) -> None:
        """Send rows of the block from one visit to another."""
        sender, receiver = (int(self.rank[journey.home, *place]) for place in (before, after))
        kind = self.payload[sender].kind
        if before not in journey.held:  # on a rank that is not planned
            whole = Rows(0, self.visibility.layout.rows(journey.home))
            journey.held[before] = self.builder.value(sender, kind, whole)
        stays = self.ring.keeps_last and not self.backward and self.step[after] == self.ring.size - 1
        arrived = self.operands.kv_last[receiver] if stays else self.builder.value(receiver, kind, rows)
        self.builder.message(*when, journey.held[before], arrived, rows)
        journey.held[after] = arrived

    # ---- tiles --------------------------------------------------------------------------------------------------

    def _compute(self, journey: _Journey, place: _Place) -> None:
        """Tiles of a visit, and in backward the gradient sum that they add to."""
        step, rank = self.step[place], int(self.rank[journey.home, *place])
        travelling = None
        if self.backward and self.adds[journey.home, *place]:
            travelling = self._sum(journey, place)
            self.builder.op(step, "pre", rank, LocalOp("init", travelling.view()))
        pair = (rank, journey.home) if self.circulates == "kv" else (journey.home, rank)
        bands = self.visibility.bands if pair[0] in self.kept else self.visibility.bands_of_pair
        now: Sequence[Band] = bands(*pair)
        if rank == journey.home and self.tail:
            now, last = halves(now)
            for band in last:
                self._tile(self.ring.size, rank, band, journey.held[place], None)
        for band in now:
            self._tile(step, rank, band, journey.held[place], travelling)

    def _sum(self, journey: _Journey, place: _Place) -> Value:
        """The gradient sum that a visit adds to."""
        if place not in journey.sums:
            rank, rows = int(self.rank[journey.home, *place]), self.summed.rows(journey.home, *place)
            journey.sums[place] = self.builder.value(rank, self.gradient_kind, rows)
        return journey.sums[place]

    def _tile(self, step: int, rank: int, band: Band, payload: Value, travelling: Value | None) -> None:
        q_rows, k_rows = Rows(band.q_start, band.q_stop), Rows(band.k_start, band.k_stop)
        if self.circulates == "kv":
            q, kv, sums = self.query[rank], payload, self.sums[rank]
            kv_sums = (travelling or self.kv_sums[rank]) if self.backward else None
        else:
            q, kv, sums, kv_sums = payload, self.kv[rank], travelling or self.sums[rank], self.kv_sums[rank]
        tile = Tile(
            q.view(q_rows),
            kv.view(k_rows),
            sums.view(q_rows),
            kv_sums.view(k_rows) if kv_sums else None,
            band.low,
            band.high,
        )
        self.builder.tile(step, rank, tile)

    # ---- gradients ----------------------------------------------------------------------------------------------

    def _find_gradients(self) -> None:
        """Which visits add to a gradient sum that travels, which rows it then has, and where each cycle's ends."""
        own_stays = self.reversed or not self.ring.own_gradient_travels
        at_home = self.rank == np.arange(self.ring.size)[:, None, None]
        self.adds = self.needed.exists & ~(at_home & own_stays)
        self.summed = self.needed.where(self.adds).up_to_here(axis=2)
        self.added_before = _before(self.adds, axis=2, otherwise=-1)
        passes = np.take_along_axis(self.planned, self.added_before, axis=2)
        self.chained = self.adds & (self.added_before >= 0) & (self.planned | passes)
        is_last = self.adds & (np.cumsum(self.adds, axis=2) == self.adds.sum(axis=2, keepdims=True))
        self.ends = is_last & (self.planned | self.at_planned_node[:, None, None])

    def _return_gradients(self, journey: _Journey, ends: list[_Place]) -> None:
        """The sums of all cycles come home: straight inside the node, over a relay from others."""
        target = (self.kv_sums if self.circulates == "kv" else self.sums)[journey.home]
        home_cycle = self.ring.outer - 1 if self.reversed else 0
        deadline = self.ring.size - (self.tail > 1)
        arrivals: defaultdict[int, list[tuple[int, int, Value]]] = defaultdict(list)  # relay -> (post, wait, tail)
        for place in ends:
            post, tail = self.step[place] + 1, self._sum(journey, place)
            if place.cycle == home_cycle:
                self._send_home(post, tail, target)
            else:
                wait = max(post, min(post + self.ring.inner - 1, deadline))
                arrivals[int(self.rank[journey.home, home_cycle, place.inner_step])].append((post, wait, tail))
        for relay, tails in arrivals.items():
            self._gather(relay, tails, target)

    def _pass_sum_on(self, journey: _Journey, place: _Place) -> None:
        """Add the sum of the visit before to this one's, one step late so that the hop hides behind the tile."""
        before = _Place(place.cycle, int(self.added_before[journey.home, *place]))
        source, target, step = self._sum(journey, before), self._sum(journey, place), self.step[place]
        self._add(step, target, self._hop(step, step, Channel.GRADIENT_INNER, source, target.rank))

    def _gather(self, relay: int, tails: list[tuple[int, int, Value]], target: Value) -> None:
        """Bring the sums of far cycles to the home node's rank `relay`, then home."""
        if relay == target.rank:
            for post, wait, tail in tails:
                self._add(wait, target, self._hop(post, wait, Channel.GRADIENT_OUTER, tail, relay))
            return
        if len(tails) == 1:
            post, done, tail = tails[0]
            total = self._hop(post, done, Channel.GRADIENT_OUTER, tail, relay)
        else:
            rows = hull(tail.rows for _, _, tail in tails)
            assert rows is not None
            total = self.builder.value(relay, self.gradient_kind, rows)
            self.builder.op(tails[0][1], "after", relay, LocalOp("init", total.view()))
            for post, wait, tail in tails:
                self._add(wait, total, self._hop(post, wait, Channel.GRADIENT_OUTER, tail, relay))
            done = max(wait for _, wait, _ in tails)
        self._send_home(done + 1, total, target)

    def _send_home(self, step: int, total: Value, target: Value) -> None:
        if total.rank == target.rank:  # a ring of one rank whose own gradient was asked to travel
            self._add(step, target, total)
            return
        self._add(step, target, self._hop(step, step, Channel.GRADIENT_INNER, total, target.rank))

    def _hop(self, post: int, wait: int, channel: Channel, src: Value, to: int) -> Value:
        """Value that arrives on rank `to`; cast to the wire's dtype first where that is narrower."""
        if src.kind != self.wire_kind:
            narrow = self.builder.value(src.rank, self.wire_kind, src.rows)
            self.builder.op(post, "pre", src.rank, LocalOp("copy", narrow.view(), src.view()))
            src = narrow
        arrived = self.builder.value(to, self.wire_kind, src.rows)
        self.builder.message(post, wait, channel, src, arrived, src.rows)
        return arrived

    def _add(self, step: int, dst: Value, src: Value) -> None:
        self.builder.op(step, "after", dst.rank, LocalOp("add", dst.view(src.rows), src.view()))


def _before(chosen: Flags, axis: int, otherwise: int) -> Integers:
    """For every entry the index of the last chosen one before it along an axis."""
    shape = [1] * chosen.ndim
    shape[axis] = -1
    index = np.where(chosen, np.arange(chosen.shape[axis]).reshape(shape), otherwise)
    before = np.roll(np.maximum.accumulate(index, axis), 1, axis)
    before.swapaxes(0, axis)[0] = otherwise
    return before


def _by_home(chosen: Flags) -> list[list[_Place]]:
    """The chosen visits of every block, in order."""
    places: list[list[_Place]] = [[] for _ in chosen]
    for home, cycle, index in np.argwhere(chosen).tolist():
        places[home].append(_Place(cycle, index))
    return places
