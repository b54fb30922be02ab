"""Megatron-LM's order: backward starts from the blocks that forward ended with, and goes the way back.

Blocks come home with their gradients: one hop fewer, and none without a tile to hide behind. Forward takes all rows
that anybody needs to the last stop, and leaves them there. A forward pass that runs again for some queries carries what
these need, and brings the last block straight from its owner.
"""

from __future__ import annotations

from engine.planning.program.ops import Channel
from engine.planning.program.program import When
from engine.planning.schedules import double_ring, ring
from engine.planning.schedules.rank_pass import RankPass


def forward(work: RankPass) -> None:
    """As the ring that it is; the last block stays."""
    (double_ring if work.rings.outer > 1 else ring).forward(work)


def backward(work: RankPass) -> None:
    """As the ring that it is, turned around: the own block of it is the one that was left."""
    (double_ring if work.rings.outer > 1 else ring).backward(work)


def bring_last(work: RankPass) -> None:
    """The last block comes straight from its owner, behind the tiles of the last lap, and not around the ring."""
    rings, last = work.rings, [*work.visits()][-1]
    wait = last.step - 1
    when = When(min(rings.step(last.lap, 0), wait) if last.lap else wait, wait)
    channel = Channel.PAYLOAD_OUTER if last.lap else Channel.PAYLOAD_INNER
    mine = last._replace(owner=work.me)
    if work.reads(mine):
        work.send(mine, work.payload, work.needs(mine).rows_of(last.stop), work.rank_at(mine, last.stop), channel, when)
    if work.reads(last):
        rows = work.needs(last).rows_of(last.stop)
        work.compute(last, work.recv(last, rows, work.ranks[last.owner], channel, when))
