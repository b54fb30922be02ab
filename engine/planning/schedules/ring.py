"""RingAttention (Liu et al. 2023): blocks move around a ring, and every rank computes with the one that it has.

    step s:    compute with the block of owner(me, s), while the next one arrives and this one leaves
    backward:  the gradient of a block follows one step behind: add what arrives, pass the sum on
    last stop: the sum goes to the owner

Stops that need nothing of a block are skipped: it goes straight from one stop that needs it to the next, with the rows
that are needed from there on (sliding windows, documents, sparse masks).
"""

from __future__ import annotations

from engine.planning.program.buffers import Value
from engine.planning.program.ops import Channel
from engine.planning.program.program import When
from engine.planning.schedules.rank_pass import RankPass, RingStep

PAYLOAD, GRADIENT = Channel.PAYLOAD_INNER, Channel.GRADIENT_INNER


def forward(me: RankPass) -> None:
    """k and v make one lap; the output of the own queries is merged tile by tile."""
    for step in me.steps():
        block = pass_block(me, step, me.local_block)
        me.compute(step, block)


def backward(me: RankPass) -> None:
    """The moving operand makes one lap, and its gradient follows it."""
    for step in me.steps():
        block = pass_block(me, step, me.local_block)
        gradient = me.compute(step, block)
        if gradient and reduce_gradient(me, step, gradient):
            send_to_owner(me, step, gradient)
    receive_from_last_stop(me)


def pass_block(me: RankPass, step: RingStep, first: Value | None) -> Value | None:
    """Receive the block of a step and send it on; None if it does not come here. `first`: the block of the lap's first
    stop, which this rank has already.
    """
    rows, block = me.rows(step), first
    if step.stop:
        if not rows.is_needed(step.stop):
            return None
        # The lap's first stop has the block even where it needs no row of it.
        source = me.rank_at(step, rows.previous(step.stop) or 0)
        # One step before it is used, beside that step's tile.
        block = me.recv(step, rows.from_stop(step.stop), source, PAYLOAD, When.at(step.number - 1))
    following = rows.next(step.stop)
    if block and following:
        # The receiver's view of the same message: one step before `following` uses it.
        when = When.at(me.number_at(step, following) - 1)
        me.send(block, rows.from_stop(following), me.rank_at(step, following), PAYLOAD, when)
    return block


def reduce_gradient(me: RankPass, step: RingStep, gradient: Value) -> bool:
    """Add the sum of all earlier stops to this rank's gradient and send the total to the next stop.

    Returns:
        Whether this is the last stop of the lap, so that the sum of the lap is complete and still here.
    """
    rows = me.gradient_rows(step)
    previous, following = rows.previous(step.stop), rows.next(step.stop)
    if previous is not None:
        # Sent one step after it was computed, so it arrives beside this step's tile.
        source, when = me.rank_at(step, previous), When.at(step.number)
        me.recv_gradient(step, rows.up_to_stop(previous), source, GRADIENT, when, gradient)
    if following is None:
        return True
    me.send_gradient(gradient, me.rank_at(step, following), GRADIENT, When.at(me.number_at(step, following)))
    return False


def send_to_owner(me: RankPass, step: RingStep, gradient: Value) -> None:
    """Send the complete sum of a lap to the owner of the block."""
    me.send_gradient(gradient, me.ranks[step.owner], GRADIENT, When.at(step.number + 1))


def receive_from_last_stop(me: RankPass) -> None:
    """Receive what another rank's `send_to_owner` sends of the own block."""
    step = me.local_step
    rows = me.gradient_rows(step)
    last = rows.last()
    if last is not None:
        when = When.at(me.number_at(step, last) + 1)
        me.recv_gradient(step, rows.up_to_stop(last), me.rank_at(step, last), GRADIENT, when, me.local_gradient)
