"""One pass of attention: whole blocks or chunks of them, alone or around a ring, with or without a head exchange.

What travels around the ring (keys, or in backward queries) is the outer loop: each of its chunks makes one trip. What
rests meets it there, chunk by chunk. Without a chunk pipeline a block is one chunk. Tiles meet one chunk of queries
with one chunk of keys:

    forward, ring of one     q0k0 | q1k1 q1k0 | q2k0 q2k1 q2k2 | ...      out of a chunk is final at its last tile
    backward, ring of one    q0k0 q1k0 q2k0 | q2k1 q1k1 | q2k2            dK,dV of a chunk too, dQ is added to in turn
    ring of more             keys in the outer loop both ways: chunk j of every member makes one trip around the ring

Turning around at the end of a row meets the chunks that are still there. First the whole order of tiles is found, then
transfers are placed (`engine.planning.schedule.block`): with chunk_store=host tensors of full length lie in host
memory, and the device holds a few chunks of each. With head parallelism every chunk is exchanged by itself, `prefetch`
tiles before its first use, and results go home chunk by chunk, so no buffer on the device grows with the sequence.
Sources: Yao et al. 2024 (FPDT); turning around, value forwarding and the combination with rings are this planner's.

Pins, with a head exchange (ring_..., qx, saved: part of the heads, whole block; the others: all heads, own piece):

    forward    q, kv -> ring_q, ring_kv, saved, out       backward    dout, qx, ring_kv, saved -> dq, dkv

without one:

    forward    q, kv -> saved; of whole blocks acc        backward    qx, kv -> dq, dkv; of whole blocks dkv is fp32

kv_last takes the place of (ring_)kv in backward where the method `keeps_last`, and is left by forward then. A forward
pass run again (`asking`) has only the rows that ask in acc, and `saved` is an input too: the rows that do not ask are
there, the others are written. Forward keeps ring_q, ring_kv and saved for backward, so that only dout and the gradients
are exchanged then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.planning.methods.blocks import Blocks
from engine.planning.methods.presets import AttentionMethod
from engine.planning.schedule.allocate import PlanBuilder, Rows, Span, Value
from engine.planning.schedule.block import Block, Held, Residency, Values, residencies
from engine.planning.schedule.plan import AttentionPlan, Kind, OpName
from engine.planning.schedule.ring import (
    Circulation,
    Journey,
    Place,
    Trip,
    keeps_last,
    last_home,
    route_of,
    travels,
)
from engine.planning.sequence.mask import Band, halves
from engine.planning.sequence.visibility import Flags, RowTable, Visibility


def plan_blocks(
    visibility: Visibility,
    method: AttentionMethod,
    blocks: Blocks,
    builder: PlanBuilder,
    asking: Sequence[int] | None = None,
) -> AttentionPlan:
    """The plan of the builder's direction; `visibility` of the blocks of rings.

    asking   a forward pass run again: how many first rows of each ring member's block ask; out and lse of the others
             were kept
    """
    work = _Forward if builder.direction == "forward" else _Backward
    work(visibility, method, blocks, builder, asking).emit()
    return builder.build()


_Uses = list[tuple[int, int]]  # (step, chunk)


class _Visit(NamedTuple):
    """Tiles of one resting chunk of a ring member at one step, against what travels, for one part of the heads."""

    step: int
    member: int
    chunk: int
    head: int
    bands: list[Band]
    payload: Value
    sums: Value | None  # that travel


class _Pass:
    """What both passes share: which chunks see each other, trips around the ring, and tiles."""

    def __init__(
        self,
        visibility: Visibility,
        method: AttentionMethod,
        blocks: Blocks,
        builder: PlanBuilder,
        asking: Sequence[int] | None,
    ) -> None:
        self.method, self.blocks, self.builder = method, blocks, builder
        self.chunks, self.is_whole = blocks.chunks, method.chunk_tokens is None
        # Steps from one tile to the next: what is not prefetched is fetched in a step without tiles.
        self.pace = 1 if method.prefetch_chunks else 2
        self.route = route_of(method, builder.direction)
        self.keys_travel = travels(method, builder.direction) == "kv"
        self.keeps_last = keeps_last(method)
        self.members = {
            member: Block(method, blocks, builder, member, asking[member] if asking else None)
            for member in sorted({blocks.grid.place(rank)[0] for rank in builder.kept})
        }
        # Sums of whole blocks are then what the pass is asked for.
        self.in_place = self.is_whole and blocks.grid.heads == 1
        self.mask, self.fine = visibility.mask, visibility.of_chunks(self.chunks)
        self.visits: list[_Visit] = []
        self.last_step = 0

    @cached_property
    def needed(self) -> RowTable:
        """Rows of keys [query chunk, home, key chunk, member] that chunks see."""
        return self._needed(self.fine)

    @cached_property
    def sees(self) -> Flags:
        """Which chunks see any."""
        return self.needed.exists

    def _needed(self, fine: Visibility) -> RowTable:
        """Rows of keys [query chunk, home, key chunk, member], counted in the chunk; of a whole block of what planned
        members see, and by whom they are seen, alone.
        """
        every = self.members if self.is_whole else range(fine.layout.size)
        table = fine.needed("kv", blocks=every, readers=self.members if self.is_whole else ())
        shape = (self.route.size, self.chunks) * 2
        return RowTable(*(np.moveaxis(rows.reshape(shape), 3, 0).copy() for rows in table))

    @cached_property
    def seen_ever(self) -> Flags:
        """As `sees`, by all queries of the mask, even if only some ask now."""
        if self.mask.query_stop is None:
            return self.sees
        return self._needed(Visibility(self.mask.all_queries(), self.fine.layout)).exists

    def bands(self, member: int, resting: int, home: int, travelling: int) -> list[Band]:
        """What a resting and a travelling chunk see of each other, in rows of their blocks."""
        query, key = (member, resting), (home, travelling)
        if not self.keys_travel:
            query, key = key, query
        q, k = (self.blocks.piece(*of).start for of in (query, key))
        numbers = [block * self.chunks + chunk for block, chunk in (query, key)]
        found = self.fine.bands(*numbers, of="q" if self.keys_travel else "kv")
        return [Band(b.q_start + q, b.q_stop + q, b.k_start + k, b.k_stop + k, b.low, b.high) for b in found]

    def uses(self, member: int) -> _Uses:
        """(step, chunk) of what rests at a member, steps ascending."""
        return sorted({(visit.step, visit.chunk) for visit in self.visits if visit.member == member})

    def all_uses(self, member: int, kind: Kind) -> _Uses:
        """As `uses`; chunks that see nothing are named once, after all others, because their sums are zero."""
        uses, block = self.uses(member), self.members[member]
        seen = {chunk for _, chunk in uses}
        rest = [c for c in range(self.chunks) if c not in seen and _has_rows(block.rows_of(kind, block.rows[c]))]
        return [*uses, *((self.last_step + self.pace * n, c) for n, c in enumerate(rest, 1))]

    def tiles(self, member: int, operand: Held, sums: Held) -> None:
        """Tiles of all visits, over the residencies of what rests."""
        own_visits = (visit for visit in self.visits if visit.member == member)
        for step, _, chunk, head, bands, payload, travelling in own_visits:
            rests, own = operand.at(chunk, step)[head], sums.at(chunk, step)[head]
            for band in bands:
                if self.keys_travel:
                    self.builder.tile(step, band, rests, payload, own, travelling)
                else:
                    assert travelling is not None
                    self.builder.tile(step, band, payload, rests, travelling, own)

    # ---- trips --------------------------------------------------------------------------------------------------

    def trips(self) -> Iterator[tuple[int, list[Span]]]:
        """(travelling chunk, steps of its stops on the way around the ring), one after the other; no message."""
        start = 0
        for chunk, counts in enumerate(self._tiles_at_stops()):
            spans = []
            for count in counts:
                steps = self.pace * max(1, count)
                spans.append(Span(start, start + steps - 1))
                start += steps
            yield chunk, spans

    def _tiles_at_stops(self) -> list[list[int]]:
        """[chunk][stop]: of the member that has most of them."""
        if self.is_whole:
            return [[1] * self.route.size]
        homes, stops = np.ogrid[: self.route.size, : self.route.size]
        visitors = self.route.visitor(homes, *np.divmod(stops, self.route.inner))
        counts = np.take_along_axis(self.sees.sum(axis=0), visitors[:, None], axis=2).max(axis=0)
        found: list[list[int]] = counts.tolist()
        return found

    def stay_of_sums(self, chunk: int, spans: list[Span]) -> Residency:
        """Steps of a travelling chunk's sum at home: what the last stops add comes a hop later, or two over a relay;
        reversed it comes along with the block.
        """
        straight = not self.is_whole or self.method.kv_transport == "all_gather"
        levels = (self.route.inner > 1) + (self.route.outer > 1)
        hops = 0 if self.keeps_last else min(1, levels) if straight else levels
        return Residency(chunk, spans[0].post, spans[-1].wait + hops)

    def travel(
        self,
        chunk: int,
        spans: list[Span],
        payload: dict[int, Values],
        sums: dict[int, Values],
        kv_last: dict[int, Values],
    ) -> None:
        """One trip of a chunk of every member, of which the planned ones are given."""
        end = spans[-1].wait
        spans = [*spans, Span(end + 1, end + 1), Span(end + 2, end + 2)]
        for head in sorted({self.blocks.grid.place(rank)[1] for rank in self.builder.kept}):
            given = ({member: values[head] for member, values in of.items()} for of in (payload, sums, kv_last))
            _Visits(self, Trip(head, chunk, spans, *given)).travel()

    def last_keys(self, member: int) -> Values:
        """K,V of the block that a ring member holds last, for a reversed backward."""
        rows = self.blocks.ring.row_counts[last_home(self.method, member)]
        return self.members[member].whole(Kind.KV, "kv_last", rows)


class _Visits(Circulation):
    """A trip, at whose stops a pass has visits."""

    def __init__(self, work: _Pass, trip: Trip) -> None:
        self.work = work
        super().__init__(work.method, work.mask, work.builder, trip)

    def rows_needed(self, blocks: Collection[int], readers: Collection[int], *, ever: bool = False) -> RowTable:
        """As a circulation is told: of whole blocks what it asks for, of chunks of keys all."""
        work = self.work
        if work.is_whole:
            seen = Visibility(work.mask.all_queries(), work.fine.layout) if ever else work.fine
            return seen.needed("kv" if work.keys_travel else "q", blocks=blocks, readers=readers)
        hull = RowTable(*(rows[:, :, self.chunk] for rows in work.needed)).hull(axis=0)
        first = np.array([work.blocks.piece(home, self.chunk).start for home in range(self.route.size)])[:, None]
        return RowTable(hull.start + first, hull.stop + first).where(hull.exists)

    def compute(self, journey: Journey, place: Place) -> None:
        """Visits of the resting chunks that see what travels, in turn from either end."""
        work, home, member = self.work, journey.home, int(self.rank[journey.home, *place])
        sums = self.travelling_sum(journey, place) or self.home_sums.get(home)
        seers = [0] if work.is_whole else np.flatnonzero(work.sees[:, home, self.chunk, member]).tolist()
        step = self.spans[self.step[place]].post
        for resting in seers[::-1] if self.chunk % 2 else seers:
            parts = [work.bands(member, resting, home, self.chunk)]
            if self.tail and member == home:
                parts = list(halves(parts[0]))
            for bands, at in zip(parts, (step, self.spans[self.route.size].post), strict=False):
                if bands:
                    work.visits.append(_Visit(at, member, resting, self.head, bands, journey.held[place], sums))
            step += work.pace


class _Forward(_Pass):
    """Forward: (out, lse) of a query chunk accumulate, for a ring of one without ever leaving the device."""

    def emit(self) -> None:
        """Emit everything."""
        (self._stream_keys if self.route.size == 1 and not self.is_whole else self._send_keys)()
        for member, block in self.members.items():
            queries_pass, _, kept = self._passing(member)
            uses = sorted([*self.uses(member), *queries_pass])
            queries = self._read(block, residencies(uses, block.lead), Kind.Q, "q")
            stays = residencies(self.all_uses(member, Kind.ACC), block.lead)
            if self.in_place:
                sums = block.sum(stays, block.whole(Kind.ACC, "acc"))
            else:
                saved = block.whole(Kind.SAVED, "saved")
                if block.exchanged:
                    block.homes(Kind.OUT, "out")  # of a block without rows, too
                sums = block.sum(stays, block.whole(Kind.ACC), partial(self._finish, block, saved))
                for step, chunk in kept:
                    self._send_home(block, block.load(step, saved, Kind.SAVED, chunk), chunk, step)
            self.tiles(member, queries, sums)

    def _passing(self, member: int) -> tuple[_Uses, _Uses, _Uses]:
        """What a pass run again only exchanges: queries and keys that backward will work on, and chunks of which out
        was kept in all rows.
        """
        block = self.members[member]
        if self.mask.query_stop is None or not block.exchanged:
            return [], [], []
        ever, now = self.seen_ever, self.sees
        queries = ever[..., member].any(axis=(1, 2)) & ~now[..., member].any(axis=(1, 2))
        keys = ever[:, member].any(axis=(0, 2)) & ~now[:, member].any(axis=(0, 2))
        kept = [_has_rows(rows) and not _has_rows(block.rows_of(Kind.ACC, rows)) for rows in block.rows]
        return self._turns(queries, 0), [] if self.is_whole else self._turns(keys, 1), self._turns(kept, 2)

    def _turns(self, chosen: npt.ArrayLike, third: int) -> _Uses:
        """The chosen chunks, spread over the steps that have tiles, with three kinds of them in turn; one after another
        where they are too many.
        """
        chunks = np.flatnonzero(chosen).tolist()
        gap = max(1, self.last_step // self.pace // (len(chunks) + 1))  # in tiles
        return [(self.pace * (gap * turn + gap * third // 3), chunk) for turn, chunk in enumerate(chunks, 1)]

    def _stream_keys(self) -> None:
        """Queries in the outer loop: every row of chunks is walked to its end."""
        rows: list[list[tuple[int, int]]] = [[] for _ in range(self.chunks)]
        for i, j in np.argwhere(self.sees[:, 0, :, 0]).tolist():
            rows[i].append((i, j))
        order = [pair for i, row in enumerate(rows) for pair in (row[::-1] if i % 2 else row)]
        steps = {pair: self.pace * n for n, pair in enumerate(order)}
        self.last_step = max(steps.values(), default=0)
        uses = [(step, j) for (_, j), step in steps.items()]
        uses += self._passing(0)[1]
        block = self.members[0]
        keys = self._read(block, residencies(sorted(uses), block.lead), Kind.KV, "kv")
        for (i, j), step in steps.items():
            bands = self.bands(0, i, 0, j)
            for head in block.planned_heads:
                self.visits.append(_Visit(step, 0, i, head, bands, keys.at(j, step)[head], None))

    def _send_keys(self) -> None:
        """Keys in the outer loop, each chunk once around the ring."""
        last = {member: self.last_keys(member) for member in self.members if self.keeps_last}
        for chunk, spans in self.trips():
            stay = Residency(chunk, spans[0].post, spans[-1].wait)
            keys = {
                home: self._read(block, [stay], Kind.KV, "kv").at(chunk, stay.first)
                for home, block in self.members.items()
                if self.is_whole or self.sees[:, home, chunk].any()
            }
            self.travel(chunk, spans, keys, {}, last)
            self.last_step = stay.last
        for home, block in self.members.items():
            passing = self._passing(home)[1]
            self._read(block, (Residency(chunk, step, step) for step, chunk in passing), Kind.KV, "kv")

    def _read(self, block: Block, planned: Iterable[Residency], kind: Kind, pin: str) -> Held:
        """Chunks of an input, which get there by an exchange if there is one."""
        if not block.exchanged:
            return block.read(planned, block.whole(kind, pin))
        homes = block.homes(kind, pin)

        def arrive(chunk: int, step: int, values: Values) -> None:
            block.gather(chunk, step, homes, values)

        left = not (self.keeps_last and kind == Kind.KV)  # for backward
        return block.read(planned, block.whole(kind, f"ring_{pin}" if left else None), arrive)

    def _finish(self, block: Block, saved: Values, chunk: int, step: int, acc: Values) -> None:
        """(out, lse) of a chunk are complete: save them, and send out home."""
        self._send_home(block, block.put(step + 1, acc, saved, chunk), chunk, step + 1)

    @staticmethod
    def _send_home(block: Block, done: Values, chunk: int, step: int) -> None:
        """Send out of a chunk, all rows, home from `step` on, if that takes an exchange."""
        if block.exchanged:
            block.send_home(step, Kind.OUT, done, block.homes(Kind.OUT, "out"), chunk)


class _Backward(_Pass):
    """Backward: gradients of what travels accumulate through one trip, those of what rests are added to in turn."""

    def emit(self) -> None:
        """Emit everything."""
        travelling, resting = (self._keys, self._key_sums), (self._queries, self._query_sums)
        resting_kind = Kind.DQ
        if not self.keys_travel:
            travelling, resting, resting_kind = resting, travelling, Kind.DKV
        for chunk, spans in self.trips():
            stay, stay_of_sums = Residency(chunk, spans[0].post, spans[-1].wait), self.stay_of_sums(chunk, spans)
            payload, sums = dict[int, Values](), dict[int, Values]()
            for home, block in self.members.items():
                if _has_rows(block.rows[chunk]) or self.is_whole:
                    sums[home] = travelling[1](block, [stay_of_sums]).at(chunk, stay.first)
                    if self.is_whole or self.sees[:, home, chunk].any():
                        payload[home] = travelling[0](block, [stay]).at(chunk, stay.first)
            self.travel(chunk, spans, payload, sums, {})
            self.last_step = stay_of_sums.last
        for member, block in self.members.items():
            travelling[1](block, [])  # the output of a block without rows, too
            operand = resting[0](block, residencies(self.uses(member), block.lead))
            uses = self.all_uses(member, resting_kind)
            self.tiles(member, operand, resting[1](block, residencies(uses, block.lead)))

    def _keys(self, block: Block, planned: Iterable[Residency]) -> Held:
        if self.keeps_last:
            return block.read(planned, self.last_keys(block.member))
        return block.read(planned, block.whole(Kind.KV, "ring_kv" if block.exchanged else "kv"))

    def _key_sums(self, block: Block, planned: Iterable[Residency]) -> Held:
        if self.in_place:
            return block.sum(planned, block.whole(Kind.DKV, "dkv"))
        # Complete ones arrive cast, partial ones of replicated heads are summed in fp32.
        kind = wire = Kind.DKV_CAST
        op: OpName = "copy"
        if self.method.kv_replicated:
            kind, op = Kind.DKV, "add"
            wire = Kind.DKV if self.method.gradient_wire_dtype == "float32" else Kind.DKV_WIRE
        whole = block.homes(kind, "dkv") if block.exchanged else block.whole(kind, "dkv")

        def finish(chunk: int, step: int, sums: Values) -> None:
            if block.exchanged:
                block.send_home(step + 1, wire, sums, whole, chunk, op)
            else:
                block.put(step + 1, sums, whole, chunk)

        return block.sum(planned, block.whole(Kind.DKV), finish)

    def _queries(self, block: Block, planned: Iterable[Residency]) -> Held:
        """Q, dO, lse and scale or out; after a head exchange dO comes chunk by chunk, and a scale follows from it."""
        kind = Kind.QX if block.host or not self.keys_travel else Kind.QO  # `out` does not come along
        whole = block.whole(kind, "qx")
        if not block.exchanged:
            return block.read(planned, whole)
        homes, saved = block.homes(Kind.DOUT, "dout"), block.whole(Kind.SAVED, "saved")

        def arrive(chunk: int, step: int, values: Values) -> None:
            if block.host:
                block.move(Span(step - block.lead, step - 1), whole, values, block.rows[chunk])
            block.gather(chunk, step, homes, values)
            if kind == Kind.QX:
                results = block.load(step, saved, Kind.SAVED, chunk)
                block.each(step, "stats", values, results, block.rows[chunk])

        return block.read(planned, whole, arrive, keep=False)

    def _query_sums(self, block: Block, planned: Iterable[Residency]) -> Held:
        if not block.exchanged:
            return block.sum(planned, block.whole(Kind.DQ, "dq"))
        homes = block.homes(Kind.DQ_CAST, "dq")

        def send(chunk: int, step: int, values: Values) -> None:
            block.send_home(step + 1, Kind.DQ_CAST, values, homes, chunk)

        return block.sum(planned, block.whole(Kind.DQ), send)


def _has_rows(rows: Rows) -> bool:
    return rows.start < rows.stop
