"""Attention in chunks: full-length tensors lie in host memory, the device holds a few chunks of each at a time.

Every ring member's block is cut into equally many chunks. Tiles meet one chunk of queries with one chunk of keys:

    forward, ring of one     q0k0 | q1k1 q1k0 | q2k0 q2k1 q2k2 | ...      out of a chunk is final at its last tile
    backward, ring of one    q0k0 q1k0 q2k0 | q2k1 q1k1 | q2k2            dK,dV of a chunk too, dQ is added to in turn
    ring of more             keys in the outer loop both ways: chunk j of every member makes one trip around the ring

Turning around at the end of a row meets the chunks that are still there. First the whole order of tiles is emitted,
then transfers are placed (`engine.planning.schedule.residency`).

With head parallelism every chunk is exchanged by itself, `prefetch` tiles before its first use, and results go home
chunk by chunk, so no buffer on the device grows with the sequence.
Sources: Yao et al. 2024 (FPDT); turning around, value forwarding and the combination with rings are this planner's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.planning.schedule.allocate import PlanBuilder, Rows, Span, Value
from engine.planning.schedule.exchange import Exchange, kv_gradient_kind, planned_groups, return_kv
from engine.planning.schedule.plan import AttentionPlan, Kind
from engine.planning.schedule.residency import Arrive, Block, Finish, Held, Residency, residencies
from engine.planning.schedule.ring import Circulation, Journey, Lane, Operands, Place, Route, lanes, of_heads
from engine.planning.sequence.mask import Band
from engine.planning.sequence.visibility import Flags, RowTable, Visibility


def plan_chunks(visibility: Visibility, exchange: Exchange, builder: PlanBuilder) -> AttentionPlan:
    """The plan of the builder's direction.

    forward    pins q, kv, saved; with head parallelism also out, ring_q, ring_kv. Run again (`exchange.asking`),
               `saved` is an input too: the rows that do not ask are there, the others are written
    backward   pins qx (whole), kv, dq, dkv; with head parallelism qx (q), ring_kv, saved, dout, dq, dkv
    """
    work = _Forward if builder.direction == "forward" else _Backward
    work(visibility, exchange, builder).emit()
    return builder.build()


def _has_rows(rows: Rows) -> bool:
    return rows.start < rows.stop


def _chunks(chosen: npt.ArrayLike) -> set[int]:
    return set(np.flatnonzero(chosen).tolist())


class _Visit(NamedTuple):
    """Tiles of one query chunk of a ring member at one step, against keys `kv`, for one part of the heads."""

    step: int
    member: int
    chunk: int
    head: int
    bands: list[Band]
    kv: Value
    kv_sums: Value | None


class _Work:
    """What both passes share: which chunks see each other, trips of keys around the ring, and tiles."""

    def __init__(self, visibility: Visibility, exchange: Exchange, builder: PlanBuilder) -> None:
        method = exchange.method
        self.exchange = exchange
        # Steps from one tile to the next: what is not prefetched is fetched in a step without tiles.
        self.pace = 1 if method.prefetch_chunks else 2
        self.ring = Route(method.ring_inner_size, method.ring_outer_size)
        self.builder = builder
        self.backward = builder.direction == "backward"
        self.blocks = {member: Block(group) for member, group in planned_groups(exchange, builder).items()}
        self.mask, self.fine = visibility.mask, visibility.of_chunks(exchange.chunks)
        self.needed = self._needed(self.fine)  # keys [query chunk, home, key chunk, member], counted in the chunk
        self.sees = self.needed.exists
        self.visits: list[_Visit] = []
        self.last_step = 0

    def _needed(self, fine: Visibility) -> RowTable:
        shape = (self.ring.size, self.exchange.chunks) * 2
        table = fine.needed("kv", blocks=range(fine.layout.size), readers=())
        return RowTable(*(np.moveaxis(rows.reshape(shape), 3, 0).copy() for rows in table))

    @functools.cached_property
    def seen_at_all(self) -> Flags:
        """As `sees`, by all queries of the mask, even if only some ask now."""
        if self.mask.query_stop is None:
            return self.sees
        return self._needed(Visibility(self.mask.all_queries(), self.fine.layout)).exists

    def bands(self, member: int, query: int, home: int, key: int) -> list[Band]:
        """What a query chunk of a member sees of a key chunk of `home`, in rows of their blocks."""
        q, k = self.exchange.chunk(member, query).start, self.exchange.chunk(home, key).start
        count = self.exchange.chunks
        found = self.fine.bands(member * count + query, home * count + key)
        return [Band(b.q_start + q, b.q_stop + q, b.k_start + k, b.k_stop + k, b.low, b.high) for b in found]

    def uses(self, member: int) -> list[tuple[int, int]]:
        """(step, chunk) of the queries of a member, steps ascending."""
        return sorted({(visit.step, visit.chunk) for visit in self.visits if visit.member == member})

    def all_uses(self, member: int) -> list[tuple[int, int]]:
        """As `uses`; chunks that see nothing are named once, after all others, because their sums are zero."""
        uses, block = self.uses(member), self.blocks[member]
        seen = {chunk for _, chunk in uses}
        rest = [c for c in range(block.count) if c not in seen and _has_rows(block.asking_rows(c))]
        return [*uses, *((self.last_step + self.pace * n, c) for n, c in enumerate(rest, 1))]

    def tiles(self, member: int, queries: Held, sums: Held) -> None:
        """Tiles of all visits, over the residencies of queries and sums."""
        for visit in self.visits:
            if visit.member == member:
                q, acc = (held.at(visit.chunk, visit.step)[visit.head] for held in (queries, sums))
                for band in visit.bands:
                    self.builder.tile(visit.step, band, q, visit.kv, acc, visit.kv_sums)

    # ---- keys in the outer loop -----------------------------------------------------------------------------------

    def trips(self) -> Iterator[tuple[int, list[Span]]]:
        """(key chunk, steps of its stops on the way around the ring), one after the other; no message."""
        homes, stops = np.ogrid[: self.ring.size, : self.ring.size]
        visitors = self.ring.visitor(homes, *np.divmod(stops, self.ring.inner))
        tiles = np.take_along_axis(self.sees.sum(axis=0), visitors[:, None], axis=2).max(axis=0)  # [chunk, stop]
        start = 0
        for chunk in range(self.exchange.chunks):
            spans = []
            for count in tiles[chunk].tolist():
                steps = self.pace * max(1, count)
                spans.append(Span(start, start + steps - 1))
                start += steps
            yield chunk, spans

    def travel(self, chunk: int, spans: list[Span], kv: dict[int, list[Value]], sums: dict[int, list[Value]]) -> None:
        """One trip of a key chunk of every member, of which the planned ones are given."""
        end = spans[-1].wait + 1
        for lane in lanes(self.exchange.method, self.builder, [*spans, Span(end, end)]):
            operands = Operands({}, of_heads(kv, lane.heads.index), {}, of_heads(sums, lane.heads.index))
            _Trip(self, lane, chunk, operands).travel()


class _Trip(Circulation):
    """A key chunk of every member goes around the ring; every stop's sum goes home while the next stop computes."""

    straight = True

    def __init__(self, work: _Work, lane: Lane, chunk: int, operands: Operands) -> None:
        self.work, self.chunk = work, chunk
        super().__init__(work.fine, work.exchange.method, work.builder, lane, operands, work.ring)

    def _needed(self) -> RowTable:
        """Keys of the chunk that each stop needs."""
        work = self.work
        hull = RowTable(*(rows[:, :, self.chunk] for rows in work.needed)).hull(axis=0)
        first = np.array([work.exchange.chunk(home, self.chunk).start for home in range(self.route.size)])[:, None]
        rows = RowTable(hull.start + first, hull.stop + first).where(hull.exists)
        index = np.arange(self.route.size)[:, None, None], self.rank
        return RowTable(rows.start[index], rows.stop[index])

    def _compute(self, journey: Journey, place: Place) -> None:
        """Visits of the query chunks that see the keys, in turn from either end."""
        work, home, member = self.work, journey.home, int(self.rank[journey.home, *place])
        sums = self._started(journey, place) or self.operands.kv_sums.get(home)
        seers = np.flatnonzero(work.sees[:, home, self.chunk, member]).tolist()
        step, head = self.lane.spans[self.step[place]].post, self.lane.heads.index
        for query in seers[::-1] if self.chunk % 2 else seers:
            bands = work.bands(member, query, home, self.chunk)
            work.visits.append(_Visit(step, member, query, head, bands, journey.held[place], sums))
            step += work.pace


