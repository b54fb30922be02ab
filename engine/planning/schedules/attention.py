"""From what a method is to the program of each of its ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.planning.methods.blocks import Blocks
from engine.planning.methods.presets import AttentionMethod
from engine.planning.program import Program, plan_ranks
from engine.planning.schedule.plan import AttentionPlan, Direction
from engine.planning.schedules import chunks
from engine.planning.schedules.whole import Needs, WholeBlocks
from engine.planning.sequence.visibility import Visibility


def plan_attention(
    seen: Visibility,
    method: AttentionMethod,
    blocks: Blocks,
    direction: Direction,
    only: Collection[int] | None = None,
    asking: Sequence[int] | None = None,
) -> AttentionPlan:
    """Plans of some or all ranks, each written by itself.

    asking   a forward pass run again: how many first rows of each ring member's block ask; out and lse of the others
             were kept
    """

    needs: Needs = {}

    def write(program: Program) -> None:
        asked = asking[blocks.grid.place(program.rank)[0]] if asking else None
        if method.chunk_tokens is not None:
            work = chunks.Forward if direction == "forward" else chunks.Backward
            work(program, seen, method, blocks, asked).write()
            return
        rank = WholeBlocks(program, seen, method, blocks, needs, is_alone=only is not None and len(only) == 1)
        if direction == "forward":
            rank.forward(asked)
        else:
            rank.backward()

    return plan_ranks(direction, method.cp_size, only, write)
