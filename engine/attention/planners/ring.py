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
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from engine.attention.allocate import Lane, PlanBuilder, Rows, Value
from engine.attention.mask import Band, Visibility
from engine.attention.plan import AttentionPlan, Channel, Kind, LocalOp, Tile
from engine.attention.planners.rows import NeededRows, bands_between, halves, hull
from engine.errors import PlanError

Circulates = Literal["kv", "q"]


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

    def visitor(self, home: int, cycle: int, index: int) -> int:
        """Rank that works on the block of `home` at inner step `index` of `cycle`."""
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
    circulate(visibility, ring, "kv", builder, pinned_operands(visibility, ring, builder))
    return builder.build()


def plan_backward(
    visibility: Visibility, ring: Ring, circulates: Circulates, only: Collection[int] | None = None
) -> AttentionPlan:
    """Backward plan. Pins qx, kv (kv_last for the reversed order), dq, dkv on every rank of `only` (None: all).

    kv: K,V and dK,dV circulate; q: Q, dO, lse, scale and dQ circulate while K,V,dK,dV stay.
    """
    builder = PlanBuilder("backward", ring.size, only)
    circulate(visibility, ring, circulates, builder, pinned_operands(visibility, ring, builder))
    return builder.build()


@dataclass(frozen=True)
class Operands:
    """What a circulation works on, one value per ring rank: query (Q; backward QX), kv, sums (ACC; backward DQ) and in
    backward kv_sums (DKV). It initialises the sums.

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


def pinned_operands(visibility: Visibility, ring: Ring, builder: PlanBuilder) -> Operands:
    """Inputs and outputs of a plan that is nothing but one circulation, pinned under their names.

    Where the mask stops queries at a position, acc has the rows before it only.
    """
    layout = visibility.layout

    def pinned(kind: Kind, *, last: bool = False) -> list[Value]:
        homes = [ring.last_home(rank) if last else rank for rank in range(layout.size)]
        pin = "kv_last" if last else kind.value
        return [builder.value(rank, kind, Rows(0, layout.rows(home)), pin) for rank, home in enumerate(homes)]

    if builder.direction == "backward":
        kv = pinned(Kind.KV, last=ring.keeps_last)
        return Operands(pinned(Kind.QX), kv, pinned(Kind.DQ), pinned(Kind.DKV))
    kv_last = pinned(Kind.KV, last=True) if ring.keeps_last else []
    asked = [Rows(0, visibility.query_rows(rank)) for rank in range(layout.size)]
    sums = [builder.value(rank, Kind.ACC, rows, Kind.ACC.value) for rank, rows in enumerate(asked)]
    return Operands(pinned(Kind.Q), pinned(Kind.KV), sums, [], kv_last)


class _Visit(NamedTuple):
    """One block at one rank at one step; `rows` of the block are needed there."""

    cycle: int
    inner_step: int
    rank: int
    step: int
    rows: Rows | None
    is_home: bool


@dataclass(frozen=True)
class _Journey:
    """One block's way around the ring, and the values it makes on planned ranks, by step."""

    home: int
    visits: list[_Visit]
    held: dict[int, Value] = field(default_factory=dict)  # the block
    summed: dict[int, Rows] = field(default_factory=dict)  # rows of the gradient sum of each visit that adds to one
    sums: dict[int, Value] = field(default_factory=dict)


