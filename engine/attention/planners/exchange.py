"""Head exchange around a ring: every rank gives up heads and gains rows, attention runs on part of the heads, and back.

A ring member's block lies in pieces on the ranks of its head group. Before attention each of them sends every other
one that one's heads of its own piece; afterwards they hold all rows of the block and 1/heads of the heads each.

    heads=2: piece 0 on rank a, piece 1 on rank b          a: rows of both pieces, heads 0
                                              exchange ->  b: rows of both pieces, heads 1

With chunks every chunk of the block lies in such pieces, and is exchanged by itself (see `planners.chunks`).

An all-to-all made of messages: pieces and parts of heads may be unequal, key and value heads that several ranks need
(more ranks than kv heads) are sent to each, and their gradients are summed at home. What arrives lies where the ring
reads it; only what leaves is copied first. With a ring of one rank this is DeepSpeed-Ulysses (Jacobs et al. 2023), else
LoongTrain's 2D-Attention (Gu et al. 2024) and USP (Fang and Zhao 2024).

Forward keeps ring_q, ring_kv and saved (out, lse) for backward, so that only dout and the gradients are exchanged then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from engine.attention.allocate import Home, Lane, PlanBuilder, Rows, Value
from engine.attention.grid import Grid
from engine.attention.layout import piece_rows
from engine.attention.plan import AttentionPlan, Channel, HeadPart, Kind, LocalOp, OpName
from engine.attention.planners.ring import Operands

Attend = Callable[[Lane, Operands], None]  # emits attention of one ring
Phase = Literal["pre", "after"]
Where = Literal["device", "host"]


@dataclass(frozen=True)
class Exchange:
    """Who exchanges: `rows[i]` tokens in the block of ring member i, in `chunks`; kv heads may be `replicated`.

    last_homes   for a reversed ring: whose block ring member i holds last (kept as kv_last); else empty
    asking       a forward pass run again: how many first rows of each block ask; of the others, out and lse were kept
    """

    grid: Grid
    rows: tuple[int, ...]
    replicated: bool = False
    narrow_gradients: bool = False
    chunks: int = 1
    last_homes: tuple[int, ...] = ()
    asking: tuple[int, ...] | None = None

    def chunk(self, ring_index: int, chunk: int) -> Rows:
        """Rows of one chunk of a ring member's block."""
        return Rows(*piece_rows(self.rows[ring_index], 1, self.chunks, 0, chunk))

    def piece(self, ring_index: int, head: int, chunk: int = 0) -> Rows:
        """Rows of a chunk of a ring member's block that the rank of its head group numbered `head` holds."""
        return Rows(*piece_rows(self.rows[ring_index], self.grid.heads, self.chunks, head, chunk))

    def home_chunk(self, ring_index: int, head: int, chunk: int) -> Rows:
        """The same rows as that rank numbers them: its pieces of all chunks follow each other."""
        sizes = [stop - start for start, stop in (self.piece(ring_index, head, c) for c in range(chunk + 1))]
        return Rows(sum(sizes[:-1]), sum(sizes))


class Span(NamedTuple):
    """Steps at which messages are posted and waited for."""

    post: int
    wait: int


