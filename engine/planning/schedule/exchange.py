"""Head exchange around a ring: every rank gives up heads and gains rows, attention runs on part of the heads, and back.

A ring member's block lies in pieces on the ranks of its head group. Before attention each of them sends every other
one that one's heads of its own piece; afterwards they hold all rows of the block and 1/heads of the heads each.

    heads=2: piece 0 on rank a, piece 1 on rank b          a: rows of both pieces, heads 0
                                              exchange ->  b: rows of both pieces, heads 1

With chunks every chunk of the block lies in such pieces, and is exchanged by itself (see `chunks`).

An all-to-all made of messages: pieces and parts of heads may be unequal, key and value heads that several ranks need
(more ranks than kv heads) are sent to each, and their gradients are summed at home. What arrives lies where the ring
reads it; only what leaves is copied first. With a ring of one rank this is DeepSpeed-Ulysses (Jacobs et al. 2023), else
LoongTrain's 2D-Attention (Gu et al. 2024) and USP (Fang and Zhao 2024).

Forward keeps ring_q, ring_kv and saved (out, lse) for backward, so that only dout and the gradients are exchanged then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.config.settings import Store
from engine.planning.methods.blocks import Blocks, chunk_count
from engine.planning.methods.presets import AttentionMethod
from engine.planning.methods.topology import Grid
from engine.planning.schedule.allocate import Home, Phase, PlanBuilder, Rows, Span, Value
from engine.planning.schedule.plan import Channel, HeadPart, Kind, OpName
from engine.planning.sequence.layout import piece_rows


@dataclass(frozen=True)
class Exchange:
    """What a head group exchanges: the blocks of ring members, whole or in chunks.

    asking   a forward pass run again: how many first rows of each block ask; of the others, out and lse were kept
    """

    method: AttentionMethod
    blocks: Blocks
    asking: tuple[int, ...] | None = None

    @property
    def grid(self) -> Grid:
        """Places of the ranks."""
        return self.blocks.grid

    @cached_property
    def chunks(self) -> int:
        """Chunks of every block."""
        return chunk_count(self.method, self.blocks.home.seq_len)

    def rows(self, ring_index: int) -> int:
        """Rows of a ring member's block."""
        return self.blocks.ring.row_counts[ring_index]

    def chunk(self, ring_index: int, chunk: int) -> Rows:
        """Rows of one chunk of a ring member's block."""
        return Rows(*piece_rows(self.rows(ring_index), 1, self.chunks, 0, chunk))

    def piece(self, ring_index: int, head: int, chunk: int = 0) -> Rows:
        """Rows of a chunk of a ring member's block that the rank of its head group numbered `head` holds."""
        return Rows(*piece_rows(self.rows(ring_index), self.grid.heads, self.chunks, head, chunk))


