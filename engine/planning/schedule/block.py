"""One ring member's block on the ranks of its head group: the pieces and chunks it is cut into, how they come and go.

Head exchange. The block lies in pieces on the ranks of the head group. Before attention each of them sends every other
one that one's heads of its own piece; afterwards they hold all rows of the block and 1/heads of the heads each.

    heads=2: piece 0 on rank a, piece 1 on rank b          a: rows of both pieces, heads 0
                                              exchange ->  b: rows of both pieces, heads 1

An all-to-all made of messages: pieces and parts of heads may be unequal, key and value heads that several ranks need
(more ranks than kv heads) are sent to each, and their gradients are summed at home. What arrives lies where the ring
reads it; only what leaves is copied first. With a ring of one rank this is DeepSpeed-Ulysses (Jacobs et al. 2023), else
LoongTrain's 2D-Attention (Gu et al. 2024) and USP (Fang and Zhao 2024).

Chunks. Every chunk of the block lies in such pieces and is exchanged by itself. It is fetched `prefetch` tiles ahead of
its use, and one that is needed again before it could be stored and fetched stays on the device (a store and the next
fetch of its rows must not overlap):

    needed at    step 3, 4 and 9; lead 1      | fetch at 2 | 3 | 4 | store at 5 |    | fetch at 8 | 9 |
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from engine.config.settings import Store
from engine.planning.methods.blocks import Blocks
from engine.planning.methods.presets import AttentionMethod
from engine.planning.schedule.allocate import Home, PlanBuilder, Rows, Span, Value
from engine.planning.schedule.plan import Channel, HeadPart, Kind, OpName

Values = list[Value]  # one per rank of a head group, in order
Arrive = Callable[[int, int, Values], object]  # (chunk, step, values): fill a chunk before `step`
Finish = Callable[[int, int, Values], object]  # (chunk, step, values): a sum is complete after `step`


class Residency(NamedTuple):
    """Steps [first, last] through which a chunk is on the device; its first residency opens, its last closes."""

    chunk: int
    first: int
    last: int
    opens: bool = True
    closes: bool = True


def residencies(uses: Iterable[tuple[int, int]], lead: int) -> list[Residency]:
    """Residencies of chunks that are used at (step, chunk), steps ascending; fetches take `lead` steps."""
    steps_of: defaultdict[int, list[int]] = defaultdict(list)
    for step, chunk in uses:
        steps_of[chunk].append(step)
    result = []
    for chunk, steps in steps_of.items():
        # Stored during the step after a use, a chunk can be fetched from the step after that.
        cuts = [n for n, (before, after) in enumerate(pairwise(steps), 1) if after - lead >= before + 2]
        for start, stop in pairwise([0, *cuts, len(steps)]):
            result.append(Residency(chunk, steps[start], steps[stop - 1], start == 0, stop == len(steps)))
    return sorted(result, key=lambda stay: stay.first)


class Held:
    """Values of chunks, by the step from which on each is on the device."""

    def __init__(self) -> None:
        self._first: defaultdict[int, list[int]] = defaultdict(list)
        self._values: defaultdict[int, list[Values]] = defaultdict(list)

    def add(self, stay: Residency, values: Values) -> None:
        """The values of a residency; those of a chunk ascend."""
        self._first[stay.chunk].append(stay.first)
        self._values[stay.chunk].append(values)

    def at(self, chunk: int, step: int) -> Values:
        """Values of a chunk at a step of one of its residencies."""
        return self._values[chunk][bisect_right(self._first[chunk], step) - 1]


class Block:
    """The chunks of a ring member's block on all ranks of its head group.

    Values of part of the heads are numbered by the block's rows, those of all heads by the rank's own.

    asking   a forward pass run again: how many first rows ask; of the others, out and lse were kept. None: all ask
    """

    def __init__(
        self, method: AttentionMethod, blocks: Blocks, builder: PlanBuilder, member: int, asking: int | None = None
    ) -> None:
        self.builder = builder
        self.ranks = blocks.grid.head_group(member)
        self.planned_heads = [head for head, rank in enumerate(self.ranks) if rank in builder.kept]
        self.exchanged = len(self.ranks) > 1
        self.chunks = blocks.chunks
        self.store = method.chunk_store  # of chunks that are not worked on
        self.host = self.store == "host"
        self.lead = max(1, method.prefetch_chunks)  # steps that a fetch takes
        self._asking = asking
        self._blocks, self.member = blocks, member
        self._pinned: dict[str, Values] = {}

    # ---- rows and values ----------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> list[Rows]:
        """Rows of every chunk."""
        return [self._blocks.piece(self.member, chunk) for chunk in range(self.chunks)]

    def rows_of(self, kind: Kind, rows: Rows) -> Rows:
        """Those of some rows that values of a kind have: sums of out and lse (ACC) only those of the rows that ask."""
        if kind != Kind.ACC or self._asking is None:
            return rows
        return Rows(min(rows.start, self._asking), min(rows.stop, self._asking))

    @cached_property
    def pieces(self) -> list[list[Rows]]:
        """Rows [chunk][head] that the ranks of the group hold between the layers."""
        heads = len(self.ranks)
        return [
            [self._blocks.piece(self.member, chunk, head, heads) for head in range(heads)]
            for chunk in range(self.chunks)
        ]

    @cached_property
    def home_rows(self) -> list[list[Rows]]:
        """As `pieces`, in each rank's own numbers: its pieces of all chunks follow each other."""
        found, ends = [], [0] * len(self.ranks)
        for pieces in self.pieces:
            starts, ends = ends, [end + piece.stop - piece.start for end, piece in zip(ends, pieces, strict=True)]
            found.append(list(map(Rows, starts, ends)))
        return found

    def values(self, kind: Kind, rows: Rows, where: Store = "device", pin: str | None = None) -> Values:
        """Values of the ranks' parts of the heads."""
        rows, count = self.rows_of(kind, rows), len(self.ranks)
        homes = (Home(kind, HeadPart(head, count), where) for head in range(count))
        return [self.builder.value(rank, home, rows, pin) for rank, home in zip(self.ranks, homes, strict=True)]

    def whole(self, kind: Kind, pin: str | None = None, rows: int | None = None) -> Values:
        """Values of the whole block, or of so many rows, where chunks are stored; those of a pin are made once."""
        every = Rows(0, self._blocks.ring.row_counts[self.member] if rows is None else rows)
        if pin is None:
            return self.values(kind, every, self.store)
        if pin not in self._pinned:
            self._pinned[pin] = self.values(kind, every, self.store, pin)
        return self._pinned[pin]

    def part(self, kind: Kind, chunk: int) -> Values:
        """Values of one chunk on the device."""
        return self.values(kind, self.rows[chunk])

    def homes(self, kind: Kind, pin: str) -> Values:
        """Pinned values of all heads and all rows that each rank holds between the layers, made once."""
        if pin not in self._pinned:
            ends = [self.home_rows[self.chunks - 1][head].stop for head in range(len(self.ranks))]
            home = Home(kind, where=self.store)
            values = [self.builder.value(r, home, Rows(0, end), pin) for r, end in zip(self.ranks, ends, strict=True)]
            self._pinned[pin] = values
        return self._pinned[pin]

    def each(
        self, step: int, op: OpName, dst: Sequence[Value], src: Sequence[Value] | None = None, rows: Rows | None = None
    ) -> None:
        """The same op at the start of a step on every rank, on all rows of dst by default."""
        for index, target in enumerate(dst):
            chosen = rows or target.rows
            self.builder.op(step, "pre", op, (target, chosen), (src[index], chosen) if src else None)

    # ---- chunks on the device -----------------------------------------------------------------------------------

    def move(self, span: Span, source: Sequence[Value], target: Sequence[Value], rows: Rows) -> None:
        """Load or store some rows."""
        for src, dst in zip(source, target, strict=True):
            if rows.start < rows.stop:
                self.builder.move(*span, src, dst, rows)

    def load(self, step: int, source: Sequence[Value], kind: Kind, chunk: int) -> Values:
        """The chunk on the device from `step` on; the source itself if it lies there."""
        if not self.host:
            return list(source)
        values = self.part(kind, chunk)
        self.move(Span(step - self.lead, step - 1), source, values, self.rows[chunk])
        return values

    def read(
        self, planned: Iterable[Residency], whole: Values, arrive: Arrive | None = None, *, keep: bool = True
    ) -> Held:
        """Brings chunks of an operand for their residencies.

        arrive   fills a chunk where it is used first; without it the operand is given whole
        keep     what arrived is stored even if this plan does not need it again
        """
        held = Held()
        for stay in planned:
            if stay.opens and arrive:
                values = self.part(whole[0].kind, stay.chunk) if self.host else whole
                arrive(stay.chunk, stay.first, values)
                if self.host and (keep or not stay.closes):
                    self.move(Span(stay.first, stay.first), values, whole, self.rows[stay.chunk])
            else:
                values = self.load(stay.first, whole, whole[0].kind, stay.chunk)
            held.add(stay, values)
        return held

    def sum(self, planned: Iterable[Residency], whole: Values, finish: Finish | None = None) -> Held:
        """Brings chunks of a sum for their residencies, stores them in between.

        finish   takes a complete chunk; without it sums are formed in `whole` for good
        """
        held = Held()
        for stay in planned:
            alone = self.host or (stay.opens and stay.closes and finish is not None)
            values = self.part(whole[0].kind, stay.chunk) if alone else whole
            rows = self.rows_of(whole[0].kind, self.rows[stay.chunk])
            if self.host and not stay.opens:
                self.move(Span(stay.first - self.lead, stay.first - 1), whole, values, rows)
            if finish is not None and stay.closes:
                finish(stay.chunk, stay.last, values)
            elif self.host:
                self.move(Span(stay.last + 1, stay.last + 1), values, whole, rows)
            held.add(stay, values)
        return held

    def put(self, step: int, source: Sequence[Value], whole: Values, chunk: int) -> Values:
        """Cast a chunk into `whole` at `step`; the cast values on the device.

        If only the first rows are cast, the others are in `whole`, and come from there where all will be sent.
        """
        values = self.part(whole[0].kind, chunk) if self.host else whole
        every, rows = self.rows[chunk], self.rows_of(source[0].kind, self.rows[chunk])
        if self.host and self.exchanged:
            self.move(Span(step - self.lead, step - 1), whole, values, Rows(rows.stop, every.stop))
        self.each(step, "copy", values, source, rows)
        if self.host:
            self.move(Span(step, step), values, whole, rows)
        return values

    # ---- head exchange ------------------------------------------------------------------------------------------

    def gather(self, chunk: int, step: int, homes: Values, targets: Values) -> None:
        """All pieces of a chunk, own heads, are in the targets at `step`; through a copy then, if these are of another
        kind.
        """
        span, copied = Span(step - self.lead, step - 1), targets[0].kind != homes[0].kind
        if self.host:
            homes = self._home_chunks(chunk, homes, Span(step - 2 * self.lead, step - self.lead - 1))
        for head, source, piece in self._exchanges(chunk):
            home, target = (homes[source], self.home_rows[chunk][source]), (targets[head], piece)
            if source == head:
                self.builder.op(step if copied else span.post, "pre", "copy", target, home)
                continue
            narrow = Home(homes[source].kind, targets[head].home.heads)
            packed = self.builder.value(self.ranks[source], narrow, home[1])
            self.builder.op(span.post, "pre", "copy", packed.whole, home)
            arrived = self.builder.value(self.ranks[head], narrow, home[1]).whole if copied else target
            self.builder.message(*span, Channel.HEADS, packed.whole, arrived)
            if copied:
                self.builder.op(step, "pre", "copy", target, arrived)

    def send_home(self, step: int, kind: Kind, sources: Values, homes: Values, chunk: int, op: OpName = "copy") -> None:
        """Pieces of a chunk go home from `step` on, as `kind`, where `op` puts their heads in place: copy, or add to
        what others send; and from there to where they are stored.
        """
        span = Span(step, step + self.lead - 1)
        if sources[0].kind != kind:
            cast = self.part(kind, chunk)
            self.each(step, "copy", cast, sources)
            sources = cast
        targets = self._home_chunks(chunk, homes) if self.host else homes
        for head, holder, piece in self._exchanges(chunk):
            home, source = (targets[holder], self.home_rows[chunk][holder]), (sources[head], piece)
            if holder != head:
                arrived = self.builder.value(self.ranks[holder], sources[head].home, home[1])
                self.builder.message(*span, Channel.HEADS, source, arrived.whole)
                source = arrived.whole
            self.builder.op(span.wait, "after", op, home, source)
        if self.host:
            for target, home_value in zip(targets, homes, strict=True):
                if target.rows.start < target.rows.stop:
                    self.builder.move(span.wait + 1, span.wait + 1, target, home_value, target.rows)

    def _home_chunks(self, chunk: int, homes: Values, loaded: Span | None = None) -> Values:
        """A chunk of all heads on the device of every rank that holds a piece of it, loaded from `homes` then."""
        values = []
        for head, rank in enumerate(self.ranks):
            rows = self.home_rows[chunk][head]
            values.append(self.builder.value(rank, Home(homes[head].kind), rows))
            if loaded and rows.start < rows.stop:
                self.builder.move(*loaded, homes[head], values[-1], rows)
        return values

    def _exchanges(self, chunk: int) -> Iterator[tuple[int, int, Rows]]:
        """(a member, a member that holds a piece with rows, that piece), one of them planned; peers are staggered."""
        heads = len(self.ranks)
        for head in range(heads):
            met = range(heads) if head in self.planned_heads else self.planned_heads
            for other in sorted(met, key=lambda other, head=head: (other - head) % heads):
                piece = self.pieces[chunk][other]
                if piece.start < piece.stop:
                    yield head, other, piece
