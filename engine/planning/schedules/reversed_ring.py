"""Megatron-LM's order: backward starts from the block that forward ended with, and takes the route back.

So a block is with its owner when its gradient is complete: one hop less, and none without a tile to hide behind. For
this, forward brings to the last stop of a block all rows that any rank needs of it, and leaves them there (`final_kv`).
A forward pass that is recomputed for some queries moves around the ring only what these need; the final block comes
straight from its owner.
"""

from __future__ import annotations

from engine.planning.program.ops import Channel
from engine.planning.program.program import When
from engine.planning.schedules import double_ring, ring
from engine.planning.schedules.rank_pass import RankPass


def forward(me: RankPass) -> None:
    """As the ring or double ring; the block of the last step is received into `final_kv`."""
    (double_ring if me.grid.outer > 1 else ring).forward(me)


def backward(me: RankPass) -> None:
    """As the ring or double ring, on the reversed grid, of which the own block is `final_kv`."""
    (double_ring if me.grid.outer > 1 else ring).backward(me)


def fetch_final_kv(me: RankPass) -> None:
    """Receive the block of the last step straight from its owner during the last lap; compute with it."""
    *_, last = me.steps()
    wait = last.number - 1
    when = When(min(me.grid.step(last.lap, 0), wait) if last.lap else wait, wait)
    channel = Channel.PAYLOAD_OUTER if last.lap else Channel.PAYLOAD_INNER
    local = last._replace(owner=me.ring_rank)
    if me.is_needed(local):
        me.send(me.local_block, me.rows(local).at(last.stop), me.rank_at(local, last.stop), channel, when)
    if me.is_needed(last):
        me.compute(last, me.recv(last, me.rows(last).at(last.stop), me.ranks[last.owner], channel, when))
