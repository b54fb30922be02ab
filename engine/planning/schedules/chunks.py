"""FPDT (Yao et al. 2024): attention over chunks of a rank's rows, which stay in host memory until they are used.

Chunks of k and v are the outer loop, and each makes one trip around the ring. Query chunks meet them one by one:

    forward, ring of one     q0k0 | q1k1 q1k0 | q2k0 q2k1 q2k2 | ...      out of a query chunk is final after its row
    backward, ring of one    q0k0 q1k0 q2k0 | q2k1 q1k1 | q2k2            dk, dv of a chunk too; dq is loaded and stored
    ring of several          key chunks in the outer loop, both ways

Every second row or column of tiles runs backwards, so it begins with the chunks that are still on the device. First the
order of all tiles is found, then loads and stores are placed around it (`program.residency`). Gradients of k and v go
straight to their owner. Running backwards and the combination with rings are ours.
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
from engine.planning.program.residency import ChunkedBlock, Residency, ResidentChunks, residencies
from engine.planning.schedules import all_gather, double_ring, ring
from engine.planning.schedules.heads import HeadGroup
from engine.planning.schedules.rank_pass import RankPass
from engine.planning.schedules.ring_grid import RingGrid, RowsNeeded
from engine.planning.visibility.mask import Band
from engine.planning.visibility.visible import Flags, RowRanges, Visibility


class _ChunkTiles(NamedTuple):
    """Tiles of one query chunk at one step, against a chunk of kv that is on this rank."""

    step: int
    chunk: int
    bands: list[Band]
    kv: Value
    dkv: Value | None


class _RankChunks:
    """One rank of a chunked method."""

    def __init__(
        self, program: Program, visible: Visibility, method: AttentionMethod, blocks: Blocks, query_rows: int | None
    ) -> None:
        self.program, self.method, self.blocks = program, method, blocks
        self.mask, self.fine, self.count = visible.mask, visible.of_chunks(blocks.chunks), blocks.chunks
        self.grid = RingGrid(method.ring_inner_size, method.ring_outer_size)
        self.ring_rank, head = blocks.grid.coordinates(program.rank)
        self.ranks, heads = blocks.grid.ring(head), HeadPart(head, blocks.grid.heads)
        lead = max(1, method.prefetch_chunks)  # steps that a load takes
        # Steps from one tile to the next: what is not prefetched is loaded in a step without tiles.
        self.pace = 1 if method.prefetch_chunks else 2
        rows = [blocks.shard(self.ring_rank, chunk) for chunk in range(self.count)]
        self.chunks = ChunkedBlock(program, self.ring_rank, rows, heads, method.chunk_store, lead, query_rows)
        group = blocks.grid.head_group(self.ring_rank)
        shards = [
            [blocks.shard(self.ring_rank, chunk, number, len(group)) for number in range(len(group))]
            for chunk in range(self.count)
        ]
        self.head_group = HeadGroup(program, group, shards, head, self.ring_rank, method.chunk_store, lead)
        self.chunk_tiles: list[_ChunkTiles] = []
        self.last_step = 0

    # ---- which chunks see which ---------------------------------------------------------------------------------

    @cached_property
    def rows_needed(self) -> RowRanges:
        """Rows of k and v [query chunk, owner, key chunk, ring rank] that query chunks see."""
        return self._rows_needed(self.fine)

    @cached_property
    def sees(self) -> Flags:
        """Which query chunks see any row of a key chunk; indexed as `rows_needed`."""
        return self.rows_needed.exists

    @cached_property
    def sees_in_backward(self) -> Flags:
        """As `sees`, of all queries of the mask: a recomputed pass has some of them only, backward has all."""
        if self.mask.query_stop is None:
            return self.sees
        return self._rows_needed(Visibility(self.mask.all_queries(), self.fine.layout)).exists

    def _rows_needed(self, fine: Visibility) -> RowRanges:
        table = fine.needed("kv", blocks=range(fine.layout.size), readers=())
        shape = (self.grid.size, self.count) * 2  # owner, key chunk, ring rank, query chunk
        return RowRanges(*(np.moveaxis(rows.reshape(shape), 3, 0).copy() for rows in table))

    def bands(self, chunk: int, owner: int, key_chunk: int) -> list[Band]:
        """What a chunk of the own queries sees of a key chunk, in rows of their blocks."""
        q, k = self.blocks.shard(self.ring_rank, chunk).start, self.blocks.shard(owner, key_chunk).start
        bands = self.fine.bands(self.ring_rank * self.count + chunk, owner * self.count + key_chunk, of="q")
        return [Band(b.q_start + q, b.q_stop + q, b.k_start + k, b.k_stop + k, b.low, b.high) for b in bands]

    def is_seen(self, chunk: int) -> bool:
        """Whether any rank sees keys of an own chunk."""
        return bool(self.sees[:, self.ring_rank, chunk].any())

    # ---- trips of key chunks around the ring --------------------------------------------------------------------

    def pass_steps(self) -> list[list[When]]:
        """Steps [key chunk][stop] of every trip: as many per stop as the ring rank with most tiles needs."""
        owners, stops = np.ogrid[: self.grid.size, : self.grid.size]
        holders = self.grid.holders(owners, *np.divmod(stops, self.grid.inner))
        counts = np.take_along_axis(self.sees.sum(axis=0), holders[:, None], axis=2).max(axis=0)
        ends = np.cumsum(self.pace * np.maximum(1, counts.ravel())).reshape(counts.shape).tolist()
        start, trips = 0, []
        for of_chunk in ends:
            trips.append([When(first, end - 1) for first, end in zip([start, *of_chunk], of_chunk, strict=False)])
            start = of_chunk[-1]
        return trips

    def pass_around_ring(self, chunk: int, spans: list[When], kv: Value, dkv: Value | None) -> None:
        """One chunk of every rank's k and v makes a trip around the ring; `spans`: steps of every stop."""

        def tiles(stop: int, owner: int, kv: Value, dkv: Value | None) -> None:
            """All query chunks that see it, in one order or the other in turn."""
            seers, step = np.flatnonzero(self.sees[:, owner, chunk, self.ring_rank]).tolist(), spans[stop].post
            for query in seers[::-1] if chunk % 2 else seers:
                if bands := self.bands(query, owner, chunk):
                    self.chunk_tiles.append(_ChunkTiles(step, query, bands, kv, dkv))
                step += self.pace

        hull = RowRanges(*(rows[:, :, chunk] for rows in self.rows_needed)).hull(axis=0)
        first = np.array([self.blocks.shard(owner, chunk).start for owner in range(self.grid.size)])[:, None]
        rows_needed = RowsNeeded(self.grid, RowRanges(hull.start + first, hull.stop + first).where(hull.exists))
        me = RankPass(
            self.program.stretched([*spans, When.at(spans[-1].wait + 1)]),
            self.grid,
            rows_needed,
            self.ring_rank,
            self.ranks,
            self.chunks.heads,
            tiles,
            kv,
            local_gradient=dkv,
            wire_kind=Kind.DKV if self.method.gradient_wire_dtype == "float32" else Kind.DKV_WIRE,
        )
        if self.program.direction == "forward":
            double_ring.forward(me)
            return
        block = None
        for step in me.steps():
            block = double_ring.outer_hop(me, step) if step.stop == 0 else block
            all_gather.exchange_gradient(me, step, ring.pass_block(me, step, block))

    # ---- chunks on the device -----------------------------------------------------------------------------------

    def uses(self, kind: Kind) -> list[tuple[int, int]]:
        """(step, query chunk) of all tiles; after all others those that see nothing, for their sums are zero."""
        uses = sorted({(tiles.step, tiles.chunk) for tiles in self.chunk_tiles})
        used = {chunk for _, chunk in uses}
        rows = [self.chunks.rows_of(kind, rows) for rows in self.chunks.rows]
        unused = [chunk for chunk in range(self.count) if chunk not in used and rows[chunk].start < rows[chunk].stop]
        return [*uses, *((self.last_step + self.pace * n, chunk) for n, chunk in enumerate(unused, 1))]

    def emit_tiles(self, queries: ResidentChunks, sums: ResidentChunks) -> None:
        """Emit all tiles."""
        for step, chunk, bands, kv, dkv in self.chunk_tiles:
            for band in bands:
                self.program.tile(step, band, queries.at(chunk, step), kv, sums.at(chunk, step), dkv)