class HeadGroup:
    """The ranks that hold the pieces of one ring member's block; lists of values have one per rank, in order.

    Values of part of the heads are numbered by the block's rows, those of all heads by the rank's own.
    """

    def __init__(self, exchange: Exchange, builder: PlanBuilder, ring_index: int) -> None:
        self.exchange = exchange
        self.builder = builder
        self.ring_index = ring_index
        self._home_chunks: dict[tuple[int, int], Rows] = {}
        self.ranks = exchange.grid.head_group(ring_index)
        self.planned_heads = [head for head, rank in enumerate(self.ranks) if rank in builder.kept]

    def parts(self, kind: Kind, rows: Rows, where: Store = "device", pin: str | None = None) -> list[Value]:
        """Values of the ranks' parts of the heads.

        Sums of out and lse (ACC) have only those of the rows that ask.
        """
        count, rows = len(self.ranks), self.rows_of(kind, rows)
        return [
            self.builder.value(rank, Home(kind, HeadPart(head, count), where), rows, pin)
            for head, rank in enumerate(self.ranks)
        ]

    def rows_of(self, kind: Kind, rows: Rows) -> Rows:
        """Those of some rows of the block that values of a kind have."""
        if kind != Kind.ACC or self.exchange.asking is None:
            return rows
        asking = self.exchange.asking[self.ring_index]
        return Rows(min(rows.start, asking), min(rows.stop, asking))

    def block(self, kind: Kind, where: Store = "device", pin: str | None = None) -> list[Value]:
        """As `parts`, of the whole block."""
        return self.parts(kind, Rows(0, self.exchange.rows(self.ring_index)), where, pin)

    def homes(self, kind: Kind, pin: str, where: Store = "device") -> list[Value]:
        """Pinned values of all heads and all rows that each rank holds between the layers."""
        ends = [self.home_chunk(head, self.exchange.chunks - 1).stop for head in range(len(self.ranks))]
        home = Home(kind, where=where)
        return [self.builder.value(r, home, Rows(0, end), pin) for r, end in zip(self.ranks, ends, strict=True)]

    def home_chunk(self, head: int, chunk: int) -> Rows:
        """Rows of a chunk on one rank of the group, in its own numbers: its pieces of all chunks follow each other."""
        key = head, chunk
        if key not in self._home_chunks:
            start = self.home_chunk(head, chunk - 1).stop if chunk else 0
            first, stop = self.exchange.piece(self.ring_index, head, chunk)
            self._home_chunks[key] = Rows(start, start + stop - first)
        return self._home_chunks[key]

    def each(
        self, step: int, op: OpName, dst: Sequence[Value], src: Sequence[Value] | None = None, rows: Rows | None = None
    ) -> None:
        """The same op at the start of a step on every rank, on all rows of dst by default."""
        for index, target in enumerate(dst):
            chosen = rows or target.rows
            self.builder.op(step, "pre", op, (target, chosen), (src[index], chosen) if src else None)

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
                self.builder.op(*(copied or (span.post, "pre")), "copy", target, home)
                continue
            narrow = Home(homes[source].kind, targets[head].home.heads)
            packed = self.builder.value(self.ranks[source], narrow, home[1])
            self.builder.op(span.post, "pre", "copy", packed.whole, home)
            if copied is None:
                self.builder.message(*span, Channel.HEADS, packed.whole, target)
                continue
            arrived = self.builder.value(self.ranks[head], narrow, home[1])
            self.builder.message(*span, Channel.HEADS, packed.whole, arrived.whole)
            self.builder.op(*copied, "copy", target, arrived.whole)

    def scatter(self, span: Span, sources: Sequence[Value], homes: Sequence[Value], op: OpName, chunk: int = 0) -> None:
        """Pieces of a chunk go home, where `op` (copy or add) puts their heads in place after the wait."""
        for head, target, piece in self._pieces(chunk):
            home, source = (homes[target], self.home_chunk(target, chunk)), (sources[head], piece)
            if target == head:
                self.builder.op(span.wait, "after", op, home, source)
                continue
            arrived = self.builder.value(self.ranks[target], sources[head].home, home[1])
            self.builder.message(*span, Channel.HEADS, source, arrived.whole)
            self.builder.op(span.wait, "after", op, home, arrived.whole)

    def _pieces(self, chunk: int) -> Iterator[tuple[int, int, Rows]]:
        """(a member, a member that holds a piece with rows, that piece), one of them planned; peers are staggered."""
        heads = len(self.ranks)
        for head in range(heads):
            met = range(heads) if head in self.planned_heads else self.planned_heads
            for other in sorted(met, key=lambda other, head=head: (other - head) % heads):
                piece = self.exchange.piece(self.ring_index, other, chunk)
                if piece.start < piece.stop:
                    yield head, other, piece


def planned_groups(exchange: Exchange, builder: PlanBuilder) -> dict[int, HeadGroup]:
    """The groups with a planned rank, by ring index: what stays on others is their affair."""
    members = sorted({exchange.grid.place(rank)[0] for rank in builder.kept})
    return {member: HeadGroup(exchange, builder, member) for member in members}


def kv_gradient_kind(method: AttentionMethod) -> Kind:
    """Kind of dK and dV at home: complete ones arrive cast, partial ones of replicated heads are summed in fp32."""
    return Kind.DKV if method.kv_replicated else Kind.DKV_CAST


def return_kv(group: HeadGroup, span: Span, sums: Sequence[Value], homes: Sequence[Value], chunk: int = 0) -> None:
    """dK and dV of a chunk go home, cast if they are complete; partial ones of replicated heads are summed there."""
    method = group.exchange.method
    if method.kv_replicated:
        for head, home in enumerate(homes):
            group.builder.op(span.post, "pre", "init", (home, group.home_chunk(head, chunk)))
        travelling = Kind.DKV if method.gradient_wire_dtype == "float32" else Kind.DKV_WIRE
    else:
        travelling = Kind.DKV_CAST
    if travelling != Kind.DKV:
        rows = group.exchange.chunk(group.ring_index, chunk)
        cast = group.parts(travelling, rows)
        group.each(span.post, "copy", cast, sums)
        sums = cast
    group.scatter(span, sums, homes, "add" if method.kv_replicated else "copy", chunk)
