"""Megatron-LM's all-gather: rows go straight to every rank that needs them, their gradients straight home.

The ranks that a block would visit in a ring, in the same order, so that at every step each rank is read by one rank,
and nobody receives two gradients at once. Rows leave a lap before they are needed: where what was posted together is
complete only together, as under NCCL, blocks arrive one by one.
"""

from __future__ import annotations

from engine.planning.program.buffers import Value
from engine.planning.program.ops import Channel
from engine.planning.program.program import When
from engine.planning.schedules.rank_pass import RankPass, RingStep


def forward(work: RankPass) -> None:
    """Own rows to every reader, and everybody's here."""
    for visit in work.visits():
        work.compute(visit, exchange(work, visit))


def backward(work: RankPass) -> None:
    """The same, and gradients straight home."""
    for visit in work.visits():
        send_straight(work, visit, exchange(work, visit))


def exchange(work: RankPass, visit: RingStep) -> Value | None:
    """Send own rows to the rank that needs them at this step; the block that this rank works on."""
    if visit.owner == work.me:
        return work.payload
    when = When(max(0, visit.step - 1 - work.rings.inner), visit.step - 1)
    channel = Channel.PAYLOAD_OUTER if visit.lap else Channel.PAYLOAD_INNER
    mine = visit._replace(owner=work.me)
    if work.reads(mine):
        work.send(
            mine, work.payload, work.needs(mine).rows_of(visit.stop), work.rank_at(mine, visit.stop), channel, when
        )
    if not work.reads(visit):
        return None
    return work.recv(visit, work.needs(visit).rows_of(visit.stop), work.ranks[visit.owner], channel, when)


def send_straight(work: RankPass, visit: RingStep, block: Value | None) -> None:
    """Tiles; the gradients of the block go to its owner during the next one, and those of the own block come here."""
    sums = work.compute(visit, block, rows=work.needs(visit).rows_of(visit.stop))
    if visit.owner == work.me:
        return
    when, channel = When.at(visit.step + 1), Channel.GRADIENT_OUTER if visit.lap else Channel.GRADIENT_INNER
    if sums:
        work.send_sums(visit, sums, work.ranks[visit.owner], channel, when)
    mine = visit._replace(owner=work.me)
    if work.reads(mine):
        rows, reader = work.needs(mine).rows_of(visit.stop), work.rank_at(mine, visit.stop)
        work.recv_sums(mine, rows, reader, channel, when, work.own_sums)
