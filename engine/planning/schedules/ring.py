"""Ring Attention (Liu et al. 2023): blocks hop around a ring while every rank computes with the one that it has.

    step s:  compute with the block of owner(me, s) | receive the next one | pass this one on
    backward, gradients of blocks                   | one step behind: add what arrives, pass the sum on
    after the last stop                             | the sum hops home

A stop that needs nothing is left out: the block goes from the last stop that needed it straight to the next one, with
the rows that are needed from there on.
"""

from __future__ import annotations

from engine.planning.program.buffers import Value
from engine.planning.program.ops import Channel
from engine.planning.program.program import When
from engine.planning.schedules.rank_pass import RankPass, RingStep

PAYLOAD, GRADIENT = Channel.PAYLOAD_INNER, Channel.GRADIENT_INNER


def forward(work: RankPass) -> None:
    """Every block makes one lap."""
    for visit in work.visits():
        work.compute(visit, carry(work, visit, work.payload))


def backward(work: RankPass) -> None:
    """The same, and gradients follow."""
    for visit in work.visits():
        block = carry(work, visit, work.payload)
        sums = work.compute(visit, block)
        if sums and not add_up(work, visit, sums):
            send_home(work, visit, sums)
    receive_home(work)


def carry(work: RankPass, visit: RingStep, start: Value | None) -> Value | None:
    """The block of a visit, which the first stop of a lap has from the `start`; None: it does not come here.

    It arrives one step before it is used, and leaves one step before the next stop uses it.
    """
    needs, block = work.needs(visit), start
    if visit.stop:
        if not needs.reads(visit.stop):
            return None
        source = work.rank_at(visit, needs.before(visit.stop) or 0)
        block = work.recv(visit, needs.from_here_on(visit.stop), source, PAYLOAD, When.at(visit.step - 1))
    behind = needs.behind(visit.stop)
    if block and behind:
        when = When.at(work.step_at(visit, behind) - 1)
        work.send(visit, block, needs.from_here_on(behind), work.rank_at(visit, behind), PAYLOAD, when)
    return block


def add_up(work: RankPass, visit: RingStep, sums: Value) -> bool:
    """Add the gradients of all stops before to this one's, and pass them on; whether there is a next stop.

    They come and go beside a tile.
    """
    adds = work.adds(visit)
    before, behind = adds.before(visit.stop), adds.behind(visit.stop)
    if before is not None:
        work.recv_sums(visit, adds.up_to_here(before), work.rank_at(visit, before), GRADIENT, When.at(visit.step), sums)
    if behind is not None:
        work.send_sums(visit, sums, work.rank_at(visit, behind), GRADIENT, When.at(work.step_at(visit, behind)))
    return behind is not None


def send_home(work: RankPass, visit: RingStep, sums: Value) -> None:
    """The complete sum of a lap round the owner's ring goes to the owner."""
    work.send_sums(visit, sums, work.ranks[visit.owner], GRADIENT, When.at(visit.step + 1))


def receive_home(work: RankPass) -> None:
    """What `send_home` sends of the own block."""
    home = work.home
    adds = work.adds(home)
    last = adds.last()
    if last is not None:
        when = When.at(work.step_at(home, last) + 1)
        work.recv_sums(home, adds.up_to_here(last), work.rank_at(home, last), GRADIENT, when, work.own_sums)
