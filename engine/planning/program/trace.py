"""A program as text: the ops of a rank by step. For `burst plan --trace`, docs/attention.md and golden files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from engine.planning.program.buffers import Value
from engine.planning.program.ops import Channel, LocalOp, Tile, View
from engine.planning.program.program import Program, ProgramTransfer

_LINKS = {
    Channel.PAYLOAD_INNER: "inner ring",
    Channel.GRADIENT_INNER: "inner ring",
    Channel.PAYLOAD_OUTER: "outer ring",
    Channel.GRADIENT_OUTER: "outer ring",
    Channel.HEADS: "head exchange",
}


class TraceStep(NamedTuple):
    """Ops of one step in words: before, messages (sends first), tiles, after."""

    step: int
    ops: tuple[str, ...]


def trace_program(program: Program) -> list[TraceStep]:
    """Return every step at which the rank has ops.

    A value is written as kind, owner (ring rank) and rows of the owner's block: kv2[0:4] is k and v of rows 0 to 3 of
    the block of ring rank 2. With a head exchange kv@1[0:4] is rows 0 to 3 of rank 1 in the layout between the layers.
    Messages are listed where they are posted; received values are available at the end of the step, or, after "until
    step n", of step n.
    """
    values = program.values
    received = {end.transfer.view.buffer for end in program.transfers if end.transfer.op == "recv"}
    ops: defaultdict[int, list[str]] = defaultdict(list)
    for step, draft in program.steps.items():
        ops[step] += [_local_op(values, received, op) for op in draft.pre]
    for end in sorted(program.transfers, key=lambda end: (end.when.post, end.transfer.op != "send")):
        ops[end.when.post].append(_transfer(values, end))
    for step, draft in program.steps.items():
        ops[step] += [_tile(values, tile) for tile in draft.tiles]
        ops[step] += [_local_op(values, received, op) for op in draft.after]
    return [TraceStep(step, tuple(ops[step])) for step in sorted(ops)]


def trace_text(steps: Sequence[TraceStep]) -> str:
    """The steps as text, one line per op."""
    return "\n".join("\n".join([f"step {step}", *(f"  {op}" for op in ops)]) for step, ops in steps)


def _name(values: Sequence[Value], view: View) -> str:
    value = values[view.buffer]
    kind, heads, where = value.buffer_class
    rows = f"[{value.rows.start + view.start}:{value.rows.start + view.stop}]"
    part = f" heads {heads.index + 1}/{heads.count}" if heads.count > 1 else ""
    block = value.owner if value.shard_of is None else f"@{value.shard_of}"
    return f"{kind}{block}{rows}{part}{' on the host' if where == 'host' else ''}"


def _transfer(values: Sequence[Value], end: ProgramTransfer) -> str:
    transfer, (post, wait) = end.transfer, end.when
    until = f", until step {wait}" if wait != post else ""
    if transfer.source is not None:
        fields = f"{transfer.kind} of " if transfer.kind else ""
        return f"{transfer.op:7}{fields}{_name(values, transfer.source)} -> {_name(values, transfer.view)}{until}"
    way = "to" if transfer.op == "send" else "from"
    link = f"({_LINKS[transfer.channel]}{until})"
    return f"{transfer.op:7}{_name(values, transfer.view)} {way} rank {transfer.peer} {link}"


def _tile(values: Sequence[Value], tile: Tile) -> str:
    sums = ", ".join(_name(values, view) for view in (tile.sums, tile.kv_sums) if view is not None)
    return f"{'tile':7}{_name(values, tile.q)} x {_name(values, tile.kv)} {tile.band.kind} -> {sums}"


def _local_op(values: Sequence[Value], received: set[int], op: LocalOp) -> str:
    target = _name(values, op.dst)
    if op.src is None:
        return f"{op.op:7}{target}"
    source = f"received {_name(values, op.src)}" if op.src.buffer in received else _name(values, op.src)
    return f"{op.op:7}{source} -> {target}"
