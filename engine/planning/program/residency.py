"""When chunks of one rank's block are on the device: from their uses to loads and stores.

A chunk is fetched `lead` steps before its use. One that is needed again before it could be stored and fetched stays,
for a store and the next fetch of its rows must not overlap:

    used at step 3, 4 and 9, lead 1      | fetch at 2 | 3 | 4 | store at 5 |    | fetch at 8 | 9 |
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from engine.config.settings import Store
from engine.planning.program.buffers import Rows, Value
from engine.planning.program.ops import HeadPart, Kind, OpName
from engine.planning.program.program import Program, When

Fill = Callable[[int, int, Value], object]  # (chunk, step, value): emits ops that fill a chunk before `step`
Finish = Callable[[int, int, Value], object]  # (chunk, step, value): emits ops that use a sum complete after `step`


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
    return sorted(result, key=lambda residency: residency.first)


class ResidentChunks:
    """Values of chunks, by the step from which on each is on the device."""

    def __init__(self) -> None:
        self._first: defaultdict[int, list[int]] = defaultdict(list)
        self._values: defaultdict[int, list[Value]] = defaultdict(list)

    def add(self, residency: Residency, value: Value) -> None:
        """The value of a residency; those of a chunk ascend."""
        self._first[residency.chunk].append(residency.first)
        self._values[residency.chunk].append(value)

    def at(self, chunk: int, step: int) -> Value:
        """Value of a chunk at a step of one of its residencies."""
        return self._values[chunk][bisect_right(self._first[chunk], step) - 1]


@dataclass
class ChunkedBlock:
    """Chunks `rows` of one rank's block: on the device while they are used, else in `store`.

    query_rows   forward again: how many first rows are computed, out and lse of the others were saved; None: all
    """

    program: Program
    owner: int  # ring rank
    rows: list[Rows]
    heads: HeadPart
    store: Store
    lead: int
    query_rows: int | None = None
    _arguments: dict[str, Value] = field(default_factory=dict)

    @property
    def on_host(self) -> bool:
        """Whether chunks that are not used are in host memory."""
        return self.store == "host"

    def rows_of(self, kind: Kind, rows: Rows) -> Rows:
        """Those of some rows that a value of a kind has: partial out and lse only of queries that are computed."""
        if kind != Kind.PARTIAL or self.query_rows is None:
            return rows
        return Rows(min(rows.start, self.query_rows), min(rows.stop, self.query_rows))

    def whole(self, kind: Kind, argument: str | None = None) -> Value:
        """The whole block, where chunks are stored; one of each argument."""
        if argument in self._arguments:
            return self._arguments[argument]
        rows = self.rows_of(kind, Rows(0, self.rows[-1].stop))
        value = self.program.value(kind, rows, argument, owner=self.owner, heads=self.heads, where=self.store)
        if argument is not None:
            self._arguments[argument] = value
        return value

    def part(self, kind: Kind, chunk: int) -> Value:
        """One chunk on the device."""
        return self.program.value(kind, self.rows_of(kind, self.rows[chunk]), owner=self.owner, heads=self.heads)

    def load(self, step: int, source: Value, kind: Kind, chunk: int) -> Value:
        """The chunk on the device from `step` on; the source itself if it is there."""
        if not self.on_host:
            return source
        value = self.part(kind, chunk)
        self.program.move(source, value, self.rows[chunk], When(step - self.lead, step - 1))
        return value

    def read(
        self, planned: Iterable[Residency], whole: Value, fill: Fill | None = None, *, always_store: bool = True
    ) -> ResidentChunks:
        """Bring chunks of an operand for their residencies.

        fill           fills a chunk before its first use; None: the whole operand is an argument
        always_store   store filled chunks even if this pass does not need them again
        """
        resident = ResidentChunks()
        for residency in planned:
            if residency.opens and fill:
                value = self.part(whole.kind, residency.chunk) if self.on_host else whole
                fill(residency.chunk, residency.first, value)
                if self.on_host and (always_store or not residency.closes):
                    self.program.move(value, whole, self.rows[residency.chunk], When(residency.first, residency.first))
            else:
                value = self.load(residency.first, whole, whole.kind, residency.chunk)
            resident.add(residency, value)
        return resident

    def sum(self, planned: Iterable[Residency], whole: Value, finish: Finish | None) -> ResidentChunks:
        """Bring chunks of a sum for their residencies, store them in between; `finish` takes a complete one."""
        resident = ResidentChunks()
        for residency in planned:
            alone = self.on_host or (residency.opens and residency.closes and finish is not None)
            value = self.part(whole.kind, residency.chunk) if alone else whole
            rows = self.rows_of(whole.kind, self.rows[residency.chunk])
            if self.on_host and not residency.opens:
                self.program.move(whole, value, rows, When(residency.first - self.lead, residency.first - 1))
            if residency.closes and finish is not None:
                finish(residency.chunk, residency.last, value)
            elif self.on_host:
                self.program.move(value, whole, rows, When(residency.last + 1, residency.last + 1))
            resident.add(residency, value)
        return resident

    def put(self, step: int, op: OpName, source: Value, whole: Value, chunk: int, *, all_rows: bool = False) -> Value:
        """Copy or finish a chunk into `whole` at a step; the new value on the device.

        all_rows   if only the first rows are written, the value has the others too, from `whole`
        """
        value = self.part(whole.kind, chunk) if self.on_host else whole
        every, rows = self.rows[chunk], self.rows_of(source.kind, self.rows[chunk])
        if self.on_host and all_rows:
            self.program.move(whole, value, Rows(rows.stop, every.stop), When(step - self.lead, step - 1))
        self.program.before(step, op, value, source, rows)
        if self.on_host:
            self.program.move(value, whole, rows, When(step, step))
        return value