class HeadGroup:
    """The ranks that hold the pieces of one ring member's block; lists of values have one per rank, in order.

    Values of part of the heads are numbered by the block's rows, those of all heads by the rank's own.
    """

    def __init__(self, exchange: Exchange, builder: PlanBuilder, ring_index: int) -> None:
        self.exchange = exchange
        self.builder = builder
        self.ring_index = ring_index
        self.ranks = exchange.grid.head_group(ring_index)

    def parts(self, kind: Kind, rows: Rows, where: Where = "device", pin: str | None = None) -> list[Value]:
        """Values of the ranks' parts of the heads (of all heads if one rank has them).

        Sums of out and lse (ACC) have only those of the rows that ask.
        """
        count, rows = len(self.ranks), self.rows_of(kind, rows)
        return [
            self.builder.value(rank, Home(kind, HeadPart(head, count) if count > 1 else None, where), rows, pin)
            for head, rank in enumerate(self.ranks)
        ]

    def rows_of(self, kind: Kind, rows: Rows) -> Rows:
        """Those of some rows of the block that values of a kind have."""
        if kind != Kind.ACC or self.exchange.asking is None:
            return rows
        asking = self.exchange.asking[self.ring_index]
        return Rows(min(rows.start, asking), min(rows.stop, asking))

    def block(self, kind: Kind, where: Where = "device", pin: str | None = None) -> list[Value]:
        """As `parts`, of the whole block."""
        return self.parts(kind, Rows(0, self.exchange.rows[self.ring_index]), where, pin)

    def homes(self, kind: Kind, pin: str, where: Where = "device") -> list[Value]:
        """Pinned values of all heads and all rows that each rank holds between the layers."""
        ends = [self.home_chunk(head, self.exchange.chunks - 1).stop for head in range(len(self.ranks))]
        home = Home(kind, None, where)
        return [self.builder.value(r, home, Rows(0, end), pin) for r, end in zip(self.ranks, ends, strict=True)]

    def home_chunk(self, head: int, chunk: int) -> Rows:
        """Rows of a chunk on one rank of the group, in its own numbers."""
        return self.exchange.home_chunk(self.ring_index, head, chunk)

    def op(self, step: int, phase: Phase, op: OpName, dst: tuple[Value, Rows], src: tuple[Value, Rows] | None) -> None:
        """One op between some rows of two values; nothing if there are no rows."""
        (target, rows), source = dst, src and src[0].view(src[1])
        if rows.start < rows.stop:
            self.builder.op(step, phase, target.rank, LocalOp(op, target.view(rows), source))

    def each(
        self, step: int, op: OpName, dst: Sequence[Value], src: Sequence[Value] | None = None, rows: Rows | None = None
    ) -> None:
        """The same op at the start of a step on every rank, on all rows of dst by default."""
        for index, target in enumerate(dst):
            chosen = rows or target.rows
            self.op(step, "pre", op, (target, chosen), (src[index], chosen) if src else None)

    def gather(
        self,
        span: Span,
        homes: Sequence[Value],
        targets: Sequence[Value],
        chunk: int = 0,
        copied: tuple[int, Phase] | None = None,
    ) -> None:
        """Pieces of a chunk and own heads of them arrive in the targets, through a copy then if these are of another
        kind.
        """
        for head, source, piece in self._pieces(chunk):
            home, target = (homes[source], self.home_chunk(source, chunk)), (targets[head], piece)
            if source == head:
                self.op(*(copied or (span.post, "pre")), "copy", target, home)
                continue
            narrow = Home(homes[source].kind, targets[head].heads)
            packed = self.builder.value(self.ranks[source], narrow, home[1])
            self.op(span.post, "pre", "copy", (packed, packed.rows), home)
            if copied is None:
                self.builder.message_between(*span, Channel.HEADS, (packed, packed.rows), target)
                continue
            arrived = self.builder.value(self.ranks[head], narrow, home[1])
            self.builder.message(*span, Channel.HEADS, packed, arrived, packed.rows)
            self.op(*copied, "copy", target, (arrived, arrived.rows))

    def scatter(self, span: Span, sources: Sequence[Value], homes: Sequence[Value], op: OpName, chunk: int = 0) -> None:
        """Pieces of a chunk go home, where `op` (copy or add) puts their heads in place after the wait."""
        for head, target, piece in self._pieces(chunk):
            home, source = (homes[target], self.home_chunk(target, chunk)), (sources[head], piece)
            if target == head:
                self.op(span.wait, "after", op, home, source)
                continue
            arrived = self.builder.value(self.ranks[target], sources[head].home, home[1])
            self.builder.message_between(*span, Channel.HEADS, source, (arrived, arrived.rows))
            self.op(span.wait, "after", op, home, (arrived, arrived.rows))

    def _pieces(self, chunk: int) -> Iterator[tuple[int, int, Rows]]:
        """(a member, a member that holds a piece with rows, that piece); peers are staggered."""
        heads = len(self.ranks)
        for head in range(heads):
            for other in ((head + distance) % heads for distance in range(heads)):
                piece = self.exchange.piece(self.ring_index, other, chunk)
                if piece.start < piece.stop:
                    yield head, other, piece


def plan_exchanged_forward(exchange: Exchange, attend: Attend, only: Collection[int] | None = None) -> AttentionPlan:
    """Forward plan. Pins q, kv, out (all heads, own piece); ring_q, ring_kv, saved (part of the heads, whole block).

    Run again (`exchange.asking`), `saved` is an input too: the rows that do not ask are there, the others are written.
    """
    work = _Exchanged(exchange, PlanBuilder("forward", exchange.grid.size, only))
    keeps_last = bool(exchange.last_homes)
    query, sums = work.blocks(Kind.Q, "ring_q"), work.blocks(Kind.ACC)
    kv = work.blocks(Kind.KV, None if keeps_last else "ring_kv")
    for group, ring_q, ring_kv in zip(work.groups, query, kv, strict=True):
        group.gather(Span(0, 0), group.homes(Kind.Q, "q"), ring_q)
        group.gather(Span(0, 0), group.homes(Kind.KV, "kv"), ring_kv)
    last = work.attend(attend, query, kv, sums, kv_last=work.last_blocks() if keeps_last else None)
    for group, acc, saved in zip(work.groups, sums, work.blocks(Kind.SAVED, "saved"), strict=True):
        group.each(last, "copy", saved, acc, acc[0].rows)
        out = group.block(Kind.OUT)
        group.each(last, "copy", out, saved)
        group.scatter(Span(last, last), out, group.homes(Kind.OUT, "out"), "copy")
    return work.builder.build()