class Forward(_RankChunks):
    """out and lse of a query chunk are merged on the device; in a ring of one the chunk never leaves it meanwhile."""

    def write(self) -> None:
        """Write the program."""
        if self.grid.size == 1:
            self._queries_in_outer_loop()
        else:
            self._keys_in_outer_loop()
        exchanged_q, _, saved_out = self._exchanged_only()
        uses = sorted([*{(tiles.step, tiles.chunk) for tiles in self.chunk_tiles}, *exchanged_q])
        queries = self._read(residencies(uses, self.chunks.lead), Kind.Q, "q")
        out_lse = self.chunks.whole(Kind.OUT_LSE, "out_lse")
        if self.head_group.exchanges:
            self.head_group.argument(Kind.OUT, "out")

        def finish(chunk: int, step: int, partial: Value) -> None:
            cast = self.chunks.put(step + 1, "finish", partial, out_lse, chunk, all_rows=self.head_group.exchanges)
            self._exchange_out(cast, chunk, step + 1)

        planned = residencies(self.uses(Kind.PARTIAL), self.chunks.lead)
        sums = self.chunks.sum(planned, self.chunks.whole(Kind.PARTIAL), finish)
        for step, chunk in saved_out:
            self._exchange_out(self.chunks.load(step, out_lse, Kind.OUT_LSE, chunk), chunk, step)
        self.emit_tiles(queries, sums)

    def _exchanged_only(self) -> tuple[list[tuple[int, int]], ...]:
        """(step, chunk) of q, of kv and of out that a recomputed pass exchanges without computing with them: backward
        needs the first two, and out of all rows was saved.
        """
        if self.mask.query_stop is None or not self.head_group.exchanges:
            return [], [], []
        later, now = self.sees_in_backward, self.sees
        q = later[..., self.ring_rank].any(axis=(1, 2)) & ~now[..., self.ring_rank].any(axis=(1, 2))
        kv = later[:, self.ring_rank].any(axis=(0, 2)) & ~now[:, self.ring_rank].any(axis=(0, 2))
        computed = [self.chunks.rows_of(Kind.PARTIAL, rows) for rows in self.chunks.rows]
        out = [
            rows.start < rows.stop and part.start == part.stop
            for rows, part in zip(self.chunks.rows, computed, strict=True)
        ]
        return self._distribute(q, 0), self._distribute(kv, 1), self._distribute(out, 2)

    def _distribute(self, chosen: npt.ArrayLike, third: int) -> list[tuple[int, int]]:
        """(step, chunk) of the chosen chunks, spread evenly over the steps with tiles, three kinds of them in turn."""
        chunks = np.flatnonzero(chosen).tolist()
        gap = max(1, self.last_step // self.pace // (len(chunks) + 1))  # in tiles
        return [(self.pace * (gap * n + gap * third // 3), chunk) for n, chunk in enumerate(chunks, 1)]

    def _queries_in_outer_loop(self) -> None:
        """Every query chunk meets all its keys before the next one begins."""
        order = [
            (i, j) for i in range(self.count) for j in range(self.count)[:: -1 if i % 2 else 1] if self.sees[i, 0, j, 0]
        ]
        steps = {pair: self.pace * n for n, pair in enumerate(order)}
        self.last_step = max(steps.values(), default=0)
        uses = sorted([*((step, j) for (_, j), step in steps.items()), *self._exchanged_only()[1]])
        kv = self._read(residencies(uses, self.chunks.lead), Kind.KV, "kv")
        self.chunk_tiles = [
            _ChunkTiles(step, i, self.bands(i, 0, j), kv.at(j, step), None) for (i, j), step in steps.items()
        ]

    def _keys_in_outer_loop(self) -> None:
        """Every key chunk makes its trip around the ring before the next one begins."""
        whole = self.chunks.whole(Kind.KV, "ring_kv" if self.head_group.exchanges else "kv")
        for chunk, spans in enumerate(self.pass_steps()):
            residency = Residency(chunk, spans[0].post, spans[-1].wait)
            kv = self._read([residency], Kind.KV, "kv").at(chunk, residency.first) if self.is_seen(chunk) else whole
            self.pass_around_ring(chunk, spans, kv, None)
            self.last_step = residency.last
        self._read([Residency(chunk, step, step) for step, chunk in self._exchanged_only()[1]], Kind.KV, "kv")

    def _read(self, planned: list[Residency], kind: Kind, argument: str) -> ResidentChunks:
        """Chunks of an input, which the head exchange brings if there is one."""
        if not self.head_group.exchanges:
            return self.chunks.read(planned, self.chunks.whole(kind, argument))
        all_heads = self.head_group.argument(kind, argument)
        return self.chunks.read(
            planned,
            self.chunks.whole(kind, f"ring_{argument}"),
            lambda chunk, step, value: self.head_group.to_heads(chunk, step, all_heads, value),
        )

    def _exchange_out(self, out_lse: Value, chunk: int, step: int) -> None:
        if self.head_group.exchanges:
            self.head_group.to_rows(chunk, step, Kind.OUT, out_lse, self.head_group.argument(Kind.OUT, "out"))


class Backward(_RankChunks):
    """dk and dv of a chunk are summed during its one trip; dq chunks are loaded and stored as they are added to."""

    def write(self) -> None:
        """Write the program."""
        kv = self.chunks.whole(Kind.KV, "ring_kv" if self.head_group.exchanges else "kv")
        self._sum_dkv([])  # the output exists even where the block has no rows
        levels = (self.grid.inner > 1) + (self.grid.outer > 1)
        for chunk, spans in enumerate(self.pass_steps()):
            residency = Residency(chunk, spans[0].post, spans[-1].wait)
            own_kv, dkv = kv, self.chunks.whole(Kind.DKV)
            if self.chunks.rows[chunk].start < self.chunks.rows[chunk].stop:
                last = residency.last + min(1, levels)  # gradients arrive a step later
                dkv = self._sum_dkv([residency._replace(last=last)]).at(chunk, residency.first)
                if self.is_seen(chunk):
                    own_kv = self.chunks.read([residency], kv).at(chunk, residency.first)
            self.pass_around_ring(chunk, spans, own_kv, dkv)
            self.last_step = residency.last + min(1, levels)
        uses = sorted({(tiles.step, tiles.chunk) for tiles in self.chunk_tiles})
        queries = self._read_queries(residencies(uses, self.chunks.lead))
        self.emit_tiles(queries, self._sum_dq(residencies(self.uses(Kind.DQ), self.chunks.lead)))

    def _sum_dkv(self, planned: list[Residency]) -> ResidentChunks:
        # Complete gradients are sent cast; partial ones of replicated kv heads are summed in fp32.
        kind = wire = Kind.DKV_CAST
        op: OpName = "copy"
        if self.method.kv_replicated:
            kind, op = Kind.DKV, "add"
            wire = Kind.DKV if self.method.gradient_wire_dtype == "float32" else Kind.DKV_WIRE
        exchanges = self.head_group.exchanges
        output = self.head_group.argument(kind, "dkv") if exchanges else self.chunks.whole(kind, "dkv")

        def finish(chunk: int, step: int, dkv: Value) -> None:
            if exchanges:
                self.head_group.to_rows(chunk, step + 1, wire, dkv, output, op)
            else:
                self.chunks.put(step + 1, "copy", dkv, output, chunk)

        return self.chunks.sum(planned, self.chunks.whole(Kind.DKV), finish)

    def _read_queries(self, planned: list[Residency]) -> ResidentChunks:
        """q, dout and row statistics. With a head exchange dout comes chunk by chunk, and the statistics after it."""
        kind = Kind.Q_DOUT_STATS if self.chunks.on_host else Kind.Q_DOUT_OUT  # `out` is not loaded
        whole = self.chunks.whole(kind, "q_dout")
        if not self.head_group.exchanges:
            return self.chunks.read(planned, whole)
        dout = self.head_group.argument(Kind.DOUT, "dout")
        out_lse = self.chunks.whole(Kind.OUT_LSE, "out_lse")

        def fill(chunk: int, step: int, value: Value) -> None:
            rows = self.chunks.rows[chunk]
            if self.chunks.on_host:  # the other fields are made here
                self.program.move(whole, value, rows, When(step - self.chunks.lead, step - 1), Kind.Q)
            self.head_group.to_heads(chunk, step, dout, value)
            if kind == Kind.Q_DOUT_STATS:
                results = self.chunks.load(step, out_lse, Kind.OUT_LSE, chunk)
                self.program.before(step, "stats", value, results, rows)

        return self.chunks.read(planned, whole, fill, always_store=False)

    def _sum_dq(self, planned: list[Residency]) -> ResidentChunks:
        if not self.head_group.exchanges:  # dq stays where it is summed
            return self.chunks.sum(planned, self.chunks.whole(Kind.DQ, "dq"), None)
        all_heads = self.head_group.argument(Kind.DQ_CAST, "dq")
        return self.chunks.sum(
            planned,
            self.chunks.whole(Kind.DQ),
            lambda chunk, step, dq: self.head_group.to_rows(chunk, step + 1, Kind.DQ_CAST, dq, all_heads),
        )
