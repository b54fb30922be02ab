"""One loop that runs any attention plan on any device; what a tile or a local op means is the arithmetic's business."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.attention.transport import P2POp, Transport
from engine.planning.program.ops import Buffer, Kind, LocalOp, RankPlan, Tile, Transfer, View

MAX_CACHED_CUTS = 1024  # a ring has tens of them; of a mask with 10^5 pieces most are used once
Fields = dict[str, Tensor]  # field name -> tensor [rows, ...], token-major and contiguous


class Operand(NamedTuple):
    """Some rows of a buffer."""

    buffer: Buffer
    fields: Fields


class Arithmetic(Protocol):
    """What the values in the buffers are: tensors of attention, or records that prove a plan."""

    def allocate(self, buffer: Buffer) -> Fields:
        """Tensors of a buffer that the plan does not get from its caller."""

    def run_tile(self, tile: Tile, fields: Mapping[str, Fields]) -> None:
        """Compute one tile; `fields` has q, kv, sums and, in backward, kv_sums, cut to the tile's rows.

        Fields of the same dictionary are the same rows. Different ones may be too: where many views are cut, a view is
        cut again. So the identity of a dictionary may save work, and results must not depend on it.
        """

    def run_op(self, op: str, dst: Operand, src: Operand | None) -> None:
        """Run a local operation (see `LocalOp`)."""

    def wire_fields(self, buffer: Buffer, fields: Fields) -> tuple[Tensor, ...]:
        """The tensors of some rows of a buffer that travel, in a fixed order."""

    def finish_step(self) -> None:
        """The step's last op was run: what waited for it to come must be done."""

    def release(self) -> None:
        """Nothing will touch the buffers of `allocate` any more but those of arguments."""


class Execution:
    """One run of one rank's plan over its buffers."""

    def __init__(
        self, plan: RankPlan, arithmetic: Arithmetic, transport: Transport, arguments: Mapping[str, Fields]
    ) -> None:
        self.plan = plan
        self._arithmetic = arithmetic
        self._transport = transport
        # Rows of buffers, and what of them travels: plans use the same ones over and over.
        self._cut: dict[View, Fields] = {}
        self._wires: dict[View, tuple[Tensor, ...]] = {}
        # By buffer. Those that are not given are allocated when they are first touched: results that the last ops
        # write take no memory while tiles are computed.
        self._fields: list[Fields | None] = [arguments.get(buffer.argument or "") for buffer in plan.buffers]

    def run(self) -> None:
        """Run all steps; afterwards arguments remain, the other buffers may serve the next run."""
        for _ in self.steps():
            pass
        buffers = zip(self.plan.buffers, self._fields, strict=True)
        self._fields = [fields if buffer.argument else None for buffer, fields in buffers]
        self._cut.clear()
        self._wires.clear()
        self._arithmetic.release()

    def steps(self) -> Iterator[int]:
        """Run step by step, in the same order on every rank, so that no two ranks wait for each other.

        Yields the step's index after its posts, after its waits were issued, and at its end: a test runs all ranks in
        one process from yield to yield. On a GPU nothing here blocks the host; streams keep the order.
        """
        for step in self.plan.steps:
            for op in step.pre:  # what is sent in this step is written here
                self._op(op)
            if step.post:  # messages start, and are in flight while the tiles compute
                self._transport.post(list(map(self._p2p_op, step.post)))
            yield step.index
            for tile in step.tiles:
                self._arithmetic.run_tile(tile, self._operands(tile))
            if step.wait:  # messages of this step or of an earlier one
                self._transport.wait(step.wait)
            yield step.index
            for op in step.after:  # what has arrived is added, merged or copied here
                self._op(op)
            self._arithmetic.finish_step()
            yield step.index

    def argument(self, name: str) -> Fields:
        """Tensors of an argument."""
        return self._buffer(self.plan.argument(name))

    def _buffer(self, number: int) -> Fields:
        fields = self._fields[number]
        if fields is None:
            fields = self._fields[number] = self._arithmetic.allocate(self.plan.buffers[number])
        return fields

    def _rows(self, view: View) -> Fields:
        """Tensors of a view's rows; the buffer's own dictionary for all of them (see `Arithmetic.run_tile`)."""
        if view not in self._cut:
            if len(self._cut) == MAX_CACHED_CUTS:
                self._cut.clear()
            fields = self._buffer(view.buffer)
            if view.stop - view.start < self.plan.buffers[view.buffer].rows:
                fields = {name: tensor[view.start : view.stop] for name, tensor in fields.items()}
            self._cut[view] = fields
        return self._cut[view]

    def _operands(self, tile: Tile) -> dict[str, Fields]:
        cut, rows = self._cut, self._rows
        operands = {
            "q": cut.get(tile.q) or rows(tile.q),
            "kv": cut.get(tile.kv) or rows(tile.kv),
            "sums": cut.get(tile.sums) or rows(tile.sums),
        }
        if tile.kv_sums is not None:
            operands["kv_sums"] = cut.get(tile.kv_sums) or rows(tile.kv_sums)
        return operands

    def _op(self, op: LocalOp) -> None:
        self._arithmetic.run_op(op.op, self._operand(op.dst), self._operand(op.src) if op.src else None)

    def _operand(self, view: View) -> Operand:
        return Operand(self.plan.buffers[view.buffer], self._rows(view))

    def _p2p_op(self, transfer: Transfer) -> P2POp:
        into: tuple[Tensor, ...] = ()
        if transfer.source is None:
            tensors = self._wires.get(transfer.view) or self._wire(transfer.view)
        else:
            tensors, into = (self._wire(view, transfer.kind) for view in (transfer.source, transfer.view))
        return P2POp(transfer.tag, transfer.op, transfer.channel, transfer.peer, tensors, into)

    def _wire(self, view: View, kind: Kind | None = None) -> tuple[Tensor, ...]:
        """The tensors of a view that travel; `kind`: those of its fields alone."""
        if kind is not None:
            return self._arithmetic.wire_fields(replace(self.plan.buffers[view.buffer], kind=kind), self._rows(view))
        if view not in self._wires:
            self._wires[view] = self._arithmetic.wire_fields(*self._operand(view))
        return self._wires[view]