def plan_exchanged_backward(
    exchange: Exchange, attend: Attend, query_kind: Kind, only: Collection[int] | None = None
) -> AttentionPlan:
    """Backward plan. Pins dout, dq, dkv (all heads, own piece); qx, ring_kv, saved (part of the heads, whole block)."""
    work = _Exchanged(exchange, PlanBuilder("backward", exchange.grid.size, only))
    query = work.blocks(query_kind, "qx")
    kv = work.last_blocks() if exchange.last_homes else work.blocks(Kind.KV, "ring_kv")
    for group, ring_q, saved in zip(work.groups, query, work.blocks(Kind.SAVED, "saved"), strict=True):
        group.gather(Span(0, 0), group.homes(Kind.DOUT, "dout"), ring_q, copied=(0, "after"))
        if query_kind == Kind.QX:
            group.each(1, "stats", ring_q, saved)
    sums, kv_sums = work.blocks(Kind.DQ), work.blocks(Kind.DKV)
    last = work.attend(attend, query, kv, sums, kv_sums)
    for group, ring_dq, ring_dkv in zip(work.groups, sums, kv_sums, strict=True):
        dq = group.block(Kind.DQ_CAST)
        group.each(last, "copy", dq, ring_dq)
        group.scatter(Span(last, last), dq, group.homes(Kind.DQ_CAST, "dq"), "copy")
        homes = group.homes(kv_gradient_kind(exchange), "dkv")
        return_kv(group, Span(last, last), ring_dkv, homes)
    return work.builder.build()


def kv_gradient_kind(exchange: Exchange) -> Kind:
    """Kind of dK and dV at home: complete ones arrive cast, partial ones of replicated heads are summed in fp32."""
    return Kind.DKV if exchange.replicated else Kind.DKV_CAST


def return_kv(group: HeadGroup, span: Span, sums: Sequence[Value], homes: Sequence[Value], chunk: int = 0) -> None:
    """dK and dV of a chunk go home, cast if they are complete; partial ones of replicated heads are summed there."""
    if group.exchange.replicated:
        for head, home in enumerate(homes):
            group.op(span.post, "pre", "init", (home, group.home_chunk(head, chunk)), None)
        travelling = Kind.DKV_WIRE if group.exchange.narrow_gradients else Kind.DKV
    else:
        travelling = Kind.DKV_CAST
    if travelling != Kind.DKV:
        rows = group.exchange.chunk(group.ring_index, chunk)
        cast = group.parts(travelling, rows)
        group.each(span.post, "copy", cast, sums)
        sums = cast
    group.scatter(span, sums, homes, "add" if group.exchange.replicated else "copy", chunk)


class _Exchanged:
    """One plan of whole blocks: its head groups, and the rings between them."""

    def __init__(self, exchange: Exchange, builder: PlanBuilder) -> None:
        self.builder = builder
        self.exchange = exchange
        self.grid = exchange.grid
        self.groups = [HeadGroup(exchange, builder, index) for index in range(self.grid.ring_size)]

    def blocks(self, kind: Kind, pin: str | None = None) -> list[list[Value]]:
        """One value per [ring index][head], of the whole block and part of the heads."""
        return [group.block(kind, pin=pin) for group in self.groups]

    def last_blocks(self) -> list[list[Value]]:
        """K,V of the block that every ring member holds last, for a reversed backward."""
        exchange = self.exchange
        return [
            group.parts(Kind.KV, Rows(0, exchange.rows[home]), pin="kv_last")
            for group, home in zip(self.groups, exchange.last_homes, strict=True)
        ]

    def attend(self, attend: Attend, *operands: list[list[Value]], kv_last: list[list[Value]] | None = None) -> int:
        """Attention of every ring from step 1 on, over query, kv, sums and in backward kv_sums; first step after it."""
        last = 1
        for head in range(self.grid.heads):
            # Inside a ring a value's rank is its index in the ring.
            rings = [_ring_of(blocks, head) for blocks in operands]
            query, kv, sums, *kv_sums = rings
            held = _ring_of(kv_last, head) if kv_last else []
            lane = Lane(self.builder, self.grid.ring(head), first_step=1, heads=HeadPart(head, self.grid.heads))
            attend(lane, Operands(query, kv, sums, kv_sums[0] if kv_sums else [], held))
            last = max(last, lane.last_step)
        return last + 1


def _ring_of(blocks: list[list[Value]], head: int) -> list[Value]:
    """One part of the heads of every block, each with its index in the ring as rank."""
    return [replace(values[head], rank=index) for index, values in enumerate(blocks)]
