"""Attention over whole blocks: which schedule, what travels and what stays, with or without a head exchange.

Pins, with a head exchange (ring_..., qx, saved: own heads, whole block; the others: all heads, own rows):

    forward    q, kv -> ring_q, ring_kv, saved, out       backward    dout, qx, ring_kv, saved -> dq, dkv

without one:

    forward    q, kv -> acc                               backward    qx, kv -> dq, dkv

final_kv takes the place of (ring_)kv in backward where the last block is kept.
"""

from __future__ import annotations

from collections.abc import Collection
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
from engine.planning.schedules.ring_grid import RingGrid, RowsNeeded, pairs_at
from engine.planning.visibility.mask import halves
from engine.planning.visibility.visible import Operand, Visibility


def reuses_last_block(method: AttentionMethod) -> bool:
    """Whether forward leaves its last block for backward; a ring of one rank holds its own only."""
    return method.backward_order == "reversed" and method.ring_inner_size * method.ring_outer_size > 1


def schedule_of(method: AttentionMethod) -> ModuleType:
    """The file that says what the ranks of a ring do."""
    if method.kv_transport == "all_gather":
        return all_gather
    if reuses_last_block(method):
        return reversed_ring
    return double_ring if method.ring_outer_size > 1 else ring


RowsNeededCache = dict[tuple[RingGrid, str], RowsNeeded]