class _Passing(NamedTuple):
    """Chunks that a pass run again only exchanges, each set with the step at which its chunks are on the device.

    queries, keys   not worked on, but backward will be
    kept            out was kept in all rows; it goes home
    """

    queries: dict[int, int]
    keys: dict[int, int]
    kept: dict[int, int]


class _Forward(_Work):
    """Forward: (out, lse) of a query chunk accumulate, for a ring of one without ever leaving the device."""

    def emit(self) -> None:
        """Emit everything."""
        (self._stream_keys if self.ring.size == 1 else self._send_keys)()
        for member, block in self.blocks.items():
            passing = self._passing(member)
            uses = sorted([*self.uses(member), *((step, chunk) for chunk, step in passing.queries.items())])
            queries = block.read(residencies(uses, block.lead), *self._operand(block, Kind.Q, "q", "ring_q"))
            saved = block.whole(Kind.SAVED, "saved")
            out = block.group.homes(Kind.OUT, "out", block.store) if block.exchanged else None
            finish = functools.partial(self._finish, block, saved, out)
            sums = block.sum(residencies(self.all_uses(member), block.lead), block.whole(Kind.ACC), finish)
            self.tiles(member, queries, sums)
            for chunk, step in passing.kept.items():
                self._send_home(block, block.load(step, saved, Kind.SAVED, chunk), out, chunk, step)

    def _passing(self, member: int) -> _Passing:
        """What passes through the ranks of a head group, spread over the steps that have tiles."""
        block = self.blocks[member]
        if self.mask.query_stop is None or not block.exchanged:
            return _Passing({}, {}, {})
        queries = _chunks(self.seen_at_all[..., member].any(axis=(1, 2)) & ~self.sees[..., member].any(axis=(1, 2)))
        keys = _chunks(self.seen_at_all[:, member].any(axis=(0, 2)) & ~self.sees[:, member].any(axis=(0, 2)))
        every = [chunk for chunk in range(block.count) if _has_rows(block.rows(chunk))]
        kept = {chunk for chunk in every if not _has_rows(block.asking_rows(chunk))}
        passing = _Passing({}, {}, {})
        waiting = sorted(queries | keys | kept)
        tiles = self.last_step // self.pace
        gap = max(1, tiles // (len(waiting) + 1))  # in tiles; one after another where there are enough of them
        for turn, chunk in enumerate(waiting, 1):
            for index, chunks in enumerate((queries, keys, kept)):
                if chunk in chunks:
                    passing[index][chunk] = self.pace * (gap * turn + gap * index // 3)
        return passing

    def _stream_keys(self) -> None:
        """Queries in the outer loop: every row of chunks is walked to its end."""
        rows: list[list[tuple[int, int]]] = [[] for _ in range(self.exchange.chunks)]
        for i, j in np.argwhere(self.sees[:, 0, :, 0]).tolist():
            rows[i].append((i, j))
        order = [pair for i, row in enumerate(rows) for pair in (row[::-1] if i % 2 else row)]
        steps = {pair: self.pace * n for n, pair in enumerate(order)}
        self.last_step = max(steps.values(), default=0)
        uses = [(step, j) for (_, j), step in steps.items()]
        uses += [(step, j) for j, step in self._passing(0).keys.items()]
        block = self.blocks[0]
        keys = block.read(residencies(sorted(uses), block.lead), *self._operand(block, Kind.KV, "kv", "ring_kv"))
        for (i, j), step in steps.items():
            bands = self.bands(0, i, 0, j)
            for head in block.group.planned_heads:
                self.visits.append(_Visit(step, 0, i, head, bands, keys.at(j, step)[head], None))

    def _send_keys(self) -> None:
        """Keys in the outer loop, each chunk once around the ring."""
        operands = {home: self._operand(block, Kind.KV, "kv", "ring_kv") for home, block in self.blocks.items()}
        for chunk, spans in self.trips():
            stay = Residency(chunk, spans[0].post, spans[-1].wait)
            kv = {
                home: self.blocks[home].read([stay], *operand).at(chunk, stay.first)
                for home, operand in operands.items()
                if self.sees[:, home, chunk].any()
            }
            self.travel(chunk, spans, kv, {})
            self.last_step = stay.last
        for home, operand in operands.items():
            passing = self._passing(home).keys.items()
            self.blocks[home].read([Residency(chunk, step, step) for chunk, step in passing], *operand)

    def _operand(self, block: Block, kind: Kind, pin: str, ring_pin: str) -> tuple[list[Value], Arrive | None]:
        """Where an input lies, and how its chunks get there if that takes an exchange."""
        if not block.exchanged:
            return block.whole(kind, pin), None
        homes = block.group.homes(kind, pin, block.store)

        def arrive(chunk: int, step: int, values: list[Value]) -> None:
            block.gather(kind, homes, chunk, step, values)

        return block.whole(kind, ring_pin), arrive

    def _finish(
        self, block: Block, saved: list[Value], homes: list[Value] | None, chunk: int, step: int, acc: list[Value]
    ) -> None:
        """(out, lse) of a chunk are complete: save them, and send out home."""
        self._send_home(block, block.put(step + 1, acc, saved, chunk), homes, chunk, step + 1)

    def _send_home(self, block: Block, done: list[Value], homes: list[Value] | None, chunk: int, step: int) -> None:
        """Send out of a chunk, all rows, home from `step` on, if that takes an exchange."""
        if homes is not None:
            out = block.part(Kind.OUT, chunk)
            block.group.each(step, "copy", out, done)
            block.scatter(step, homes, chunk, lambda span, to: block.group.scatter(span, out, to, "copy", chunk))


class _Backward(_Work):
    """Backward: dK, dV of a chunk accumulate through one trip, dQ is added to in turn."""

    def emit(self) -> None:
        """Emit everything."""
        self._send_keys()
        for member, block in self.blocks.items():
            queries = self._queries(block, residencies(self.uses(member), block.lead))
            self.tiles(member, queries, self._query_sums(block, residencies(self.all_uses(member), block.lead)))

    def _send_keys(self) -> None:
        blocks = self.blocks
        whole = {home: block.whole(Kind.KV, "ring_kv" if block.exchanged else "kv") for home, block in blocks.items()}
        finishes = {home: self._kv_finish(block) for home, block in blocks.items()}
        for chunk, spans in self.trips():
            # The sum of the last stop comes home one step later.
            stay = Residency(chunk, spans[0].post, spans[-1].wait + (self.ring.size > 1))
            kv, sums = dict[int, list[Value]](), dict[int, list[Value]]()
            for home, block in blocks.items():
                if _has_rows(block.rows(chunk)):
                    sums[home] = block.sum([stay], block.whole(Kind.DKV), finishes[home]).at(chunk, stay.first)
                    if self.sees[:, home, chunk].any():
                        kv[home] = block.read([stay], whole[home]).at(chunk, stay.first)
            self.travel(chunk, spans, kv, sums)
            self.last_step = stay.last

    def _kv_finish(self, block: Block) -> Finish:
        if not block.exchanged:
            whole = block.whole(Kind.DKV_CAST, "dkv")
            return lambda chunk, step, sums: block.put(step + 1, sums, whole, chunk)
        homes = block.group.homes(kv_gradient_kind(self.exchange.method), "dkv", block.store)

        def finish(chunk: int, step: int, sums: list[Value]) -> None:
            block.scatter(step + 1, homes, chunk, lambda span, to: return_kv(block.group, span, sums, to, chunk))

        return finish

    def _queries(self, block: Block, planned: list[Residency]) -> Held:
        """Q, dO, lse and scale or out; after a head exchange dO comes chunk by chunk, and a scale follows from it."""
        whole = block.whole(Kind.QX if block.host else Kind.QO, "qx")  # `out` does not come along
        if not block.exchanged:
            return block.read(planned, whole)
        homes = block.group.homes(Kind.DOUT, "dout", block.store)
        saved = block.whole(Kind.SAVED, "saved")

        def arrive(chunk: int, step: int, values: list[Value]) -> None:
            if block.host:
                block.move(Span(step - block.lead, step - 1), whole, values, block.rows(chunk))
            block.gather(Kind.DOUT, homes, chunk, step, values, copied=True)
            if block.host:
                results = block.load(step, saved, Kind.SAVED, chunk)
                block.group.each(step, "stats", values, results, block.rows(chunk))

        return block.read(planned, whole, arrive, keep=False)

    def _query_sums(self, block: Block, planned: list[Residency]) -> Held:
        if not block.exchanged:
            whole = block.whole(Kind.DQ, "dq")

            def store(chunk: int, step: int, values: list[Value]) -> None:
                if block.host:
                    block.move(Span(step + 1, step + 1), values, whole, block.rows(chunk))

            return block.sum(planned, whole, store, in_place=True)
        homes = block.group.homes(Kind.DQ_CAST, "dq", block.store)

        def send(chunk: int, step: int, values: list[Value]) -> None:
            cast = block.part(Kind.DQ_CAST, chunk)
            block.group.each(step + 1, "copy", cast, values)
            block.scatter(step + 1, homes, chunk, lambda span, to: block.group.scatter(span, cast, to, "copy", chunk))

        return block.sum(planned, block.whole(Kind.DQ), send)
