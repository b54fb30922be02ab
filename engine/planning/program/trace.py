"""A program as text: what one rank does, step by step. `burst plan --trace`, docs/attention.md and golden tests."""

from __future__ import annotations

from collections.abc import Iterator

from engine.planning.program.ops import Channel, LocalOp, Tile, View
from engine.planning.program.program import Program

_WAY = {
    Channel.PAYLOAD_INNER: "inner ring",
    Channel.GRADIENT_INNER: "inner ring",
    Channel.PAYLOAD_OUTER: "outer ring",
    Channel.GRADIENT_OUTER: "outer ring",
    Channel.HEADS: "heads",
    Channel.TO_DEVICE: "host",
    Channel.TO_HOST: "host",
}


def trace(program: Program) -> Iterator[str]:
    """One line per op, under its step."""
    values = program._values

    def name(view: View) -> str:
        value = values[view.buffer]
        rows = f"[{value.rows.start + view.start}:{value.rows.start + view.stop}]"
        owner = program.owners.get(view.buffer)
        return f"{value.kind}{'' if owner is None else owner}{rows}"

    arrived = {transfer.view.buffer for *_, transfer in program._transfers if transfer.op == "recv"}

    def op(item: LocalOp) -> str:
        source = "" if item.src is None else f" {name(item.src)}"
        if item.src and item.src.buffer in arrived:
            source = " what arrived"
        return f"{item.op:5} {name(item.dst)} {'+=' if item.op == 'add' else '='}{source}"

    def tile(item: Tile) -> str:
        sums = name(item.sums) + (f", {name(item.kv_sums)}" if item.kv_sums else "")
        return f"tile  {name(item.q)} x {name(item.kv)} {item.band.kind:6} -> {sums}"

    lines: dict[int, list[str]] = {}
    for step, draft in program._steps.items():
        lines[step] = [f"  {op(item)}" for item in draft.pre]
    for when, _, transfer in sorted(program._transfers, key=lambda end: (end[0].post, end[2].op != "send")):
        until = "" if when.wait == when.post else f", until step {when.wait}"
        arrow = "to" if transfer.op == "send" else "from"
        text = f"  {transfer.op:6}{name(transfer.view)} {arrow} rank {transfer.peer} ({_WAY[transfer.channel]}{until})"
        lines.setdefault(when.post, []).append(text)
    for step, draft in program._steps.items():
        lines[step] += [*(f"  {tile(item)}" for item in draft.tiles), *(f"  {op(item)}" for item in draft.after)]
    for step in sorted(lines):
        yield f"step {step}"
        yield from lines[step]
