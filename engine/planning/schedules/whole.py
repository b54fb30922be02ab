"""Attention over whole blocks: which operand moves, which stays, and the head exchange around it.

Forward moves k and v. Backward moves k and v with dk and dv (`attention.backward_circulates=kv`: RingAttention), or q,
dout and the row statistics with dq (`q`: BurstAttention; less to send where there are as many kv heads as query heads).

Arguments of the plans (inputs and outputs), without a head exchange:

    forward    q, kv -> out_lse                              backward    q_dout, kv -> dq, dkv

with one, where ring_* , q_dout and out_lse hold this rank's heads of the whole block, the others all heads of own rows:

    forward    q, kv -> ring_q, ring_kv, out_lse, out        backward    dout, q_dout, ring_kv, out_lse -> dq, dkv

final_kv takes the place of (ring_)kv in backward where forward leaves its final block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from types import ModuleType

import numpy as np

from engine.planning.methods.blocks import Blocks
from engine.planning.methods.presets import AttentionMethod
from engine.planning.program.buffers import Rows, Value
from engine.planning.program.ops import HeadPart, Kind
from engine.planning.program.program import Program
from engine.planning.schedules import all_gather, double_ring, reversed_ring, ring
from engine.planning.schedules.heads import HeadGroup
from engine.planning.schedules.rank_pass import RankPass
from engine.planning.schedules.ring_grid import RingGrid, RowsNeeded, pairs_that_matter
from engine.planning.visibility.mask import Band, halves
from engine.planning.visibility.visible import Operand, Visibility


def reuses_last_block(method: AttentionMethod) -> bool:
    """Whether backward starts from the block that forward ended with; a ring of one rank has its own only."""
    return method.backward_order == "reversed" and method.ring_inner_size * method.ring_outer_size > 1


def schedule_of(method: AttentionMethod) -> ModuleType:
    """The file that says what the ranks of a ring do."""
    if method.kv_transport == "all_gather":
        return all_gather
    if reuses_last_block(method):
        return reversed_ring
    return double_ring if method.ring_outer_size > 1 else ring


# Of the moving operand of backward: kind of q and dout, of the moving gradient, and of that on the wire.
_BACKWARD_KINDS: dict[Operand, tuple[Kind, Kind, Kind]] = {
    "kv": (Kind.Q_DOUT_OUT, Kind.DKV, Kind.DKV_WIRE),
    "q": (Kind.Q_DOUT_STATS, Kind.DQ, Kind.DQ_WIRE),
}

RowsNeededCache = dict[tuple[RingGrid, str], RowsNeeded]


class WholeBlocks:
    """Writes the program of one rank.

    visible             the mask and the layout
    rows_needed_cache   shared by the ranks that are planned together
    plans_single_rank   whether only this rank is planned: then only what its messages depend on is worked out
    """

    def __init__(
        self,
        program: Program,
        visible: Visibility,
        method: AttentionMethod,
        blocks: Blocks,
        rows_needed_cache: RowsNeededCache,
        *,
        plans_single_rank: bool,
    ) -> None:
        self.program, self.visible, self.method = program, visible, method
        self.rows_needed_cache, self.plans_single_rank = rows_needed_cache, plans_single_rank
        self.is_recompute = visible.mask.query_stop is not None
        self.ring_rank, head = blocks.grid.coordinates(program.rank)
        self.ranks, self.heads = blocks.grid.ring(head), HeadPart(head, blocks.grid.heads)
        self.row_counts = blocks.ring.row_counts
        self.rows = Rows(0, self.row_counts[self.ring_rank])
        group = blocks.grid.head_group(self.ring_rank)
        shards = [[blocks.shard(self.ring_rank, 0, index, len(group)) for index in range(len(group))]]
        self.head_group = HeadGroup(program, group, shards, head, self.ring_rank)
        self.exchanges_heads = self.head_group.exchanges
        self.tile_steps: list[int] = []  # in which the stationary operand has tiles

    # ---- forward ------------------------------------------------------------------------------------------------

    def forward(self, query_rows: int | None) -> None:
        """q stays, k and v move: out and lse of the own queries.

        query_rows: of a recomputed pass, how many first rows of the block; out and lse of the others were saved
        """
        grid = RingGrid(self.method.ring_inner_size, self.method.ring_outer_size)
        final_kv = self._final_kv()
        q, kv = self._forward_inputs(has_final_kv=final_kv is not None)
        rows = Rows(0, self.rows.stop if query_rows is None else query_rows)
        partial = self._value(Kind.PARTIAL, rows, None if self.exchanges_heads else "partial")

        def tile(step: int, owner: int, block: Value, _gradient: Value | None) -> None:
            for band in self.visible.bands(self.ring_rank, owner, of="q"):
                self.tile_steps.append(step)
                self.program.tile(step, band, q, block, partial)

        rows_needed = self._rows_needed(grid, "kv")
        me = RankPass(
            self.program, grid, rows_needed, self.ring_rank, self.ranks, self.heads, tile, kv, final_kv=final_kv
        )
        if final_kv and self.is_recompute:
            reversed_ring.fetch_final_kv(replace(me, rows_needed=self._rows_needed_with_final(grid, final=True)))
            me = replace(me, rows_needed=self._rows_needed_with_final(grid, final=False))
        elif final_kv:
            me = replace(me, rows_needed=self._rows_needed_with_final(grid, final=True))
        schedule_of(self.method).forward(me)
        if self.exchanges_heads:
            self._exchange_forward(q, kv, partial, grid.size)
        else:
            out_lse = self._value(Kind.OUT_LSE, rows, "out_lse")
            self.program.after(max(self.tile_steps, default=0), "finish", out_lse, partial)

    def _forward_inputs(self, *, has_final_kv: bool) -> tuple[Value, Value]:
        """(q, kv) as the ring reads them; backward reads ring_kv again, unless it has final_kv."""
        if not self.exchanges_heads:
            return self._value(Kind.Q, self.rows, "q"), self._value(Kind.KV, self.rows, "kv")
        ring_kv = None if has_final_kv else "ring_kv"
        return self._value(Kind.Q, self.rows, "ring_q"), self._value(Kind.KV, self.rows, ring_kv)

    def _exchange_forward(self, q: Value, kv: Value, partial: Value, steps: int) -> None:
        """Exchange rows for heads before the first tile that reads them, and heads of `out` for rows after the last."""
        # Without a tile to set the time, exchanges are spread over the steps of the ring.
        group, gap = self.head_group, max(1, (steps - 1) // 2)
        group.to_heads(0, 0, group.argument(Kind.KV, "kv"), kv)
        all_heads_q = group.argument(Kind.Q, "q")
        out_lse = self._value(Kind.OUT_LSE, self.rows, "out_lse")
        out = group.argument(Kind.OUT, "out")
        if self.tile_steps:
            group.to_heads(0, min(self.tile_steps), all_heads_q, q)
        elif self.is_recompute and self._has_queries():  # backward will read them
            group.to_heads(0, gap, all_heads_q, q)
        if partial.rows.stop:
            done = 1 + (max(self.tile_steps) if self.tile_steps else steps)
            self.program.before(done, "finish", out_lse, partial, partial.rows)
            group.to_rows(0, done, Kind.OUT, out_lse, out)
        elif self.rows.stop:
            group.to_rows(0, gap + gap * 2 // 3, Kind.OUT, out_lse, out)

    def _has_queries(self) -> bool:
        """Whether own queries see anything at all, recomputed or not."""
        all_queries = Visibility(self.visible.mask.all_queries(), self.visible.layout)
        needed = all_queries.needed("kv", blocks=(), readers=(self.ring_rank,))
        return bool(needed.exists[:, self.ring_rank].any())

    def _final_kv(self) -> Value | None:
        """Where forward leaves its final block for backward."""
        if not reuses_last_block(self.method):
            return None
        grid = RingGrid(self.method.ring_inner_size, self.method.ring_outer_size)
        owner = grid.owner(self.ring_rank, grid.outer - 1, grid.inner - 1)
        return self.program.value(Kind.KV, Rows(0, self.row_counts[owner]), "final_kv", owner=owner, heads=self.heads)

    # ---- backward -----------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """dq, dk and dv: one operand moves with its gradient, the gradient of the other is summed in place."""
        method, final_kv = self.method, self._final_kv()
        gathers = method.kv_transport == "all_gather"
        moving: Operand = "kv" if gathers else method.backward_circulates
        deferred = self._deferred_tiles(reuses_last=final_kv is not None)
        grid = self._backward_grid(moving, deferred, is_reversed=final_kv is not None)
        q_kind, gradient_kind, wire_kind = _BACKWARD_KINDS[moving]
        q_dout = self._value(q_kind, self.rows, "q_dout")
        kv = final_kv or self._value(Kind.KV, self.rows, "ring_kv" if self.exchanges_heads else "kv")
        dq = self._value(Kind.DQ, self.rows, None if self.exchanges_heads else "dq")
        dkv = self._value(Kind.DKV, self.rows, None if self.exchanges_heads else "dkv")

        def tile_of_stationary_q(step: int, owner: int, block: Value, gradient: Value | None) -> None:
            """Tiles of the own queries with the k and v of `owner`; `gradient`: dk, dv of that block."""
            bands = self.visible.bands(self.ring_rank, owner, of="q")
            for at, band in self._timed(bands, step, grid.size, defers=deferred > 0 and owner == self.ring_rank):
                self.program.tile(at, band, q_dout, block, dq, gradient)

        def tile_of_stationary_kv(step: int, owner: int, block: Value, gradient: Value | None) -> None:
            """Tiles of the queries of `owner` with the own k and v; `gradient`: dq of that block."""
            bands = self.visible.bands(owner, self.ring_rank, of="kv")
            for at, band in self._timed(bands, step, grid.size, defers=deferred > 0 and owner == self.ring_rank):
                assert gradient is not None
                self.program.tile(at, band, block, kv, gradient, dkv)

        tile, local_block, local_gradient = (
            (tile_of_stationary_q, kv, dkv) if moving == "kv" else (tile_of_stationary_kv, q_dout, dq)
        )
        me = RankPass(
            self.program,
            grid,
            self._rows_needed(grid, moving),
            self.ring_rank,
            self.ranks,
            self.heads,
            tile,
            local_block,
            local_gradient=local_gradient,
            wire_kind=gradient_kind if method.gradient_wire_dtype == "float32" else wire_kind,
        )
        schedule_of(method).backward(me)
        if self.exchanges_heads:
            levels = (grid.inner > 1) + (grid.outer > 1)
            hops_after = 0 if final_kv else min(1, levels) if gathers else levels
            self._exchange_backward(q_dout, dq, dkv, grid.size + hops_after, kv_moves=moving == "kv")

    def _backward_grid(self, moving: Operand, deferred: int, *, is_reversed: bool) -> RingGrid:
        # A single ring of kv moves the other way than in forward, so both directions of a link are used in turn.
        upwards = moving == "kv" and self.method.ring_outer_size == 1 and not is_reversed
        return RingGrid(
            self.method.ring_inner_size,
            self.method.ring_outer_size,
            1 if upwards else -1,
            # The own block is one of the deferred: it needs no hop, so its tiles alone come later (`_timed`).
            deferred_stops=max(0, deferred - 1),
            is_reversed=is_reversed,
        )

    def _timed(self, bands: Sequence[Band], step: int, end: int, *, defers: bool) -> Iterator[tuple[int, Band]]:
        """(step, band); of the own block half may wait until the last gradients are on their way (step `end`)."""
        now, later = halves(bands) if defers else (bands, ())
        for at, some in ((step, now), (end, later)):
            for band in some:
                self.tile_steps.append(at)
                yield at, band

    def _deferred_tiles(self, *, reuses_last: bool) -> int:
        """How many steps of a lap have their tiles after all others, to hide the last hops of gradients."""
        steps = self.method.ring_inner_size * self.method.ring_outer_size
        if reuses_last or self.method.kv_transport == "all_gather" or steps == 1:
            return 0
        # With a window no step waits for the last hop, and deferred tiles would add a step.
        return (
            0
            if self.visible.mask.window is not None
            else min(self.method.deferred_local_tiles, self.method.ring_inner_size)
        )

    def _exchange_backward(self, q_dout: Value, dq: Value, dkv: Value, moved_by: int, *, kv_moves: bool) -> None:
        """Exchange rows of dout for heads, and heads of the gradients for rows.

        moved_by: step at which gradients of the moving operand are complete
        """
        group, stayed_by = self.head_group, 1 + (max(self.tile_steps) if self.tile_steps else moved_by)
        dout, out_lse = group.argument(Kind.DOUT, "dout"), self._value(Kind.OUT_LSE, self.rows, "out_lse")
        first = (min(self.tile_steps) if self.tile_steps else None) if kv_moves else 0
        if first is not None:
            group.to_heads(0, first, dout, q_dout)
            if not kv_moves and self.rows.stop:
                self.program.before(first, "stats", q_dout, out_lse, self.rows)
        # Complete gradients of keys are sent cast; partial ones of replicated kv heads are summed in fp32.
        replicated = self.method.kv_replicated
        wire = Kind.DKV if self.method.gradient_wire_dtype == "float32" else Kind.DKV_WIRE
        all_heads_dkv = group.argument(Kind.DKV if replicated else Kind.DKV_CAST, "dkv")
        dkv_by, dq_by = (moved_by, stayed_by) if kv_moves else (stayed_by, moved_by)
        group.to_rows(
            0, dkv_by, wire if replicated else Kind.DKV_CAST, dkv, all_heads_dkv, "add" if replicated else "copy"
        )
        group.to_rows(0, dq_by, Kind.DQ_CAST, dq, group.argument(Kind.DQ_CAST, "dq"))

    # ---- values and rows ----------------------------------------------------------------------------------------

    def _value(self, kind: Kind, rows: Rows, argument: str | None = None) -> Value:
        """Rows of the own block, this rank's heads."""
        return self.program.value(kind, rows, argument, owner=self.ring_rank, heads=self.heads)

    def _rows_needed(self, grid: RingGrid, operand: Operand) -> RowsNeeded:
        """Rows of the moving operand that ranks need: all, or of one rank those that its messages depend on."""
        if (grid, operand) not in self.rows_needed_cache:
            ranges = self.visible.needed(operand, **self._pairs(grid))
            self.rows_needed_cache[grid, operand] = RowsNeeded(grid, ranges)
        return self.rows_needed_cache[grid, operand]

    def _rows_needed_with_final(self, grid: RingGrid, *, final: bool) -> RowsNeeded:
        """As `_rows_needed`, but the last step takes all rows that any rank ever needs, or (not final) none."""
        key = grid, "with final" if final else "without final"
        if key not in self.rows_needed_cache:
            visible = self.visible
            if self.is_recompute:
                visible = Visibility(visible.mask.all_queries(), visible.layout)
            rows = visible.needed("kv", **self._pairs(grid)).hull(axis=1)
            rows = rows if final else rows.where(np.zeros(grid.size, dtype=np.bool_))
            self.rows_needed_cache[key] = RowsNeeded(grid, self._rows_needed(grid, "kv").ranges, rows)
        return self.rows_needed_cache[key]

    def _pairs(self, grid: RingGrid) -> dict[str, Collection[int]]:
        """Blocks of which all readers matter, and readers of which all blocks do."""
        if not self.plans_single_rank:
            return {"blocks": range(grid.size), "readers": range(grid.size)}
        if self.method.kv_transport == "all_gather":
            return {"blocks": (self.ring_rank,), "readers": (self.ring_rank,)}
        return pairs_that_matter(grid, self.ring_rank)
