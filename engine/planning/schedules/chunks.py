"""FPDT (Yao et al. 2024): attention over chunks of a rank's rows, which wait in host memory until they are used.

Chunks of keys and values are the outer loop: each makes one trip around the ring. Queries meet them, chunk by chunk:

    forward, ring of one     q0k0 | q1k1 q1k0 | q2k0 q2k1 q2k2 | ...      out of a chunk is final at its last tile
    backward, ring of one    q0k0 q1k0 q2k0 | q2k1 q1k1 | q2k2            dK,dV of a chunk too, dQ is added to in turn
    ring of more             keys in the outer loop both ways

Turning around at the end of a row meets the chunks that are still there. First the whole order of tiles is found, then
transfers are placed (`residency`). Gradients of chunks go straight home. Turning around, value forwarding and the
combination with rings are ours.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.planning.methods.blocks import Blocks
from engine.planning.methods.presets import AttentionMethod
from engine.planning.program.buffers import Value
from engine.planning.program.ops import HeadPart, Kind, OpName
from engine.planning.program.program import Program, When
from engine.planning.program.residency import Chunks, Residency, ResidentChunks, residencies
from engine.planning.schedules import all_gather, double_ring, ring
from engine.planning.schedules.heads import HeadGroup
from engine.planning.schedules.rank_pass import RankPass
from engine.planning.schedules.ring_grid import RingGrid, RowsNeeded
from engine.planning.visibility.mask import Band
from engine.planning.visibility.visible import Flags, RowRanges, Visibility


class _Visit(NamedTuple):
    """Tiles of one query chunk at one step, against a chunk of keys that travels."""

    step: int
    chunk: int
    bands: list[Band]
    keys: Value
    sums: Value | None


class _Rank:
    """One rank of a chunked method."""

    def __init__(
        self, program: Program, seen: Visibility, method: AttentionMethod, blocks: Blocks, asked: int | None
    ) -> None:
        self.program, self.method, self.blocks = program, method, blocks
        self.mask, self.fine, self.count = seen.mask, seen.of_chunks(blocks.chunks), blocks.chunks
        self.rings = RingGrid(method.ring_inner_size, method.ring_outer_size)
        self.me, head = blocks.grid.place(program.rank)
        self.ranks, heads, lead = (
            blocks.grid.ring(head),
            HeadPart(head, blocks.grid.heads),
            max(1, method.prefetch_chunks),
        )
        # Steps from one tile to the next: what is not prefetched is fetched in a step without tiles.
        self.pace = 1 if method.prefetch_chunks else 2
        rows = [blocks.piece(self.me, chunk) for chunk in range(self.count)]
        self.chunks = Chunks(program, rows, heads, method.chunk_store, lead, asked)
        group = blocks.grid.head_group(self.me)
        pieces = [
            [blocks.piece(self.me, c, index, len(group)) for index in range(len(group))] for c in range(self.count)
        ]
        self.group = HeadGroup(program, group, pieces, head, method.chunk_store, lead)
        self.visits: list[_Visit] = []
        self.last_step = 0

    # ---- who sees whom ------------------------------------------------------------------------------------------

    @cached_property
    def needed(self) -> RowRanges:
        """Rows of keys [query chunk, owner, key chunk, member] that chunks see."""
        return self._needed(self.fine)

    @cached_property
    def sees(self) -> Flags:
        """Which chunks see any."""
        return self.needed.exists

    @cached_property
    def sees_ever(self) -> Flags:
        """As `sees`, by all queries of the mask, even if only some ask now."""
        if self.mask.query_stop is None:
            return self.sees
        return self._needed(Visibility(self.mask.all_queries(), self.fine.layout)).exists

    def _needed(self, fine: Visibility) -> RowRanges:
        table = fine.needed("kv", blocks=range(fine.layout.size), readers=())
        shape = (self.rings.size, self.count) * 2
        return RowRanges(*(np.moveaxis(rows.reshape(shape), 3, 0).copy() for rows in table))

    def bands(self, chunk: int, owner: int, key_chunk: int) -> list[Band]:
        """What a chunk of the own queries sees of a chunk of keys, in rows of their blocks."""
        q, k = self.blocks.piece(self.me, chunk).start, self.blocks.piece(owner, key_chunk).start
        found = self.fine.bands(self.me * self.count + chunk, owner * self.count + key_chunk, of="q")
        return [Band(b.q_start + q, b.q_stop + q, b.k_start + k, b.k_stop + k, b.low, b.high) for b in found]

    def is_seen(self, chunk: int) -> bool:
        """Whether anybody sees keys of an own chunk."""
        return bool(self.sees[:, self.me, chunk].any())

    # ---- trips --------------------------------------------------------------------------------------------------

    def trips(self) -> list[list[When]]:
        """Steps of each key chunk's stops: as many as the member with most tiles needs."""
        owners, stops = np.ogrid[: self.rings.size, : self.rings.size]
        visitors = self.rings.visitors(owners, *np.divmod(stops, self.rings.inner))
        counts = np.take_along_axis(self.sees.sum(axis=0), visitors[:, None], axis=2).max(axis=0)
        ends = np.cumsum(self.pace * np.maximum(1, counts.ravel())).reshape(counts.shape).tolist()
        starts, trips = 0, []
        for of_chunk in ends:
            trips.append([When(start, stop - 1) for start, stop in zip([starts, *of_chunk], of_chunk, strict=False)])
            starts = of_chunk[-1]
        return trips

    def trip(self, chunk: int, spans: list[When], keys: Value, sums: Value | None) -> None:
        """A chunk of every member's keys goes around the ring."""
        end = spans[-1].wait

        def tiles(stop: int, owner: int, keys: Value, sums: Value | None) -> None:
            """Of all query chunks that see it, from either end in turn."""
            seers, step = np.flatnonzero(self.sees[:, owner, chunk, self.me]).tolist(), spans[stop].post
            for query in seers[::-1] if chunk % 2 else seers:
                if bands := self.bands(query, owner, chunk):
                    self.visits.append(_Visit(step, query, bands, keys, sums))
                step += self.pace

        hull = RowRanges(*(rows[:, :, chunk] for rows in self.needed)).hull(axis=0)
        first = np.array([self.blocks.piece(owner, chunk).start for owner in range(self.rings.size)])[:, None]
        need = RowsNeeded(self.rings, RowRanges(hull.start + first, hull.stop + first).where(hull.exists))
        stretched = self.program.stretched([*spans, When.at(end + 1)])
        wire = Kind.DKV if self.method.gradient_wire_dtype == "float32" else Kind.DKV_WIRE
        heads = self.chunks.heads
        work = RankPass(stretched, self.rings, need, self.me, self.ranks, heads, tiles, keys, None, sums, wire)
        if self.program.direction == "forward":
            double_ring.forward(work)
            return
        entered = None
        for visit in work.visits():
            entered = entered if visit.stop else double_ring.enter(work, visit)
            all_gather.send_straight(work, visit, ring.carry(work, visit, entered))

    # ---- residency ----------------------------------------------------------------------------------------------

    def uses(self, kind: Kind) -> list[tuple[int, int]]:
        """(step, query chunk) of all tiles; of sums chunks that see nothing too, behind all others: they are zero."""
        uses = sorted({(visit.step, visit.chunk) for visit in self.visits})
        seen = {chunk for _, chunk in uses}
        of = self.chunks.rows_of
        rest = [
            c for c, rows in enumerate(self.chunks.rows) if c not in seen and of(kind, rows).start < of(kind, rows).stop
        ]
        return [*uses, *((self.last_step + self.pace * n, c) for n, c in enumerate(rest, 1))]

    def tiles(self, queries: ResidentChunks, sums: ResidentChunks) -> None:
        """Tiles of all visits."""
        for step, chunk, bands, keys, key_sums in self.visits:
            for band in bands:
                self.program.tile(step, band, queries.at(chunk, step), keys, sums.at(chunk, step), key_sums)


