"""Megatron-LM's all-gather: rows go straight to every rank that needs them, their gradients straight to the owner.

The order is that of a ring: at every step each rank is read by one rank and reads one, so no rank receives two
gradients together. Rows leave a lap before they are needed. Under NCCL what is posted together completes as a whole, so
blocks are posted one by one and arrive one by one.
"""

from __future__ import annotations

from engine.planning.program.buffers import Value
from engine.planning.program.ops import Channel
from engine.planning.program.program import When
from engine.planning.schedules.rank_pass import RankPass, RingStep


def forward(me: RankPass) -> None:
    """Send own rows to every reader; compute with those of all others."""
    for step in me.steps():
        block = exchange_block(me, step)
        me.compute(step, block)


def backward(me: RankPass) -> None:
    """The same, and every gradient goes straight to its owner."""
    for step in me.steps():
        block = exchange_block(me, step)
        exchange_gradient(me, step, block)


def exchange_block(me: RankPass, step: RingStep) -> Value | None:
    """Send own rows to the rank that needs them at this step, and receive the block of this step."""
    if step.owner == me.ring_rank:
        return me.local_block
    when = When(max(0, step.number - 1 - me.grid.inner), step.number - 1)
    channel = Channel.PAYLOAD_OUTER if step.lap else Channel.PAYLOAD_INNER
    local = step._replace(owner=me.ring_rank)  # where the own block is at this step
    if me.is_needed(local):
        me.send(me.local_block, me.rows(local).at(step.stop), me.rank_at(local, step.stop), channel, when)
    if not me.is_needed(step):
        return None
    return me.recv(step, me.rows(step).at(step.stop), me.ranks[step.owner], channel, when)


def exchange_gradient(me: RankPass, step: RingStep, block: Value | None) -> None:
    """Compute with `block`. During the next step its gradient goes to its owner, and one of the own block arrives."""
    gradient = me.compute(step, block, rows=me.rows(step).at(step.stop))
    if step.owner == me.ring_rank:
        return
    when, channel = When.at(step.number + 1), Channel.GRADIENT_OUTER if step.lap else Channel.GRADIENT_INNER
    if gradient:
        me.send_gradient(gradient, me.ranks[step.owner], channel, when)
    local = step._replace(owner=me.ring_rank)
    if me.is_needed(local):
        rows, reader = me.rows(local).at(step.stop), me.rank_at(local, step.stop)
        me.recv_gradient(local, rows, reader, channel, when, me.local_gradient)
