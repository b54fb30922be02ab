"""Ring attention in one or two levels: flat ring, striped ring, topology-aware double ring, kv or q circulation.

`outer` rings of `inner` ranks: rank = n * inner + l. With direction d = -1 (towards lower ranks; causal zigzag then
moves up to a quarter fewer bytes than with +1) block (m, k) is visited at cycle o and inner step i by rank (m + d*o,
k + d*i), at step o * inner + i:

    inner=3, outer=2, block of rank (0,0), d=+1     step 0     1     2     3     4     5
                                                    (0,0) (0,1) (0,2) (1,0) (1,1) (1,2)

Payload (K,V, or Q,dO,lse,scale): inner hops one step before their reader, hidden behind a tile; the block with which a
cycle starts goes to the next ring at the cycle's first step and has the whole cycle to arrive.
Gradients (dK,dV or dQ) of visited blocks are summed along each cycle, one step behind the payload, on channels of
their own. The home node's sum returns inside the ring; every other cycle's sum makes one outer hop to the home node's
rank of the same index (the relay), where sums gather before one last inner hop. The home tile's own gradient never
travels. Hops per block: payload outer*(inner-1) + outer-1; gradients the same + 1 inner (2 levels), or inner-1 (one
level).

Only rows that somebody needs are sent, and only visits with something to compute are made.
Sources: Liu et al. 2023 (Ring Attention), Brandon et al. 2023 (striped), Gu et al. 2024 (LoongTrain's double ring),
Sun et al. 2024 (BurstAttention: circulating Q in backward).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from engine.attention.allocate import Lane, PlanBuilder, Rows, Value
from engine.attention.mask import Band, Visibility
from engine.attention.plan import AttentionPlan, Channel, Kind, LocalOp, Tile

Circulates = Literal["kv", "q"]


@dataclass(frozen=True)
class Ring:
    """Shape and habits of the circulation.

    inner, outer           ranks per ring, number of rings
    direction              +1 towards higher ranks, -1 towards lower ones
    narrow_gradients       gradients travel in the wire's dtype instead of fp32 (sums are fp32 all the same)
    whole_blocks           send whole blocks to everybody, needed or not (the published schedules; for comparison)
    own_gradient_travels   the home tile's gradient takes part in the circulation (the published schedules)
    """

    inner: int
    outer: int = 1
    direction: Literal[-1, 1] = -1
    narrow_gradients: bool = False
    whole_blocks: bool = False
    own_gradient_travels: bool = False

    @property
    def size(self) -> int:
        """Number of ranks, and of steps that have tiles."""
        return self.inner * self.outer

    def visitor(self, home: int, cycle: int, index: int) -> int:
        """Rank that works on the block of `home` at inner step `index` of `cycle`."""
        node, local = divmod(home, self.inner)
        node = (node + self.direction * cycle) % self.outer
        return node * self.inner + (local + self.direction * index) % self.inner


def preferred_direction(circulates: Circulates, outer: int, *, backward: bool) -> Literal[-1, 1]:
    """Direction that moves fewer bytes under causal zigzag (any other layout: equal).

    Downwards the payload shrinks early; upwards the gradients of a flat kv ring stay half as long for longer.
    """
    return 1 if backward and circulates == "kv" and outer == 1 else -1


@dataclass(frozen=True)
class _Visit:
    """One block at one rank at one step; `rows` of the block are needed there."""

    cycle: int
    index: int
    rank: int
    step: int
    bands: tuple[Band, ...]
    rows: Rows | None

    @property
    def is_home(self) -> bool:
        return self.cycle == 0 and self.index == 0


def plan_forward(visibility: Visibility, ring: Ring, only: Collection[int] | None = None) -> AttentionPlan:
    """Forward plan: K,V circulate, (out, lse) stay. Pins q, kv, acc on every rank of `only` (None: all)."""
    builder = PlanBuilder("forward", ring.size, only)
    circulate(visibility, ring, "kv", builder, _pinned_operands(visibility, builder))
    return builder.build()


def plan_backward(
    visibility: Visibility, ring: Ring, circulates: Circulates, only: Collection[int] | None = None
) -> AttentionPlan:
    """Backward plan. Pins qx, kv, dq, dkv on every rank of `only` (None: all).

    kv: K,V and dK,dV circulate; q: Q, dO, lse, scale and dQ circulate while K,V,dK,dV stay.
    """
    builder = PlanBuilder("backward", ring.size, only)
    circulate(visibility, ring, circulates, builder, _pinned_operands(visibility, builder))
    return builder.build()


@dataclass(frozen=True)
class Operands:
    """What a circulation works on, one value per ring rank: query (Q; backward QX), kv, sums (ACC; backward DQ) and in
    backward kv_sums (DKV). It initialises the sums.
    """

    query: list[Value]
    kv: list[Value]
    sums: list[Value]
    kv_sums: list[Value]


def circulate(
    visibility: Visibility, ring: Ring, circulates: Circulates, builder: PlanBuilder | Lane, operands: Operands
) -> None:
    """Emit one pass of attention over a ring into the builder; its `direction` says which pass."""
    _Circulation(visibility, ring, circulates, builder, operands).emit()


def _pinned_operands(visibility: Visibility, builder: PlanBuilder) -> Operands:
    layout = visibility.layout

    def pinned(kind: Kind) -> list[Value]:
        return [builder.value(r, kind, Rows(0, layout.rows(r)), pin=kind.value) for r in range(layout.size)]

    if builder.direction == "forward":
        return Operands(pinned(Kind.Q), pinned(Kind.KV), pinned(Kind.ACC), [])
    return Operands(pinned(Kind.QX), pinned(Kind.KV), pinned(Kind.DQ), pinned(Kind.DKV))


class _Circulation:
    """Emits one pass; all methods write into the builder."""

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
        self.backward = builder.direction == "backward"
        self.query, self.kv = operands.query, operands.kv
        self.sums, self.kv_sums = operands.sums, operands.kv_sums
        self.payload = self.kv if circulates == "kv" else self.query
        self.gradient_kind = Kind.DKV if circulates == "kv" else Kind.DQ
        narrow = {Kind.DKV: Kind.DKV_WIRE, Kind.DQ: Kind.DQ_WIRE}
        self.wire_kind = narrow[self.gradient_kind] if ring.narrow_gradients else self.gradient_kind

    def emit(self) -> None:
        """Emit every block's journey."""
        for accumulators in (self.sums, self.kv_sums):
            for value in accumulators:
                if value.rows.stop:
                    self.builder.op(0, "pre", value.rank, LocalOp("init", value.view()))
        for home in range(self.ring.size):
            visits = self._visits(home)
            held = self._send_payload(home, visits)
            sums = self._compute(home, visits, held)
            if self.backward:
                self._return_gradients(home, visits, sums)

    def _visits(self, home: int) -> list[_Visit]:
        visits = []
        for step in range(self.ring.size):
            cycle, index = divmod(step, self.ring.inner)
            rank = self.ring.visitor(home, cycle, index)
            pair = (rank, home) if self.circulates == "kv" else (home, rank)
            bands = self.visibility.bands(*pair)
            visits.append(_Visit(cycle, index, rank, step, bands, self._needed_rows(home, bands)))
        return visits

    def _needed_rows(self, home: int, bands: tuple[Band, ...]) -> Rows | None:
        if self.ring.whole_blocks:
            return Rows(0, self.visibility.layout.rows(home)) if self.visibility.layout.rows(home) else None
        return _hull(self._payload_rows(band) for band in bands)

    def _payload_rows(self, band: Band) -> Rows:
        return Rows(band.k_start, band.k_stop) if self.circulates == "kv" else Rows(band.q_start, band.q_stop)

    # ---- payload ------------------------------------------------------------------------------------------------

    def _send_payload(self, home: int, visits: list[_Visit]) -> dict[int, Value]:
        """Messages that bring the block to all who need it; value held at each step that computes."""
        held = {0: self.payload[home]}
        entry, entry_cycle = self.payload[home], 0
        for cycle in range(self.ring.outer):
            readers = [v for v in visits if v.cycle == cycle and v.rows and not v.is_home]
            later = _hull(v.rows for v in visits if v.cycle >= cycle and v.rows and not v.is_home)
            if not readers or later is None:
                continue
            if cycle > entry_cycle:
                post = (cycle - 1) * self.ring.inner
                wait = cycle * self.ring.inner - 1
                arrived = self.builder.value(self.ring.visitor(home, cycle, 0), entry.kind, later)
                self.builder.message(post, wait, Channel.PAYLOAD_OUTER, entry, arrived, later)
                entry, entry_cycle = arrived, cycle
                held[cycle * self.ring.inner] = arrived
            self._send_inside(entry, [v for v in readers if v.index > 0], held)
        return held

    def _send_inside(self, entry: Value, readers: list[_Visit], held: dict[int, Value]) -> None:
        needed: list[Rows] = []  # by the reader and all behind it, last reader first
        for reader in reversed(readers):
            assert reader.rows is not None
            needed.append(reader.rows.hull(needed[-1] if needed else None))
        holder = entry
        for reader, rows in zip(readers, reversed(needed), strict=True):
            arrived = self.builder.value(reader.rank, entry.kind, rows)
            self.builder.message(reader.step - 1, reader.step - 1, Channel.PAYLOAD_INNER, holder, arrived, rows)
            held[reader.step] = holder = arrived

    # ---- tiles --------------------------------------------------------------------------------------------------

    def _compute(self, home: int, visits: list[_Visit], held: dict[int, Value]) -> dict[int, Value]:
        """Tiles of all visits; the gradient sum that each visit contributes to, by step (backward only)."""
        sums: dict[int, Value] = {}
        gathered: Rows | None = None
        for visit in visits:
            if visit.index == 0:
                gathered = None
            if visit.rows is None:
                continue
            stays = visit.is_home and not self.ring.own_gradient_travels
            if self.backward and not stays:
                gathered = visit.rows.hull(gathered)
                sums[visit.step] = self.builder.value(visit.rank, self.gradient_kind, gathered)
                self.builder.op(visit.step, "pre", visit.rank, LocalOp("init", sums[visit.step].view()))
            if visit.rank in self.builder.ranks:
                for band in visit.bands:
                    self._tile(visit, band, held[visit.step], sums.get(visit.step))
        return sums

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

    def _return_gradients(self, home: int, visits: list[_Visit], sums: dict[int, Value]) -> None:
        target = (self.kv_sums if self.circulates == "kv" else self.sums)[home]
        arrivals: defaultdict[int, list[tuple[int, int, Value]]] = defaultdict(list)  # relay -> (post, wait, tail)
        for cycle in range(self.ring.outer):
            chain = [v for v in visits if v.cycle == cycle and v.step in sums]
            if not chain:
                continue
            self._sum_along(chain, sums)
            last = chain[-1]
            tail = sums[last.step]
            if cycle == 0:
                self._send_home(last.step + 1, Channel.GRADIENT_INNER, tail, target)
            else:
                post = last.step + 1
                wait = max(post, min(post + self.ring.inner - 1, self.ring.size))
                arrivals[self.ring.visitor(home, 0, last.index)].append((post, wait, tail))
        for relay, tails in arrivals.items():
            self._gather(relay, tails, target)

    def _sum_along(self, chain: list[_Visit], sums: dict[int, Value]) -> None:
        """Add each visit's sum to the next one's, one step late so that the hop hides behind the tile."""
        for before, after in pairwise(chain):
            received = self._hop(after.step, after.step, Channel.GRADIENT_INNER, sums[before.step], after.rank)
            self._add(after.step, sums[after.step], received)

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
            rows = _hull(tail.rows for _, _, tail in tails)
            assert rows is not None
            total = self.builder.value(relay, self.gradient_kind, rows)
            self.builder.op(tails[0][1], "after", relay, LocalOp("init", total.view()))
            for post, wait, tail in tails:
                self._add(wait, total, self._hop(post, wait, Channel.GRADIENT_OUTER, tail, relay))
            done = max(wait for _, wait, _ in tails)
        self._send_home(done + 1, Channel.GRADIENT_INNER, total, target)

    def _send_home(self, step: int, channel: Channel, total: Value, target: Value) -> None:
        if total.rank == target.rank:  # a ring of one rank whose own gradient was asked to travel
            self._add(step, target, total)
            return
        self._add(step, target, self._hop(step, step, channel, total, target.rank))

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


def _hull(rows: Iterable[Rows | None]) -> Rows | None:
    total: Rows | None = None
    for item in rows:
        total = item.hull(total) if item else total
    return total
