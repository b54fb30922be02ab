"""DeepSpeed-Ulysses (Jacobs et al. 2023): ranks exchange rows for heads before attention, and heads for rows behind it.

    heads=2: piece 0 on rank a, piece 1 on rank b          a: rows of both pieces, heads 0
                                              exchange ->  b: rows of both pieces, heads 1

An all-to-all made of messages, so pieces and parts of heads may be unequal; kv heads that several ranks need go to
each, and their gradients are summed at home. Around a ring it is LoongTrain's 2D-Attention (Gu et al. 2024) and USP
(Fang and Zhao 2024). Every chunk lies in pieces and is exchanged by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from engine.config.settings import Store
from engine.planning.program.buffers import Rows, Value
from engine.planning.program.ops import Channel, HeadPart, Kind, OpName
from engine.planning.program.program import Program, When


@dataclass
class HeadGroup:
    """The ranks that hold the pieces [chunk][member] of a ring member's block; `me` is one of them.

    Values of all heads have rows as the rank holds them between the layers: its pieces of all chunks in order.
    """

    program: Program
    ranks: tuple[int, ...]
    pieces: list[list[Rows]]
    me: int
    store: Store = "device"
    lead: int = 1  # steps that an exchange takes
    _arguments: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ends = accumulate((_length(of_chunk[self.me]) for of_chunk in self.pieces), initial=0)
        self.home_rows = [Rows(start, stop) for start, stop in pairwise(ends)]

    @property
    def exchanges(self) -> bool:
        """Whether there are others."""
        return len(self.ranks) > 1

    def heads(self, member: int) -> HeadPart:
        """Of a member."""
        return HeadPart(member, len(self.ranks))

    def home(self, kind: Kind, argument: str) -> Value:
        """All heads of the own rows, an input or output; made once."""
        if argument not in self._arguments:
            self._arguments[argument] = self.program.value(
                kind, Rows(0, self.home_rows[-1].stop), argument, where=self.store
            )
        return self._arguments[argument]

    def to_heads(self, chunk: int, step: int, home: Value, target: Value) -> None:
        """All rows of a chunk, own heads, are in `target` at a step; through a copy if it holds more than these."""
        when, copied, own = When(step - self.lead, step - 1), target.kind != home.kind, self.home_rows[chunk]
        if self.store == "host":
            host, home = home, self.program.value(home.kind, own)
            self.program.move(host, home, own, When(step - 2 * self.lead, step - self.lead - 1))
        if _length(own):
            self.program.before(step if copied else when.post, "copy", target, home, self.pieces[chunk][self.me], own)
        for other in self._others():
            if _length(own):
                packed = self.program.value(home.kind, own, heads=self.heads(other))
                self.program.before(when.post, "copy", packed, home, own)
                self.program.send(packed, own, self.ranks[other], Channel.HEADS, when)
            if _length(rows := self.pieces[chunk][other]):
                into, heads = None if copied else target, self.heads(self.me)
                arrived = self.program.recv(home.kind, rows, self.ranks[other], Channel.HEADS, when, 0, into, heads)
                if copied:
                    self.program.before(step, "copy", target, arrived, rows)

    def to_rows(self, chunk: int, step: int, kind: Kind, source: Value, home: Value, op: OpName = "copy") -> None:
        """All heads of the own rows of a chunk are at home behind a step: copied, or added to what others send."""
        if source.kind != kind:
            cast = self.program.value(kind, self.chunk_rows(chunk), heads=self.heads(self.me))
            self.program.before(step, "copy", cast, source)
            source = cast
        when, own, target = When(step, step + self.lead - 1), self.home_rows[chunk], home
        if self.store == "host":
            target = self.program.value(home.kind, own)
        if _length(own):
            self.program.after(when.wait, op, target, source, own, self.pieces[chunk][self.me])
        for other in self._others():
            if _length(rows := self.pieces[chunk][other]):
                self.program.send(source, rows, self.ranks[other], Channel.HEADS, when)
            if _length(own):
                arrived = self.program.recv(kind, own, self.ranks[other], Channel.HEADS, when, heads=self.heads(other))
                self.program.after(when.wait, op, target, arrived, own)
        if self.store == "host":
            self.program.move(target, home, own, When(when.wait + 1, when.wait + 1))

    def chunk_rows(self, chunk: int) -> Rows:
        """Of the block."""
        return Rows(self.pieces[chunk][0].start, self.pieces[chunk][-1].stop)

    def _others(self) -> Iterator[int]:
        """Staggered, so that no rank is everybody's first."""
        count = len(self.ranks)
        return ((self.me + n) % count for n in range(1, count))


def _length(rows: Rows) -> int:
    return rows.stop - rows.start
