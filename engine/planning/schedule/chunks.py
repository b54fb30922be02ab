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
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from engine.planning.schedule.allocate import Home, PlanBuilder, Rows, Value
from engine.planning.schedule.exchange import Exchange, HeadGroup, Span, kv_gradient_kind, return_kv
from engine.planning.schedule.plan import AttentionPlan, Channel, Kind, LocalOp
from engine.planning.schedule.residency import Arrive, Block, Chunking, Finish, Held, Residency, residencies
from engine.planning.schedule.ring import Route, clip, tile_of
from engine.planning.sequence.mask import Band
from engine.planning.sequence.visibility import Visibility


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


class _Visit(NamedTuple):
    """Tiles of one query chunk of a ring member at one step, against keys `kv` of the values given."""

    step: int
    member: int
    chunk: int
    bands: list[Band]
    kv: list[Value]
    kv_sums: list[Value]


class _Work:
    """What both passes share: the order of tiles, trips of keys around the ring, and tiles."""

    def __init__(self, visibility: Visibility, exchange: Exchange, builder: PlanBuilder) -> None:
        method = exchange.method
        self.visibility = visibility
        self.whole = Visibility(visibility.mask.all_queries(), visibility.layout)
        self.exchange = exchange
        self.chunking = Chunking(method.chunk_store, method.prefetch_chunks)
        self.ring = Route(method.ring_inner_size, method.ring_outer_size)
        self.builder = builder
        self.backward = builder.direction == "backward"
        self.blocks = [Block(HeadGroup(exchange, builder, i), self.chunking) for i in range(exchange.grid.ring_size)]
        self.visits: list[_Visit] = []
        self.last_step = 0
        self._bands: dict[tuple[int, int], dict[tuple[int, int], list[Band]]] = {}
        self._seers: dict[tuple[int, int], dict[int, list[int]]] = {}

    def bands(self, member: int, home: int) -> dict[tuple[int, int], list[Band]]:
        """What queries of a member see of the keys of `home`, by (query chunk, key chunk)."""
        if (member, home) not in self._bands:
            found: defaultdict[tuple[int, int], list[Band]] = defaultdict(list)
            for band in self.visibility.bands(member, home):
                for i in self.blocks[member].touched(band.q_start, band.q_stop):
                    for j in self.blocks[home].touched(band.k_start, band.k_stop):
                        found[i, j] += clip(band, self.blocks[member].rows(i), self.blocks[home].rows(j))
            self._bands[member, home] = {pair: bands for pair, bands in found.items() if bands}
        return self._bands[member, home]

    def planned_blocks(self) -> Iterator[tuple[int, Block]]:
        """Ring members with a planned rank: what stays on others is their affair."""
        return ((member, block) for member, block in enumerate(self.blocks) if block.group.is_planned)

    def uses(self, member: int) -> list[tuple[int, int]]:
        """(step, chunk) of the queries of a member, steps ascending."""
        return sorted((visit.step, visit.chunk) for visit in self.visits if visit.member == member)

    def all_uses(self, member: int) -> list[tuple[int, int]]:
        """As `uses`; chunks that see nothing are named once, after all others, because their sums are zero."""
        uses, block = self.uses(member), self.blocks[member]
        seen = {chunk for _, chunk in uses}
        rest = [c for c in range(block.count) if c not in seen and _has_rows(block.asking_rows(c))]
        return [*uses, *((self.last_step + self.chunking.pace * n, c) for n, c in enumerate(rest, 1))]

    def tiles(self, member: int, queries: Held, sums: Held) -> None:
        """Tiles of all visits, over the residencies of queries and sums."""
        for visit in self.visits:
            if visit.member != member:
                continue
            q, acc = queries.at(visit.chunk, visit.step), sums.at(visit.chunk, visit.step)
            for head in range(len(q)):
                kv_sums = visit.kv_sums[head] if visit.kv_sums else None
                for band in visit.bands:
                    tile = tile_of(band, q[head], visit.kv[head], acc[head], kv_sums)
                    self.builder.tile(visit.step, q[head].rank, tile)

    # ---- keys in the outer loop -----------------------------------------------------------------------------------

    def trips(self) -> Iterator[tuple[int, list[Span]]]:
        """(key chunk, steps of its stops on the way around the ring), one after the other; no message."""
        start = 0
        for chunk in range(self.exchange.chunks):
            spans = []
            for stop in range(self.ring.size):
                pairs = [(self.visitor(home, stop), home) for home in range(self.ring.size)]
                tiles = max(len(self.seers(member, home, chunk)) for member, home in pairs)
                steps = self.chunking.pace * max(1, tiles)
                spans.append(Span(start, start + steps - 1))
                start += steps
            yield chunk, spans

    def planned(self, uses: Iterable[tuple[int, int]]) -> list[Residency]:
        """Residencies for some uses."""
        return residencies(uses, self.chunking.lead)

    def seen(self, home: int, chunk: int) -> bool:
        """Whether anybody sees a key chunk."""
        return any(self.seers(member, home, chunk) for member in range(self.ring.size))

    def visitor(self, home: int, stop: int) -> int:
        """The member that a key chunk of `home` visits at a stop."""
        return self.ring.visitor(home, *divmod(stop, self.ring.inner))

    def seers(self, member: int, home: int, chunk: int) -> list[int]:
        """Query chunks of a member that see a key chunk, in turn from either end."""
        key = member, home
        if key not in self._seers:
            by_chunk: defaultdict[int, list[int]] = defaultdict(list)
            for i, j in sorted(self.bands(member, home)):
                by_chunk[j].append(i)
            self._seers[key] = {j: found[::-1] if j % 2 else found for j, found in by_chunk.items()}
        return self._seers[key].get(chunk, [])

    def travel(self, home: int, chunk: int, spans: list[Span], kv: list[Value], sums: list[Value]) -> None:
        """One trip of a key chunk: messages, visits and in backward the sums that come home."""
        stops = [s for s in range(self.ring.size) if self.seers(self.visitor(home, s), home, chunk)]
        held = self._carry(home, spans, stops, kv, self._needed(home, chunk, stops))
        travelling: dict[int, list[Value]] = {}
        for stop in stops:
            member = self.visitor(home, stop)
            if self.backward and stop:
                travelling[stop] = self._started(member, held[stop], spans[stop])
            for turn, query in enumerate(self.seers(member, home, chunk)):
                step = spans[stop].post + turn * self.chunking.pace
                bands = self.bands(member, home)[query, chunk]
                self.visits.append(_Visit(step, member, query, bands, held[stop], travelling.get(stop, sums)))
        if self.backward:
            self._bring_home(spans, travelling, sums)

    def _needed(self, home: int, chunk: int, stops: list[int]) -> dict[int, Rows]:
        """Keys of the chunk that a stop or a later one needs."""
        needed: dict[int, Rows] = {}
        later: Rows | None = None
        for stop in reversed(stops):
            member = self.visitor(home, stop)
            bands = [band for i in self.seers(member, home, chunk) for band in self.bands(member, home)[i, chunk]]
            own = Rows(min(band.k_start for band in bands), max(band.k_stop for band in bands))
            needed[stop] = later = own.hull(later)
        return needed

    def _carry(
        self, home: int, spans: list[Span], stops: list[int], kv: list[Value], needed: dict[int, Rows]
    ) -> dict[int, list[Value]]:
        """The chunk at every stop that uses it: inside a ring hop by hop, to the next ring from where it came in."""
        inner = self.ring.inner
        held = {0: kv}
        entry = before = 0
        for stop in (s for s in stops if s):
            cycle = stop // inner
            if cycle == entry // inner:
                span, channel, source = spans[stop - 1], Channel.PAYLOAD_INNER, held[before]
            else:  # hides behind the whole cycle before
                post = max(spans[(cycle - 1) * inner].post, spans[entry].post)
                span, channel, source = Span(post, spans[cycle * inner - 1].wait), Channel.PAYLOAD_OUTER, held[entry]
                entry = stop
            held[stop] = self._pass(span, channel, source, self.visitor(home, stop), needed[stop])
            before = stop
        return held

    def _pass(self, span: Span, channel: Channel, source: list[Value], member: int, rows: Rows) -> list[Value]:
        """Messages of some rows to another member, one per part of the heads."""
        arrived = self.blocks[member].group.parts(source[0].kind, rows)
        for src, dst in zip(source, arrived, strict=True):
            self.builder.message(*span, channel, src, dst, rows)
        return arrived

    def _started(self, member: int, kv: list[Value], span: Span) -> list[Value]:
        """Sums of dK, dV for keys that visit a member, zero."""
        group = self.blocks[member].group
        values = group.parts(Kind.DKV, kv[0].rows)
        group.each(span.post, "init", values)
        return values

    def _bring_home(self, spans: list[Span], travelling: dict[int, list[Value]], sums: list[Value]) -> None:
        """Every stop's sum goes straight home while the next stop computes."""
        narrow = self.exchange.narrow_gradients
        for stop, values in travelling.items():
            channel = Channel.GRADIENT_INNER if stop < self.ring.inner else Channel.GRADIENT_OUTER
            span = spans[stop + 1] if stop + 1 < len(spans) else Span(spans[stop].wait + 1, spans[stop].wait + 1)
            for src, dst in zip(values, sums, strict=True):
                sent = src
                if narrow:
                    sent = self.builder.value(src.rank, Home(Kind.DKV_WIRE, src.heads), src.rows)
                    self.builder.op(span.post, "pre", src.rank, LocalOp("copy", sent.view(), src.view()))
                arrived = self.builder.value(dst.rank, sent.home, src.rows)
                self.builder.message(*span, channel, sent, arrived, src.rows)
                self.builder.op(span.wait, "after", dst.rank, LocalOp("add", dst.view(src.rows), arrived.view()))


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
        for member, block in self.planned_blocks():
            passing = self._passing(member)
            uses = sorted([*self.uses(member), *((step, chunk) for chunk, step in passing.queries.items())])
            queries = block.read(self.planned(uses), *self._operand(block, Kind.Q, "q", "ring_q"))
            saved = block.whole(Kind.SAVED, "saved")
            out = block.group.homes(Kind.OUT, "out", self.chunking.store) if block.exchanged else None
            finish = functools.partial(self._finish, block, saved, out)
            sums = block.sum(self.planned(self.all_uses(member)), block.whole(Kind.ACC), finish)
            self.tiles(member, queries, sums)
            for chunk, step in passing.kept.items():
                self._send_home(block, block.load(step, saved, Kind.SAVED, chunk), out, chunk, step)

    def _passing(self, member: int) -> _Passing:
        """What passes through the ranks of a head group, spread over the steps that have tiles."""
        block = self.blocks[member]
        if self.visibility.mask.query_stop is None or not block.exchanged:
            return _Passing({}, {}, {})
        worked_on = {visit.chunk for visit in self.visits if visit.member == member}
        queries = self._wanted_queries(member) - worked_on
        keys = {chunk for chunk in self._wanted_keys(member) if not self.seen(member, chunk)}
        every = [chunk for chunk in range(block.count) if _has_rows(block.rows(chunk))]
        kept = {chunk for chunk in every if not _has_rows(block.asking_rows(chunk))}
        passing = _Passing({}, {}, {})
        waiting = sorted(queries | keys | kept)
        tiles = max((visit.step for visit in self.visits), default=0) // self.chunking.pace
        gap = max(1, tiles // (len(waiting) + 1))  # in tiles; one after another where there are enough of them
        for turn, chunk in enumerate(waiting, 1):
            for index, chunks in enumerate((queries, keys, kept)):
                if chunk in chunks:
                    passing[index][chunk] = self.chunking.pace * (gap * turn + gap * index // 3)
        return passing

    def _wanted_queries(self, member: int) -> set[int]:
        """Query chunks that backward, in which all queries ask, will work on."""
        bands = [band for home in range(self.ring.size) for band in self.whole.bands(member, home)]
        return {chunk for band in bands for chunk in self.blocks[member].touched(band.q_start, band.q_stop)}

    def _wanted_keys(self, home: int) -> set[int]:
        """As `_wanted_queries`, of keys."""
        bands = [band for member in range(self.ring.size) for band in self.whole.bands(member, home)]
        return {chunk for band in bands for chunk in self.blocks[home].touched(band.k_start, band.k_stop)}

    def _stream_keys(self) -> None:
        """Queries in the outer loop: every row of chunks is walked to its end."""
        pairs = self.bands(0, 0)
        rows: list[list[tuple[int, int]]] = [[] for _ in range(self.exchange.chunks)]
        for i, j in sorted(pairs):
            rows[i].append((i, j))
        order = [pair for i, row in enumerate(rows) for pair in (row[::-1] if i % 2 else row)]
        steps = {pair: self.chunking.pace * n for n, pair in enumerate(order)}
        self.visits = [_Visit(step, 0, i, pairs[i, j], [], []) for (i, j), step in steps.items()]
        self.last_step = max(steps.values(), default=0)
        uses = [(step, j) for (_, j), step in steps.items()]
        uses += [(step, j) for j, step in self._passing(0).keys.items()]
        keys = self.blocks[0].read(self.planned(sorted(uses)), *self._operand(self.blocks[0], Kind.KV, "kv", "ring_kv"))
        self.visits = [_Visit(step, 0, i, pairs[i, j], keys.at(j, step), []) for (i, j), step in steps.items()]

    def _send_keys(self) -> None:
        """Keys in the outer loop, each chunk once around the ring."""
        operands = [self._operand(block, Kind.KV, "kv", "ring_kv") for block in self.blocks]
        for chunk, spans in self.trips():
            stay = Residency(chunk, spans[0].post, spans[-1].wait)
            for home, (block, operand) in enumerate(zip(self.blocks, operands, strict=True)):
                if self.seen(home, chunk):
                    keys = block.read([stay], *operand).at(chunk, stay.first)
                    self.travel(home, chunk, spans, keys, [])
            self.last_step = stay.last
        for home, (block, operand) in enumerate(zip(self.blocks, operands, strict=True)):
            block.read([Residency(chunk, step, step) for chunk, step in self._passing(home).keys.items()], *operand)

    def _operand(self, block: Block, kind: Kind, pin: str, ring_pin: str) -> tuple[list[Value], Arrive | None]:
        """Where an input lies, and how its chunks get there if that takes an exchange."""
        if not block.exchanged:
            return block.whole(kind, pin), None
        homes = block.group.homes(kind, pin, self.chunking.store)

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
        for member, block in self.planned_blocks():
            queries = self._queries(block, self.planned(self.uses(member)))
            self.tiles(member, queries, self._query_sums(block, self.planned(self.all_uses(member))))

    def _send_keys(self) -> None:
        keys = [block.whole(Kind.KV, "ring_kv" if block.exchanged else "kv") for block in self.blocks]
        finishes = [self._kv_finish(block) for block in self.blocks]
        for chunk, spans in self.trips():
            # The sum of the last stop comes home one step later.
            stay = Residency(chunk, spans[0].post, spans[-1].wait + (self.ring.size > 1))
            for home, block in enumerate(self.blocks):
                if block.rows(chunk).start == block.rows(chunk).stop:
                    continue
                sums = block.sum([stay], block.whole(Kind.DKV), finishes[home]).at(chunk, stay.first)
                if self.seen(home, chunk):
                    values = block.read([stay], keys[home]).at(chunk, stay.first)
                    self.travel(home, chunk, spans, values, sums)
            self.last_step = stay.last

    def _kv_finish(self, block: Block) -> Finish:
        if not block.exchanged:
            whole = block.whole(Kind.DKV_CAST, "dkv")
            return lambda chunk, step, sums: block.put(step + 1, sums, whole, chunk)
        homes = block.group.homes(kv_gradient_kind(self.exchange), "dkv", self.chunking.store)

        def finish(chunk: int, step: int, sums: list[Value]) -> None:
            block.scatter(step + 1, homes, chunk, lambda span, to: return_kv(block.group, span, sums, to, chunk))

        return finish

    def _queries(self, block: Block, planned: list[Residency]) -> Held:
        """Q, dO, lse and scale or out; after a head exchange dO comes chunk by chunk, and a scale follows from it."""
        whole = block.whole(Kind.QX if block.host else Kind.QO, "qx")  # `out` does not come along
        if not block.exchanged:
            return block.read(planned, whole)
        homes = block.group.homes(Kind.DOUT, "dout", self.chunking.store)
        saved = block.whole(Kind.SAVED, "saved")

        def arrive(chunk: int, step: int, values: list[Value]) -> None:
            if block.host:
                block.move(Span(step - self.chunking.lead, step - 1), whole, values, block.rows(chunk))
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
        homes = block.group.homes(Kind.DQ_CAST, "dq", self.chunking.store)

        def send(chunk: int, step: int, values: list[Value]) -> None:
            cast = block.part(Kind.DQ_CAST, chunk)
            block.group.each(step + 1, "copy", cast, values)
            block.scatter(step + 1, homes, chunk, lambda span, to: block.group.scatter(span, cast, to, "copy", chunk))

        return block.sum(planned, block.whole(Kind.DQ), send)
