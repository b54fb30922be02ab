"""What a schedule is given: a rank's place in the rings, its own block, and what a tile is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from engine.planning.program.buffers import Rows, Value
from engine.planning.program.ops import Channel, HeadPart, Kind
from engine.planning.program.program import Program, When
from engine.planning.schedules.ring_grid import Lap, RingGrid, RowsNeeded


class RingStep(NamedTuple):
    """The block of `owner` is at a stop of a lap, at `step`."""

    lap: int
    stop: int
    owner: int
    step: int

    @property
    def place(self) -> tuple[int, int, int]:
        """Owner, lap and stop."""
        return self.owner, self.lap, self.stop


@dataclass(frozen=True)
class RankPass:
    """One pass of ring member `me`: what travels (`payload`: the own block of it) meets what stays.

    tile           (step, owner, block, sums) emits the tiles between what stays and a block
    last           forward: where the block of the last stop is left
    sums           backward: gradients of the own block
    """

    program: Program
    rings: RingGrid
    need: RowsNeeded
    me: int
    ranks: tuple[int, ...]  # of the members
    heads: HeadPart
    tile: Callable[[int, int, Value, Value | None], None]
    payload: Value
    last: Value | None = None
    sums: Value | None = None
    wire_kind: Kind = Kind.DKV

    @property
    def own_sums(self) -> Value:
        """Backward: gradients of the own block."""
        assert self.sums is not None
        return self.sums

    @property
    def home(self) -> RingStep:
        """The own block's visit here."""
        lap, stop = self.rings.home_lap, self.rings.home_stop
        return RingStep(lap, stop, self.me, self.rings.step(lap, stop))

    def visits(self, *laps: int) -> Iterator[RingStep]:
        """Of all blocks at this rank, lap by lap."""
        for lap in laps or range(self.rings.outer):
            for stop in range(self.rings.inner):
                yield RingStep(lap, stop, self.rings.owner(self.me, lap, stop), self.rings.step(lap, stop))

    def needs(self, visit: RingStep) -> Lap:
        """Rows of the block that all stops of the lap need."""
        return self.need.lap(visit.owner, visit.lap)

    def adds(self, visit: RingStep) -> Lap:
        """Rows of which all stops of the lap make gradients that travel."""
        return self.need.lap(visit.owner, visit.lap, away=True)

    def reads(self, visit: RingStep) -> bool:
        """Whether any row of the block is needed."""
        return self.needs(visit).reads(visit.stop)

    def visitor(self, owner: int, lap: int, stop: int) -> int:
        """Rank at which a block is."""
        return self.ranks[self.rings.visitor(owner, lap, stop)]

    def rank_at(self, visit: RingStep, stop: int) -> int:
        """Rank of another stop of the lap."""
        return self.visitor(visit.owner, visit.lap, stop)

    def step_at(self, visit: RingStep, stop: int) -> int:
        """Step of another stop of the lap."""
        return self.rings.step(visit.lap, stop)

    def compute(self, visit: RingStep, block: Value | None, rows: Rows | None = None) -> Value | None:
        """Tiles, if what stays here and the block see each other. Backward: the sum, to be sent, to which they add.

        rows   that it has; by default all to which stops of the lap add up to here
        """
        if block is None or not self.reads(visit):
            return None
        if self.sums is None or visit.owner == self.me:
            self.tile(visit.step, visit.owner, block, self.sums)
            return None
        sums = self.new_sums(visit.owner, rows or self.adds(visit).up_to_here(visit.stop))
        self.tile(visit.step, visit.owner, block, sums)
        return sums

    def send(self, visit: RingStep, block: Value, rows: Rows, to: int, channel: Channel, when: When) -> None:
        """Rows of a block."""
        self.program.send(block, rows, to, channel, when, visit.owner)

    def recv(self, visit: RingStep, rows: Rows, source: int, channel: Channel, when: When) -> Value:
        """Rows of a block."""
        into = self.last if (visit.lap, visit.stop) == (self.rings.outer - 1, self.rings.inner - 1) else None
        return self.program.recv(self.payload.kind, rows, source, channel, when, visit.owner, into, self.heads)

    def new_sums(self, owner: int, rows: Rows) -> Value:
        """Gradients of a block."""
        sums = self.program.value(self.own_sums.kind, rows, heads=self.heads)
        self.program.owners[sums.number] = owner
        return sums

    def send_sums(self, visit: RingStep, sums: Value, to: int, channel: Channel, when: When) -> None:
        """Gradients of a block, cast to the wire's dtype first where that is narrower."""
        if sums.kind != self.wire_kind:
            narrow = self.program.value(self.wire_kind, sums.rows, heads=self.heads)
            self.program.before(when.post, "copy", narrow, sums)
            sums = narrow
        self.program.send(sums, sums.rows, to, channel, when, visit.owner)

    def recv_sums(
        self, visit: RingStep, rows: Rows, source: int, channel: Channel, when: When, total: Value | None = None
    ) -> Value:
        """Gradients of a block as they travel; they are added to a `total`."""
        arrived = self.program.recv(self.wire_kind, rows, source, channel, when, visit.owner, None, self.heads)
        if total:
            self.program.after(when.wait, "add", total, arrived)
        return arrived
