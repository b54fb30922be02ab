"""Chunks of one ring member's block: how long each is on the device, and how it comes and goes.

A chunk is fetched `prefetch` tiles ahead of its use, and one that is needed again before it could be stored and fetched
stays on the device (a store and the next fetch of its rows must not overlap):

    needed at    step 3, 4 and 9; lead 1      | fetch at 2 | 3 | 4 | store at 5 |    | fetch at 8 | 9 |
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from engine.planning.schedule.allocate import Home, Rows, Span, Value
from engine.planning.schedule.exchange import HeadGroup
from engine.planning.schedule.plan import Kind

Arrive = Callable[[int, int, list[Value]], object]  # (chunk, step, values): fill a chunk before `step`
Finish = Callable[[int, int, list[Value]], object]  # (chunk, step, values): a sum is complete after `step`


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
        self._values: defaultdict[int, list[list[Value]]] = defaultdict(list)

    def add(self, stay: Residency, values: list[Value]) -> None:
        """The values of a residency; those of a chunk ascend."""
        self._first[stay.chunk].append(stay.first)
        self._values[stay.chunk].append(values)

    def at(self, chunk: int, step: int) -> list[Value]:
        """Values of a chunk at a step of one of its residencies."""
        return self._values[chunk][bisect_right(self._first[chunk], step) - 1]


class Block:
    """One ring member's chunks on all ranks of its head group: where they lie, and how they come and go."""

    def __init__(self, group: HeadGroup) -> None:
        method = group.exchange.method
        self.group = group
        self.store = method.chunk_store  # of chunks that are not worked on
        self.host = self.store == "host"
        self.lead = max(1, method.prefetch_chunks)  # steps that a fetch takes
        self.exchanged = len(group.ranks) > 1
        self._rows = [group.exchange.chunk(group.ring_index, chunk) for chunk in range(self.count)]

    @property
    def count(self) -> int:
        """Chunks, empty ones included."""
        return self.group.exchange.chunks

    def rows(self, chunk: int) -> Rows:
        """Rows of a chunk."""
        return self._rows[chunk]

    def asking_rows(self, chunk: int) -> Rows:
        """Rows of a chunk that ask; fewer than it has, or none, where forward runs again for the first rows."""
        return self.group.rows_of(Kind.ACC, self.rows(chunk))

    def whole(self, kind: Kind, pin: str | None = None) -> list[Value]:
        """Values of the whole block where chunks are stored."""
        return self.group.block(kind, self.store, pin)

    def part(self, kind: Kind, chunk: int) -> list[Value]:
        """Values of one chunk on the device."""
        return self.group.parts(kind, self.rows(chunk))

    def move(self, span: Span, source: Sequence[Value], target: Sequence[Value], rows: Rows) -> None:
        """Load or store some rows."""
        for src, dst in zip(source, target, strict=True):
            if rows.start < rows.stop:
                self.group.builder.move(*span, src, dst, rows)

    def load(self, step: int, source: Sequence[Value], kind: Kind, chunk: int) -> list[Value]:
        """The chunk on the device from `step` on; the source itself if it lies there."""
        if not self.host:
            return list(source)
        values = self.part(kind, chunk)
        self.move(Span(step - self.lead, step - 1), source, values, self.rows(chunk))
        return values

    def read(
        self, planned: Iterable[Residency], whole: list[Value], arrive: Arrive | None = None, *, keep: bool = True
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
                    self.move(Span(stay.first, stay.first), values, whole, self.rows(stay.chunk))
            else:
                values = self.load(stay.first, whole, whole[0].kind, stay.chunk)
            held.add(stay, values)
        return held

    def sum(self, planned: Iterable[Residency], whole: list[Value], finish: Finish, *, in_place: bool = False) -> Held:
        """Brings chunks of a sum for their residencies, starts them at zero, stores them in between.

        in_place: on the device, sums are formed in `whole`, and no chunk of its own is needed.
        """
        held = Held()
        for stay in planned:
            alone = self.host or (stay.opens and stay.closes and not in_place)
            values = self.part(whole[0].kind, stay.chunk) if alone else whole
            rows = self.group.rows_of(whole[0].kind, self.rows(stay.chunk))
            if stay.opens:
                self.group.each(stay.first, "init", values, rows=rows)
            elif self.host:
                self.move(Span(stay.first - self.lead, stay.first - 1), whole, values, rows)
            if stay.closes:
                finish(stay.chunk, stay.last, values)
            elif self.host:
                self.move(Span(stay.last + 1, stay.last + 1), values, whole, rows)
            held.add(stay, values)
        return held

    def put(self, step: int, source: Sequence[Value], whole: list[Value], chunk: int) -> list[Value]:
        """Cast a chunk into `whole` at `step`; the cast values on the device.

        If only the first rows are cast, the others are in `whole`, and come from there where all will be sent.
        """
        values = self.part(whole[0].kind, chunk) if self.host else whole
        every, rows = self.rows(chunk), self.group.rows_of(source[0].kind, self.rows(chunk))
        if self.host and self.exchanged:
            self.move(Span(step - self.lead, step - 1), whole, values, Rows(rows.stop, every.stop))
        self.group.each(step, "copy", values, source, rows)
        if self.host:
            self.move(Span(step, step), values, whole, rows)
        return values

    # ---- head exchange ------------------------------------------------------------------------------------------

    def gather(
        self, kind: Kind, homes: list[Value], chunk: int, step: int, targets: list[Value], *, copied: bool = False
    ) -> None:
        """All pieces of a chunk, own heads, are in the targets at `step`."""
        lead = self.lead
        if self.host:
            homes = self._home_chunks(kind, chunk, homes, Span(step - 2 * lead, step - lead - 1))
        when = (step, "pre") if copied else None
        self.group.gather(Span(step - lead, step - 1), homes, targets, chunk, when)  # type: ignore[arg-type]

    def scatter(self, step: int, homes: list[Value], chunk: int, send: Callable[[Span, list[Value]], None]) -> None:
        """`send` brings a chunk home from `step` on; from there it goes to where it is stored."""
        done = step + self.lead - 1
        if not self.host:
            send(Span(step, done), homes)
            return
        arrived = self._home_chunks(homes[0].kind, chunk)
        send(Span(step, done), arrived)
        for source, target in zip(arrived, homes, strict=True):
            if source.rows.start < source.rows.stop:
                self.group.builder.move(done + 1, done + 1, source, target, source.rows)

    def _home_chunks(
        self, kind: Kind, chunk: int, homes: list[Value] | None = None, span: Span | None = None
    ) -> list[Value]:
        """A chunk of all heads on the device of every rank that holds a piece of it, loaded from `homes` if given."""
        values = []
        for head, rank in enumerate(self.group.ranks):
            rows = self.group.home_chunk(head, chunk)
            values.append(self.group.builder.value(rank, Home(kind), rows))
            if homes and span and rows.start < rows.stop:
                self.group.builder.move(*span, homes[head], values[-1], rows)
        return values