class _Circulation:
    """Emits one pass; all methods write into the builder. What touches no planned rank is skipped."""

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
        self.needed = NeededRows(visibility, circulates)
        # All queries take part in the backward pass that starts from the last block, even if only some do now.
        whole = Visibility(visibility.mask.all_queries(), visibility.layout)
        self.needed_last = NeededRows(whole, circulates)
        # If only some ask, few rows travel the whole way, and the last block better comes by itself.
        self.shortcut = ring.keeps_last and not self.backward and visibility.mask.query_stop is not None
        self.order = self._order()
        self.first_step = {cycle: step for step, (cycle, index) in enumerate(self.order) if index == 0}

    def emit(self) -> None:
        """Emit every block's journey."""
        initialise_sums(self.builder, self.operands)
        for home in range(self.ring.size):
            journey = _Journey(home, self._visits(home))
            self._send_payload(journey)
            self._compute(journey)
            if self.backward:
                self._return_gradients(journey)
        if isinstance(self.builder, Lane):  # the same for all members, whatever they have to do
            self.builder.reach(self.ring.size - 1 + 2 * self.backward)

    def _order(self) -> list[tuple[int, int]]:
        """(cycle, inner step) of every step: the own node first, but for what is kept for the tail."""
        inner, late = self.ring.inner, max(0, self.tail - 1)
        remote = [(cycle, index) for cycle in range(1, self.ring.outer) for index in range(inner)]
        own = [(0, index) for index in range(inner)]
        return [*own[: inner - late], *remote, *own[inner - late :]]

    def _rank(self, home: int, cycle: int, index: int) -> int:
        """Rank at which a block is: backward may go back from where forward ended."""
        if self.reversed:
            return self.ring.visitor(home, -1 - cycle, -1 - index)
        return self.ring.visitor(home, cycle, index)

    def _visits(self, home: int) -> list[_Visit]:
        needed = self._needed(home, self.needed)
        nodes = [self._rank(home, cycle, 0) // self.ring.inner * self.ring.inner for cycle in range(self.ring.outer)]
        places = [self._rank(home, 0, index) % self.ring.inner for index in range(self.ring.inner)]
        visits = []
        for step, (cycle, index) in enumerate(self.order):
            rank = nodes[cycle] + places[index]
            visits.append(_Visit(cycle, index, rank, step, needed[rank], rank == home))
        if self.ring.keeps_last and not self.backward:
            visits[-1] = visits[-1]._replace(rows=hull(self._needed(home, self.needed_last)))
        return visits

    def _needed(self, home: int, needed: NeededRows) -> list[Rows | None]:
        """By rank: rows of the block of `home` that are sent there."""
        if self.ring.whole_blocks:
            rows = self.visibility.layout.rows(home)
            return [Rows(0, rows) if rows else None] * self.ring.size
        return needed.of(home)

    # ---- payload ------------------------------------------------------------------------------------------------

    def _send_payload(self, journey: _Journey) -> None:
        """Messages that bring the block to all who need it."""
        start = entry = journey.visits[0]
        journey.held[start.step] = self.payload[start.rank]
        passed_on = journey.visits[1:]
        if self.shortcut:
            *passed_on, last = passed_on
            self._send_last(journey, start, last)
        cycles = _by_cycle(visit for visit in passed_on if visit.rows)
        later = _from_here_on([hull(visit.rows for visit in readers) for readers in cycles.values()])
        for (cycle, readers), rows in zip(cycles.items(), later, strict=True):
            if cycle > entry.cycle:
                before, entry = entry, journey.visits[self.first_step[cycle]]
                wait = entry.step - 1
                post = self.first_step[cycle - 1]
                self._pass_on(journey, (post, wait, Channel.PAYLOAD_OUTER), before, entry, rows)
            inside = [visit for visit in readers if visit.inner_step > 0]
            if self.kept.isdisjoint(visit.rank for visit in (entry, *inside)):
                continue
            before = entry
            for reader, rows in zip(inside, _from_here_on([visit.rows for visit in inside]), strict=True):
                step = reader.step - 1
                self._pass_on(journey, (step, step, Channel.PAYLOAD_INNER), before, reader, rows)
                before = reader

    def _send_last(self, journey: _Journey, start: _Visit, last: _Visit) -> None:
        """The message that brings the block straight to who keeps it, hidden behind the tiles of the last cycle."""
        if last.rows is None:
            return
        if last.rank // self.ring.inner == start.rank // self.ring.inner:
            when = (last.step - 1, last.step - 1, Channel.PAYLOAD_INNER)
        else:
            when = (min(self.first_step[last.cycle], last.step - 1), last.step - 1, Channel.PAYLOAD_OUTER)
        self._pass_on(journey, when, start, last, last.rows)

    def _pass_on(
        self, journey: _Journey, when: tuple[int, int, Channel], before: _Visit, after: _Visit, rows: Rows
    ) -> None:
        """Send rows of the block from one visit to another."""
        if before.rank not in self.kept and after.rank not in self.kept:
            return
        kind = self.payload[before.rank].kind
        if before.step not in journey.held:  # on a rank that is not planned
            whole = Rows(0, self.visibility.layout.rows(journey.home))
            journey.held[before.step] = self.builder.value(before.rank, kind, whole)
        stays = self.ring.keeps_last and not self.backward and after.step == self.ring.size - 1
        arrived = self.operands.kv_last[after.rank] if stays else self.builder.value(after.rank, kind, rows)
        self.builder.message(*when, journey.held[before.step], arrived, rows)
        journey.held[after.step] = arrived

    # ---- tiles --------------------------------------------------------------------------------------------------

    def _compute(self, journey: _Journey) -> None:
        """Tiles of all visits, and in backward the gradient sums that they add to."""
        gathered: dict[int, Rows] = {}  # by cycle
        for visit in journey.visits:
            if visit.rows is None:
                continue
            stays = visit.is_home and (self.reversed or not self.ring.own_gradient_travels)
            if self.backward and not stays:
                gathered[visit.cycle] = journey.summed[visit.step] = visit.rows.hull(gathered.get(visit.cycle))
            if visit.rank in self.kept:
                self._compute_visit(journey, visit)

    def _compute_visit(self, journey: _Journey, visit: _Visit) -> None:
        travelling = None
        if visit.step in journey.summed:
            travelling = self._sum(journey, visit)
            self.builder.op(visit.step, "pre", visit.rank, LocalOp("init", travelling.view()))
        pair = (visit.rank, journey.home) if self.circulates == "kv" else (journey.home, visit.rank)
        now: Sequence[Band] = bands_between(self.visibility, *pair, self.kept)
        if visit.is_home and self.tail:
            now, last = halves(now)
            for band in last:
                self._tile(visit._replace(step=self.ring.size), band, journey.held[visit.step], None)
        for band in now:
            self._tile(visit, band, journey.held[visit.step], travelling)

    def _sum(self, journey: _Journey, visit: _Visit) -> Value:
        """The gradient sum that a visit adds to."""
        if visit.step not in journey.sums:
            journey.sums[visit.step] = self.builder.value(visit.rank, self.gradient_kind, journey.summed[visit.step])
        return journey.sums[visit.step]

    def _tile(self, visit: _Visit, band: Band, payload: Value, travelling: Value | None) -> None:
        rank = visit.rank
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
        self.builder.tile(visit.step, rank, tile)

    # ---- gradients ----------------------------------------------------------------------------------------------

    def _return_gradients(self, journey: _Journey) -> None:
        target = (self.kv_sums if self.circulates == "kv" else self.sums)[journey.home]
        home_cycle = self.ring.outer - 1 if self.reversed else 0
        deadline = self.ring.size - (self.tail > 1)
        arrivals: defaultdict[int, list[tuple[int, int, Value]]] = defaultdict(list)  # relay -> (post, wait, tail)
        for cycle, chain in _by_cycle(v for v in journey.visits if v.step in journey.summed).items():
            self._sum_along(journey, chain)
            last = chain[-1]
            post = last.step + 1
            tail = self._sum(journey, last)
            if cycle == home_cycle:
                self._send_home(post, tail, target)
            else:
                wait = max(post, min(post + self.ring.inner - 1, deadline))
                arrivals[self._rank(journey.home, home_cycle, last.inner_step)].append((post, wait, tail))
        for relay, tails in arrivals.items():
            self._gather(relay, tails, target)

    def _sum_along(self, journey: _Journey, chain: list[_Visit]) -> None:
        """Add each visit's sum to the next one's, one step late so that the hop hides behind the tile."""
        for before, after in pairwise(chain):
            if before.rank in self.kept or after.rank in self.kept:
                source, target = self._sum(journey, before), self._sum(journey, after)
                self._add(
                    after.step, target, self._hop(after.step, after.step, Channel.GRADIENT_INNER, source, after.rank)
                )

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


def _by_cycle(visits: Iterable[_Visit]) -> dict[int, list[_Visit]]:
    """Visits of every cycle that has some, in order."""
    cycles: defaultdict[int, list[_Visit]] = defaultdict(list)
    for visit in visits:
        cycles[visit.cycle].append(visit)
    return dict(sorted(cycles.items()))


def _from_here_on(rows: list[Rows | None]) -> Iterator[Rows]:
    """For every entry the hull of it and all behind it; the last one is not None."""
    needed: list[Rows] = []
    for item in reversed(rows):
        assert item is not None
        needed.append(item.hull(needed[-1] if needed else None))
    return reversed(needed)
