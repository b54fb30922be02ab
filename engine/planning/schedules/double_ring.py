"""LoongTrain's double ring (Gu et al. 2024), in which BurstAttention (Sun et al. 2024) lets queries travel backward.

Ranks of a node are a ring, and so are the ranks of one index in all nodes. A block makes a lap round its own node's
ring. Meanwhile it goes to the next node's rank of the same index, from which it makes the next lap, and so on: a
message between nodes has a whole lap to arrive.

Gradients add up along each lap (`ring.add_up`). Those of the owner's node go to the owner; of another node's lap they
go to the rank of the owner's node that has the index of the lap's last stop, the relay, which adds up what comes from
all nodes and passes it on to the owner.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.planning.program.buffers import Rows, Value
from engine.planning.program.ops import Channel
from engine.planning.program.program import When
from engine.planning.schedules import ring
from engine.planning.schedules.rank_pass import RankPass, RingStep

PAYLOAD, GRADIENT = Channel.PAYLOAD_OUTER, Channel.GRADIENT_OUTER


def forward(work: RankPass) -> None:
    """Every block makes a lap in every node."""
    first = None
    for visit in work.visits():
        first = first if visit.stop else enter(work, visit)
        work.compute(visit, ring.carry(work, visit, first))


def backward(work: RankPass) -> None:
    """The same, and gradients follow."""
    first = None
    for visit in work.visits():
        first = first if visit.stop else enter(work, visit)
        sums = work.compute(visit, ring.carry(work, visit, first))
        if not sums or ring.add_up(work, visit, sums):
            continue
        if visit.lap == work.rings.home_lap:
            ring.send_home(work, visit, sums)
        else:
            send_to_relay(work, visit, sums)
    ring.receive_home(work)
    relay(work)
    receive_relayed(work)


def enter(work: RankPass, visit: RingStep) -> Value | None:
    """The block with which this rank begins a lap; it goes on to the next node at once."""
    block, rows = work.payload, work.need.laps_that_read(visit.owner)
    if visit.lap not in rows:
        return None
    laps = [*rows]
    position = laps.index(visit.lap)
    if visit.lap:
        source = work.visitor(visit.owner, laps[position - 1], 0)
        block = work.recv(visit, rows[visit.lap], source, PAYLOAD, _during_lap_before(work, visit.lap))
    for lap in laps[position + 1 : position + 2]:
        to = work.visitor(visit.owner, lap, 0)
        work.send(visit, block, rows[lap], to, PAYLOAD, _during_lap_before(work, lap))
    return block


def _during_lap_before(work: RankPass, lap: int) -> When:
    return When(work.rings.step(lap - 1, 0), work.rings.step(lap, 0) - 1)


def send_to_relay(work: RankPass, visit: RingStep, sums: Value) -> None:
    """A far lap's sum."""
    to = work.visitor(visit.owner, work.rings.home_lap, visit.stop)
    work.send_sums(visit, sums, to, GRADIENT, _to_relay(work, visit.step))


def relay(work: RankPass) -> None:
    """Add up the far sums of blocks of this node's ranks, of which this rank is the relay; send them home."""
    for home in work.visits(work.rings.home_lap):
        arrivals = far_sums(work, home.owner).get(home.stop, [])
        if home.owner == work.me:
            for far in arrivals:
                work.recv_sums(far.visit, far.rows, far.rank, GRADIENT, far.when, work.own_sums)
        elif len(arrivals) == 1:
            (far,) = arrivals
            total = work.recv_sums(far.visit, far.rows, far.rank, GRADIENT, far.when)
            work.send_sums(home, total, work.ranks[home.owner], ring.GRADIENT, _after_all(arrivals))
        elif arrivals:
            total = work.new_sums(home.owner, _hull(arrivals))
            for far in arrivals:
                work.recv_sums(far.visit, far.rows, far.rank, GRADIENT, far.when, total)
            work.send_sums(home, total, work.ranks[home.owner], ring.GRADIENT, _after_all(arrivals))


def receive_relayed(work: RankPass) -> None:
    """What `relay` sends of the own block."""
    for stop, arrivals in sorted(far_sums(work, work.me).items()):
        source = work.rank_at(work.home, stop)
        if source != work.program.rank:
            work.recv_sums(work.home, _hull(arrivals), source, ring.GRADIENT, _after_all(arrivals), work.own_sums)


class _Far(NamedTuple):
    """The sum of a lap that another node made with a block, on its way to the relay."""

    visit: RingStep  # the last of the lap
    rank: int
    rows: Rows
    when: When


def far_sums(work: RankPass, owner: int) -> dict[int, list[_Far]]:
    """Of a block of this node, by the lap's last stop."""
    found: dict[int, list[_Far]] = {}
    for lap in range(work.rings.outer):
        adds = work.need.lap(owner, lap, away=True)
        last = adds.last()
        if lap != work.rings.home_lap and last is not None:
            visit = RingStep(lap, last, owner, work.rings.step(lap, last))
            far = _Far(visit, work.visitor(*visit.place), adds.up_to_here(last), _to_relay(work, visit.step))
            found.setdefault(last, []).append(far)
    return found


def _to_relay(work: RankPass, last_step: int) -> When:
    """With as much time as the block had, while there are tiles."""
    end = work.rings.size - (work.rings.late > 0)
    return When(last_step + 1, max(last_step + 1, min(last_step + work.rings.inner, end)))


def _hull(arrivals: list[_Far]) -> Rows:
    return Rows(min(far.rows.start for far in arrivals), max(far.rows.stop for far in arrivals))


def _after_all(arrivals: list[_Far]) -> When:
    return When.at(1 + max(far.when.wait for far in arrivals))
