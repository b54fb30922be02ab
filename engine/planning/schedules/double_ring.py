"""The double ring of LoongTrain (Gu et al. 2024) and BurstAttention (Sun et al. 2024): one ring inside every node.

The ranks of a node are an inner ring; the ranks with one index in all nodes are an outer ring. A block makes a lap
around its owner's node (`ring`). Meanwhile it goes to the rank with the owner's index in the next node, where it makes
the next lap, and so on: a message between nodes has a whole lap to arrive.

    for each lap:  the block that came from the next node during the lap before | send it on to the node after
                   one lap of it around this node's ring

Gradients add up along each lap. The sum of the lap in the owner's node goes to the owner. That of another node's lap
goes to a *relay*: the rank of the owner's node that has the index of the lap's last stop. So messages between nodes
stay between ranks of one index, each on its own network rail. A relay adds up the laps that ended at its index, and
sends the total to the owner; a mask may let laps of one block end at several indices, and so have several relays.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.planning.program.buffers import Rows, Value
from engine.planning.program.ops import Channel
from engine.planning.program.program import When
from engine.planning.schedules import ring
from engine.planning.schedules.rank_pass import RankPass, RingStep

PAYLOAD, GRADIENT = Channel.PAYLOAD_OUTER, Channel.GRADIENT_OUTER


def forward(me: RankPass) -> None:
    """k and v make a lap in every node."""
    first = None
    for step in me.steps():
        first = outer_hop(me, step) if step.stop == 0 else first
        block = ring.pass_block(me, step, first)
        me.compute(step, block)


def backward(me: RankPass) -> None:
    """The moving operand makes a lap in every node; the sums of all laps go to its owner."""
    first = None
    for step in me.steps():
        first = outer_hop(me, step) if step.stop == 0 else first
        block = ring.pass_block(me, step, first)
        gradient = me.compute(step, block)
        if not (gradient and ring.reduce_gradient(me, step, gradient)):
            continue
        if step.lap == me.grid.owner_lap:
            ring.send_to_owner(me, step, gradient)
        else:
            send_to_relay(me, step, gradient)
    ring.receive_from_last_stop(me)
    relay_gradients(me)
    receive_from_relays(me)


def outer_hop(me: RankPass, step: RingStep) -> Value | None:
    """Receive the block with which this rank begins a lap, and send it to the next node that needs it.

    Returns:
        The block; None if no rank of this node needs it.
    """
    block, rows = me.local_block, me.rows_needed.of_laps(step.owner)
    if step.lap not in rows:
        return None
    laps = [*rows]
    position = laps.index(step.lap)
    if step.lap:
        source = me.holder(step.owner, laps[position - 1], 0)
        block = me.recv(step, rows[step.lap], source, PAYLOAD, _during_lap_before(me, step.lap))
    for following in laps[position + 1 : position + 2]:
        to = me.holder(step.owner, following, 0)
        me.send(block, rows[following], to, PAYLOAD, _during_lap_before(me, following))
    return block


def _during_lap_before(me: RankPass, lap: int) -> When:
    return When(me.grid.step(lap - 1, 0), me.grid.step(lap, 0) - 1)


# ---- gradients of other nodes ---------------------------------------------------------------------------------------


class _LapSum(NamedTuple):
    """The sum of one lap in another node, as the relay receives it from the last stop of that lap."""

    step: RingStep
    rank: int
    rows: Rows
    when: When


def send_to_relay(me: RankPass, step: RingStep, gradient: Value) -> None:
    """Send the sum of a lap in this node to the relay in the owner's node."""
    relay = me.holder(step.owner, me.grid.owner_lap, step.stop)
    me.send_gradient(gradient, relay, GRADIENT, _to_relay(me, step.number))


def relay_gradients(me: RankPass) -> None:
    """For every block of this node, send the total of the lap sums that this rank relays to the owner."""
    for step in me.steps(me.grid.owner_lap):
        lap_sums = sums_by_relay(me, step.owner).get(step.stop, [])
        if not lap_sums:
            continue
        if step.owner == me.ring_rank:  # the owner is its own relay
            for lap_sum in lap_sums:
                _receive(me, lap_sum, me.local_gradient)
            continue
        if len(lap_sums) == 1:  # nothing to add: pass on what arrives, in the dtype in which it came
            total = _receive(me, lap_sums[0])
        else:
            total = me.new_gradient(step.owner, _hull(lap_sums))
            for lap_sum in lap_sums:
                _receive(me, lap_sum, total)
        me.send_gradient(total, me.ranks[step.owner], ring.GRADIENT, _after_all(lap_sums))


def receive_from_relays(me: RankPass) -> None:
    """Receive what the other relays of this node send of the own block."""
    step = me.local_step
    for stop, lap_sums in sorted(sums_by_relay(me, me.ring_rank).items()):
        relay = me.rank_at(step, stop)
        if relay != me.program.rank:
            me.recv_gradient(step, _hull(lap_sums), relay, ring.GRADIENT, _after_all(lap_sums), me.local_gradient)


def sums_by_relay(me: RankPass, owner: int) -> dict[int, list[_LapSum]]:
    """Sums of the laps of a block in other nodes, by the stop of the relay in the owner's node."""
    by_stop: dict[int, list[_LapSum]] = {}
    for lap in range(me.grid.outer):
        rows = me.rows_needed.of_lap(owner, lap, without_owner=True)
        last = rows.last()
        if lap != me.grid.owner_lap and last is not None:
            step = RingStep(lap, last, owner, me.grid.step(lap, last))
            rank, when = me.holder(owner, lap, last), _to_relay(me, step.number)
            by_stop.setdefault(last, []).append(_LapSum(step, rank, rows.up_to_stop(last), when))
    return by_stop


def _receive(me: RankPass, lap_sum: _LapSum, total: Value | None = None) -> Value:
    return me.recv_gradient(lap_sum.step, lap_sum.rows, lap_sum.rank, GRADIENT, lap_sum.when, total)


def _to_relay(me: RankPass, last_step: int) -> When:
    """As many steps as the block had for its hop between the nodes, while there are tiles to hide behind.

    With deferred stops the last step has only tiles of the own block, which wait for these very gradients.
    """
    end = me.grid.size - (me.grid.deferred_stops > 0)
    return When(last_step + 1, max(last_step + 1, min(last_step + me.grid.inner, end)))


def _hull(lap_sums: list[_LapSum]) -> Rows:
    return Rows(min(s.rows.start for s in lap_sums), max(s.rows.stop for s in lap_sums))


def _after_all(lap_sums: list[_LapSum]) -> When:
    return When.at(1 + max(s.when.wait for s in lap_sums))