class Forward(_Rank):
    """(out, lse) of a query chunk add up, in a ring of one without ever leaving the device."""

    def write(self) -> None:
        """The program."""
        (self._stream_keys if self.rings.size == 1 else self._send_keys)()
        queries_pass, _, kept = self._passing()
        uses = sorted([*{(visit.step, visit.chunk) for visit in self.visits}, *queries_pass])
        queries = self._read(residencies(uses, self.chunks.lead), Kind.Q, "q")
        saved = self.chunks.whole(Kind.OUT_LSE, "out_lse")
        if self.group.exchanges:
            self.group.home(Kind.OUT, "out")

        def finish(chunk: int, step: int, sums: Value) -> None:
            done = self.chunks.put(step + 1, sums, saved, chunk, all_rows=self.group.exchanges)
            self._send_home(done, chunk, step + 1)

        stays = residencies(self.uses(Kind.PARTIAL), self.chunks.lead)
        sums = self.chunks.sum(stays, self.chunks.whole(Kind.PARTIAL), finish)
        for step, chunk in kept:
            self._send_home(self.chunks.load(step, saved, Kind.OUT_LSE, chunk), chunk, step)
        self.tiles(queries, sums)

    def _passing(self) -> tuple[list[tuple[int, int]], ...]:
        """What a pass run again only exchanges: queries and keys that backward will work on, and chunks of which out
        was kept in all rows.
        """
        if self.mask.query_stop is None or not self.group.exchanges:
            return [], [], []
        ever, now, of = self.sees_ever, self.sees, self.chunks.rows_of
        queries = ever[..., self.me].any(axis=(1, 2)) & ~now[..., self.me].any(axis=(1, 2))
        keys = ever[:, self.me].any(axis=(0, 2)) & ~now[:, self.me].any(axis=(0, 2))
        kept = [r.start < r.stop and of(Kind.PARTIAL, r).start == of(Kind.PARTIAL, r).stop for r in self.chunks.rows]
        return self._turns(queries, 0), self._turns(keys, 1), self._turns(kept, 2)

    def _turns(self, chosen: npt.ArrayLike, third: int) -> list[tuple[int, int]]:
        """The chosen chunks, spread over the steps that have tiles, with three kinds of them in turn."""
        chunks = np.flatnonzero(chosen).tolist()
        gap = max(1, self.last_step // self.pace // (len(chunks) + 1))  # in tiles
        return [(self.pace * (gap * turn + gap * third // 3), chunk) for turn, chunk in enumerate(chunks, 1)]

    def _stream_keys(self) -> None:
        """Queries in the outer loop: every row of chunks is walked to its end."""
        order = [
            (i, j) for i in range(self.count) for j in range(self.count)[:: -1 if i % 2 else 1] if self.sees[i, 0, j, 0]
        ]
        steps = {pair: self.pace * n for n, pair in enumerate(order)}
        self.last_step = max(steps.values(), default=0)
        uses = sorted([*((step, j) for (_, j), step in steps.items()), *self._passing()[1]])
        keys = self._read(residencies(uses, self.chunks.lead), Kind.KV, "kv")
        self.visits = [_Visit(step, i, self.bands(i, 0, j), keys.at(j, step), None) for (i, j), step in steps.items()]

    def _send_keys(self) -> None:
        """Keys in the outer loop, each chunk once around the ring."""
        whole = self.chunks.whole(Kind.KV, "ring_kv" if self.group.exchanges else "kv")
        for chunk, spans in enumerate(self.trips()):
            stay = Residency(chunk, spans[0].post, spans[-1].wait)
            keys = self._read([stay], Kind.KV, "kv").at(chunk, stay.first) if self.is_seen(chunk) else whole
            self.trip(chunk, spans, keys, None)
            self.last_step = stay.last
        self._read([Residency(chunk, step, step) for step, chunk in self._passing()[1]], Kind.KV, "kv")

    def _read(self, planned: list[Residency], kind: Kind, argument: str) -> ResidentChunks:
        """Chunks of an input, which get there by an exchange if there is one."""
        if not self.group.exchanges:
            return self.chunks.read(planned, self.chunks.whole(kind, argument))
        home = self.group.home(kind, argument)
        return self.chunks.read(
            planned,
            self.chunks.whole(kind, f"ring_{argument}"),
            lambda chunk, step, value: self.group.to_heads(chunk, step, home, value),
        )

    def _send_home(self, done: Value, chunk: int, step: int) -> None:
        if self.group.exchanges:
            self.group.to_rows(chunk, step, Kind.OUT, done, self.group.home(Kind.OUT, "out"))


class Backward(_Rank):
    """Gradients of keys add up through one trip, those of queries are added to in turn."""

    def write(self) -> None:
        """The program."""
        keys = self.chunks.whole(Kind.KV, "ring_kv" if self.group.exchanges else "kv")
        self._key_sums([])  # the output of a block without rows, too
        levels = (self.rings.inner > 1) + (self.rings.outer > 1)
        for chunk, spans in enumerate(self.trips()):
            stay = Residency(chunk, spans[0].post, spans[-1].wait)
            own_keys, sums = keys, self.chunks.whole(Kind.DKV)
            if self.chunks.rows[chunk].start < self.chunks.rows[chunk].stop:
                last = stay.last + min(1, levels)  # gradients come home a step later
                sums = self._key_sums([stay._replace(last=last)]).at(chunk, stay.first)
                if self.is_seen(chunk):
                    own_keys = self.chunks.read([stay], keys).at(chunk, stay.first)
            self.trip(chunk, spans, own_keys, sums)
            self.last_step = stay.last + min(1, levels)
        uses = sorted({(visit.step, visit.chunk) for visit in self.visits})
        queries = self._queries(residencies(uses, self.chunks.lead))
        self.tiles(queries, self._query_sums(residencies(self.uses(Kind.DQ), self.chunks.lead)))

    def _key_sums(self, planned: list[Residency]) -> ResidentChunks:
        # Complete ones arrive cast, partial ones of replicated heads are summed in fp32.
        kind = wire = Kind.DKV_CAST
        op: OpName = "copy"
        if self.method.kv_replicated:
            kind, op = Kind.DKV, "add"
            wire = Kind.DKV if self.method.gradient_wire_dtype == "float32" else Kind.DKV_WIRE
        home = self.group.home(kind, "dkv") if self.group.exchanges else self.chunks.whole(kind, "dkv")

        def finish(chunk: int, step: int, sums: Value) -> None:
            if self.group.exchanges:
                self.group.to_rows(chunk, step + 1, wire, sums, home, op)
            else:
                self.chunks.put(step + 1, sums, home, chunk)

        return self.chunks.sum(planned, self.chunks.whole(Kind.DKV), finish)

    def _queries(self, planned: list[Residency]) -> ResidentChunks:
        """Q, dO, lse and scale or out; behind a head exchange dO comes chunk by chunk, and a scale follows from it."""
        kind = Kind.Q_DOUT_STATS if self.chunks.on_host else Kind.Q_DOUT_OUT  # `out` does not come along
        whole = self.chunks.whole(kind, "q_dout")
        if not self.group.exchanges:
            return self.chunks.read(planned, whole)
        home, saved = self.group.home(Kind.DOUT, "dout"), self.chunks.whole(Kind.OUT_LSE, "out_lse")

        def fill(chunk: int, step: int, value: Value) -> None:
            if self.chunks.on_host:
                self.program.move(whole, value, self.chunks.rows[chunk], When(step - self.chunks.lead, step - 1))
            self.group.to_heads(chunk, step, home, value)
            if kind == Kind.Q_DOUT_STATS:
                results = self.chunks.load(step, saved, Kind.OUT_LSE, chunk)
                self.program.before(step, "stats", value, results, self.chunks.rows[chunk])

        return self.chunks.read(planned, whole, fill, keep=False)

    def _query_sums(self, planned: list[Residency]) -> ResidentChunks:
        if not self.group.exchanges:  # they stay where they are asked for
            whole = self.chunks.whole(Kind.DQ, "dq")
            return self.chunks.sum(planned, whole, None)
        home = self.group.home(Kind.DQ_CAST, "dq")
        return self.chunks.sum(
            planned,
            self.chunks.whole(Kind.DQ),
            lambda chunk, step, sums: self.group.to_rows(chunk, step + 1, Kind.DQ_CAST, sums, home),
        )