class WholeBlocks:
    """One rank of a method."""

    def __init__(
        self,
        program: Program,
        seen: Visibility,
        method: AttentionMethod,
        blocks: Blocks,
        needs: RowsNeededCache,
        *,
        is_alone: bool,
    ) -> None:
        self.needs, self.is_alone, self.again = needs, is_alone, seen.mask.query_stop is not None
        self.program, self.seen, self.method = program, seen, method
        self.me, head = blocks.grid.place(program.rank)
        self.ranks, self.heads = blocks.grid.ring(head), HeadPart(head, blocks.grid.heads)
        self.row_counts, self.rows = blocks.ring.row_counts, Rows(0, blocks.ring.row_counts[self.me])
        self.exchanged, group = blocks.grid.heads > 1, blocks.grid.head_group(self.me)
        pieces = [[blocks.piece(self.me, 0, index, len(group)) for index in range(len(group))]]
        self.group = HeadGroup(program, group, pieces, head)
        self.steps: list[int] = []  # of the tiles of what stays

    def value(self, kind: Kind, rows: Rows, argument: str | None = None) -> Value:
        """Rows of the block, own heads."""
        made = self.program.value(kind, rows, argument, self.heads)
        self.program.owners[made.number] = self.me
        return made

    def home(self, kind: Kind, argument: str) -> Value:
        """Own rows, all heads."""
        return self.group.home(kind, argument)

    def need(self, rings: RingGrid, operand: Operand) -> RowsNeeded:
        """Rows of all that this rank sends or receives; of all ranks, if more than one of them is planned."""
        if (rings, operand) not in self.needs:
            self.needs[rings, operand] = RowsNeeded(rings, self.seen.needed(operand, **self.pairs(rings)))
        return self.needs[rings, operand]

    def need_with_last(self, rings: RingGrid, *, last: bool) -> RowsNeeded:
        """As `need`; the last stop takes all rows that anybody ever needs, or none."""
        key = rings, "with last" if last else "without"
        if key not in self.needs:
            every = Visibility(self.seen.mask.all_queries(), self.seen.layout) if self.again else self.seen
            rows = every.needed("kv", **self.pairs(rings)).hull(axis=1)
            rows = rows if last else rows.where(np.zeros(rings.size, dtype=np.bool_))
            self.needs[key] = RowsNeeded(rings, self.need(rings, "kv").table, rows)
        return self.needs[key]

    def pairs(self, rings: RingGrid) -> dict[str, Collection[int]]:
        """Blocks of which all readers matter, and readers of which all blocks do."""
        every = range(rings.size)
        if not self.is_alone:
            return {"blocks": every, "readers": every}
        if self.method.kv_transport == "all_gather":
            return {"blocks": (self.me,), "readers": (self.me,)}
        return pairs_at(rings, self.me)

    # ---- forward ------------------------------------------------------------------------------------------------

    def forward(self, asked: int | None) -> None:
        """Own queries stay, keys and values travel."""
        rings, last = RingGrid(self.method.ring_inner_size, self.method.ring_outer_size), self.last_keys()
        argument = "q" if not self.exchanged else "ring_q"
        queries = self.value(Kind.Q, self.rows, argument)
        kept = None if self.exchanged and last else "ring_kv" if self.exchanged else "kv"
        keys = self.value(Kind.KV, self.rows, kept)
        asked_rows = Rows(0, self.rows.stop if asked is None else asked)
        results = self.value(Kind.PARTIAL, asked_rows, None if self.exchanged else "partial")

        def tile(step: int, owner: int, block: Value, sums: Value | None) -> None:
            for band in self.seen.bands(self.me, owner, of="q"):
                self.steps.append(step)
                self.program.tile(step, band, queries, block, results)

        need = self.need(rings, "kv")
        work = RankPass(self.program, rings, need, self.me, self.ranks, self.heads, tile, keys, last=last)
        if last and self.again:
            reversed_ring.bring_last(replace(work, need=self.need_with_last(rings, last=True)))
            work = replace(work, need=self.need_with_last(rings, last=False))
        elif last:
            work = replace(work, need=self.need_with_last(rings, last=True))
        schedule_of(self.method).forward(work)
        if self.exchanged:
            self._exchange_forward(queries, keys, results, rings.size)

    def _exchange_forward(self, queries: Value, keys: Value, results: Value, size: int) -> None:
        group, gap = self.group, max(1, (size - 1) // 2)
        group.to_heads(0, 0, self.home(Kind.KV, "kv"), keys)
        home, saved, out = (
            self.home(Kind.Q, "q"),
            self.value(Kind.OUT_LSE, self.rows, "out_lse"),
            self.home(Kind.OUT, "out"),
        )
        if self.steps:
            group.to_heads(0, min(self.steps), home, queries)
        elif self.seen.mask.query_stop is not None and self._ever_asks():  # backward will
            group.to_heads(0, gap, home, queries)
        if results.rows.stop:
            done = 1 + (max(self.steps) if self.steps else size)
            self.program.before(done, "copy", saved, results, results.rows)
            group.to_rows(0, done, Kind.OUT, saved, out)
        elif self.rows.stop:
            group.to_rows(0, gap + gap * 2 // 3, Kind.OUT, saved, out)

    def _ever_asks(self) -> bool:
        every = Visibility(self.seen.mask.all_queries(), self.seen.layout)
        return bool(every.needed("kv", blocks=(), readers=(self.me,)).exists[:, self.me].any())

    def last_keys(self) -> Value | None:
        """Where the last block of forward is kept for backward."""
        if not reuses_last_block(self.method):
            return None
        rings = RingGrid(self.method.ring_inner_size, self.method.ring_outer_size)
        owner = rings.owner(self.me, rings.outer - 1, rings.inner - 1)
        return self.value(Kind.KV, Rows(0, self.row_counts[owner]), "final_kv")

    # ---- backward -----------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """Keys and values travel with their gradients, or queries do."""
        method, inner, outer = self.method, self.method.ring_inner_size, self.method.ring_outer_size
        gathers = method.kv_transport == "all_gather"
        keys_travel = method.backward_circulates == "kv" or gathers
        last = self.last_keys()
        # Behind a window no step waits for the last hop, and a tail would add one.
        tails = not last and not gathers and self.seen.mask.window is None and inner * outer > 1
        tail = min(method.deferred_local_tiles, inner) if tails else 0
        rings = RingGrid(
            inner, outer, 1 if keys_travel and outer == 1 and not last else -1, max(0, tail - 1), last is not None
        )
        queries = self.value(Kind.Q_DOUT_OUT if keys_travel else Kind.Q_DOUT_STATS, self.rows, "q_dout")
        keys = last or self.value(Kind.KV, self.rows, "ring_kv" if self.exchanged else "kv")
        dq = self.value(Kind.DQ, self.rows, None if self.exchanged else "dq")
        dkv = self.value(Kind.DKV, self.rows, None if self.exchanged else "dkv")

        def tile(step: int, owner: int, block: Value, sums: Value | None) -> None:
            pair = (self.me, owner) if keys_travel else (owner, self.me)
            bands = self.seen.bands(*pair, of="q" if keys_travel else "kv")
            parts = halves(bands) if tail and owner == self.me else [bands]
            for part, at in zip(parts, (step, rings.size), strict=False):
                for band in part:
                    self.steps.append(at)
                    operands = (queries, block, dq, sums) if keys_travel else (block, keys, sums, dkv)
                    self.program.tile(at, band, *operands)

        need = self.need(rings, "kv" if keys_travel else "q")
        payload, sums = (keys, dkv) if keys_travel else (queries, dq)
        wide, narrow = (Kind.DKV, Kind.DKV_WIRE) if keys_travel else (Kind.DQ, Kind.DQ_WIRE)
        wire = wide if method.gradient_wire_dtype == "float32" else narrow
        work = RankPass(self.program, rings, need, self.me, self.ranks, self.heads, tile, payload, None, sums, wire)
        schedule_of(method).backward(work)
        if self.exchanged:
            levels = (inner > 1) + (outer > 1)
            travelled = rings.size + (0 if last else min(1, levels) if gathers else levels)
            self._exchange_backward(queries, dq, dkv, travelled, keys_travel=keys_travel)

    def _exchange_backward(self, queries: Value, dq: Value, dkv: Value, travelled: int, *, keys_travel: bool) -> None:
        """`travelled`: the step after that at which sums of what travels are complete."""
        group, stayed = self.group, 1 + (max(self.steps) if self.steps else travelled)
        dout, saved = self.home(Kind.DOUT, "dout"), self.value(Kind.OUT_LSE, self.rows, "out_lse")
        first = (min(self.steps) if self.steps else None) if keys_travel else 0
        if first is not None:
            group.to_heads(0, first, dout, queries)
            if not keys_travel and self.rows.stop:
                self.program.before(first, "stats", queries, saved, self.rows)
        # Complete gradients of keys arrive cast, partial ones of replicated heads are summed in fp32.
        copies = self.method.kv_replicated
        wire = Kind.DKV if self.method.gradient_wire_dtype == "float32" else Kind.DKV_WIRE
        home = self.home(Kind.DKV if copies else Kind.DKV_CAST, "dkv")
        at = (travelled, stayed) if keys_travel else (stayed, travelled)
        group.to_rows(0, at[0], wire if copies else Kind.DKV_CAST, dkv, home, "add" if copies else "copy")
        group.to_rows(0, at[1], Kind.DQ_CAST, dq, self.home(Kind.DQ_CAST, "dq"))
