"""One rank's view of one pass through the rings: its steps, and what it may do at them.

A pass has a *moving* operand, of which every rank works on one block per step, and a *stationary* one, which stays with
its owner. Forward, k and v move and q stays. Backward, either k and v move together with dk and dv (RingAttention), or
q, dout and the row statistics move together with dq (BurstAttention).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from engine.planning.program.buffers import Rows, Value
from engine.planning.program.ops import Channel, HeadPart, Kind
from engine.planning.program.program import Program, When
from engine.planning.schedules.ring_grid import LapRows, RingGrid, RowsNeeded


class RingStep(NamedTuple):
    """One step: this rank works on the block of `owner`, at `stop` of `lap`. number: of the step, from 0."""

    lap: int
    stop: int
    owner: int
    number: int


@dataclass(frozen=True)
class RankPass:
    """One pass of ring rank `ring_rank`.

    local_block    this rank's block of the moving operand
    local_gradient backward: sum of its gradient, complete at the end of the pass; None: forward
    tile           (number of the step, owner, block, gradient): emits the tiles of the stationary operand with a block
    ranks          rank of the group of every ring rank
    heads          which heads the values of this pass hold
    final_kv       forward: value that receives the block of the last step, which backward starts from
    wire_kind      kind in which gradients are sent: their own, or a narrower one
    """

    program: Program
    grid: RingGrid
    rows_needed: RowsNeeded
    ring_rank: int
    ranks: tuple[int, ...]
    heads: HeadPart
    tile: Callable[[int, int, Value, Value | None], None]
    local_block: Value
    final_kv: Value | None = None
    local_gradient: Value | None = None
    wire_kind: Kind = Kind.DKV

    # ---- steps and the rows they need ---------------------------------------------------------------------------

    def steps(self, *laps: int) -> Iterator[RingStep]:
        """All steps of some laps, or of all, in order of laps and stops."""
        for lap in laps or range(self.grid.outer):
            for stop in range(self.grid.inner):
                yield RingStep(lap, stop, self.grid.owner(self.ring_rank, lap, stop), self.grid.step(lap, stop))

    @property
    def local_step(self) -> RingStep:
        """The step at which this rank works on its own block."""
        lap, stop = self.grid.owner_lap, self.grid.owner_stop
        return RingStep(lap, stop, self.ring_rank, self.grid.step(lap, stop))

    def rows(self, step: RingStep) -> LapRows:
        """Rows of the block that the stops of this lap need."""
        return self.rows_needed.of_lap(step.owner, step.lap)

    def gradient_rows(self, step: RingStep) -> LapRows:
        """Rows of the block to whose gradient the stops of this lap add; the owner adds in place."""
        return self.rows_needed.of_lap(step.owner, step.lap, without_owner=True)

    def is_needed(self, step: RingStep) -> bool:
        """Whether the stationary operand and the block see each other at all."""
        return self.rows(step).is_needed(step.stop)

    def holder(self, owner: int, lap: int, stop: int) -> int:
        """Rank that has a block at a stop of a lap."""
        return self.ranks[self.grid.holder(owner, lap, stop)]

    def rank_at(self, step: RingStep, stop: int) -> int:
        """Rank that has the block of `step` at another stop of the lap."""
        return self.holder(step.owner, step.lap, stop)

    def number_at(self, step: RingStep, stop: int) -> int:
        """Number of the step of another stop of the lap."""
        return self.grid.step(step.lap, stop)

    # ---- what the rank does -------------------------------------------------------------------------------------

    def compute(self, step: RingStep, block: Value | None, rows: Rows | None = None) -> Value | None:
        """Emit the tiles of the stationary operand with `block`, if they see each other.

        Args:
            rows: rows of the gradient; by default all to which the stops of the lap up to this one add.

        Returns:
            Backward, of another rank's block: its gradient, which must be sent. Else None: forward has none, and that
            of the own block is summed in place.
        """
        if block is None or not self.is_needed(step):
            return None
        if self.local_gradient is None or step.owner == self.ring_rank:
            self.tile(step.number, step.owner, block, self.local_gradient)
            return None
        gradient = self.new_gradient(step.owner, rows or self.gradient_rows(step).up_to_stop(step.stop))
        self.tile(step.number, step.owner, block, gradient)
        return gradient

    def send(self, block: Value, rows: Rows, to: int, channel: Channel, when: When) -> None:
        """Send rows of a block of the moving operand."""
        self.program.send(block, rows, to, channel, when)

    def recv(self, step: RingStep, rows: Rows, source: int, channel: Channel, when: When) -> Value:
        """Receive rows of the block of `step`."""
        is_final = (step.lap, step.stop) == (self.grid.outer - 1, self.grid.inner - 1)
        block = self.final_kv if is_final else None
        block = block or self.program.value(self.local_block.kind, rows, owner=step.owner, heads=self.heads)
        self.program.recv(block, rows, source, channel, when)
        return block

    def new_gradient(self, owner: int, rows: Rows) -> Value:
        """A sum for the gradient of rows of a block."""
        assert self.local_gradient is not None
        return self.program.value(self.local_gradient.kind, rows, owner=owner, heads=self.heads)

    def send_gradient(self, gradient: Value, to: int, channel: Channel, when: When) -> None:
        """Send the gradient of a block, in the dtype of the wire."""
        if gradient.kind != self.wire_kind:
            narrow = self.program.value(self.wire_kind, gradient.rows, owner=gradient.owner, heads=self.heads)
            self.program.before(when.post, "copy", narrow, gradient)
            gradient = narrow
        self.program.send(gradient, gradient.rows, to, channel, when)

    def recv_gradient(
        self, step: RingStep, rows: Rows, source: int, channel: Channel, when: When, total: Value | None = None
    ) -> Value:
        """Receive a gradient of the block of `step`, and add it to `total` if there is one."""
        arrived = self.program.value(self.wire_kind, rows, owner=step.owner, heads=self.heads)
        self.program.recv(arrived, rows, source, channel, when)
        if total:
            self.program.after(when.wait, "add", total, arrived)
        return arrived
