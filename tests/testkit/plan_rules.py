"""What must hold of a plan though not every run of it in one process shows it.

Everything else that can be wrong falsifies counts over a late or an eager hub (`counting.py`, `test_mutations.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations, product
from typing import NamedTuple

from engine.planning.program.ops import HOST_CHANNELS, AttentionPlan, Channel, RankPlan, Step, Transfer, View
from testkit.hub import PlanError


class Flight(NamedTuple):
    """A transfer with the steps of its post and its wait."""

    transfer: Transfer
    post: int
    wait: int

    def held(self) -> list[tuple[View, bool]]:
        """(rows, whether they are written) that it holds."""
        transfer = self.transfer
        own = (transfer.view, transfer.op != "send")
        return [own] if transfer.source is None else [(transfer.source, False), own]


def check_rules(plan: AttentionPlan) -> None:
    """Raise PlanError with all violations; that both ends agree is asked of plans of all ranks."""
    flights = {rank: flights_of(rank_plan) for rank, rank_plan in plan.ranks.items()}
    problems = []
    for rank, own in plan.ranks.items():
        problems += [*outside(own), *misrouted(own), *unordered(flights[rank]), *touched(own, flights[rank])]
    if len(plan.ranks) == plan.size:
        problems += disagreeing(plan, flights)
    if problems:
        raise PlanError(f"{plan.direction} plan of {plan.size} ranks:\n" + "\n".join(problems))


def flights_of(plan: RankPlan) -> list[Flight]:
    """Of every message that is waited for."""
    posted = {t.tag: (t, step.index) for step in plan.steps for t in step.post}
    return [Flight(*posted[message], step.index) for step in plan.steps for message in step.wait]


def views_of(step: Step) -> Iterator[View]:
    """Every view of a step."""
    for item in (*step.pre, *step.post, *step.tiles, *step.after):
        yield from (value for value in item if isinstance(value, View))


def outside(plan: RankPlan) -> Iterator[str]:
    """Every view lies inside its buffer."""
    for step in plan.steps:
        for view in views_of(step):
            if not (
                0 <= view.buffer < len(plan.buffers) and 0 <= view.start < view.stop <= plan.buffers[view.buffer].rows
            ):
                yield f"step {step.index}: {view} lies outside its buffer"


def misrouted(plan: RankPlan) -> Iterator[str]:
    """A copy goes from one memory to the other, on the channel of its way; a message starts and ends on devices."""
    ways = {"load": (Channel.TO_DEVICE, "host", "device"), "store": (Channel.TO_HOST, "device", "host")}
    for transfer in plan.transfers():
        found = [plan.buffers[view.buffer].where for view in (transfer.source, transfer.view) if view is not None]
        channel = transfer.channel if transfer.channel in HOST_CHANNELS else None
        if (channel, *found) != ways.get(transfer.op, (None, "device")):
            yield f"{transfer} from and to {found}"


def unordered(flights: list[Flight]) -> Iterator[str]:
    """A channel is a FIFO: its waits come in the order of its posts."""
    for first, second in combinations(sorted(flights, key=lambda f: (f.transfer.channel, f.post, f.wait)), 2):
        if first.transfer.channel == second.transfer.channel and first.post < second.post and first.wait > second.wait:
            yield f"waited for out of order: {first} and {second}"


def overlap(one: View, other: View) -> bool:
    """Whether the two share a row."""
    return one.buffer == other.buffer and one.start < other.stop and other.start < one.stop


def touched(plan: RankPlan, flights: list[Flight]) -> Iterator[str]:
    """Nothing touches rows in flight; reading what is being sent is allowed."""
    uses = [
        (5 * step.index + 4 * late, view, view is op.dst)
        for step in plan.steps
        for late, ops in enumerate((step.pre, step.after))
        for op in ops
        for view in (op.dst, op.src)
    ]
    uses += [
        (5 * step.index + 2, view, writes)
        for step in plan.steps
        for tile in step.tiles
        for view, writes in ((tile.q, False), (tile.kv, False), (tile.sums, True), (tile.kv_sums, True))
    ]
    for flight in flights:
        for (held, fills), (time, view, writes) in product(flight.held(), uses):
            during = 5 * flight.post + 1 <= time <= 5 * flight.wait + 3
            if view is not None and during and (fills or writes) and overlap(view, held):
                yield f"step {time // 5}: {view} is touched during {flight}"
    for first, second in combinations(flights, 2):
        if first.post <= second.wait and second.post <= first.wait:
            pairs = product(first.held(), second.held())
            if any((fills or also) and overlap(held, other) for (held, fills), (other, also) in pairs):
                yield f"{first} and {second} share rows"


def disagreeing(plan: AttentionPlan, flights: dict[int, list[Flight]]) -> Iterator[str]:
    """Both ends of a message agree on steps, channel, rows and kind, and name each other."""
    ends: defaultdict[int, list[tuple[object, ...]]] = defaultdict(list)
    for rank, own in flights.items():
        for transfer, post, wait in own:
            buffer = plan.ranks[rank].buffers[transfer.view.buffer]
            rows = transfer.view.stop - transfer.view.start
            sides = (transfer.peer, rank) if transfer.op == "recv" else (rank, transfer.peer)
            ends[transfer.tag].append((sides, post, wait, transfer.channel, rows, buffer.kind, buffer.heads))
    for message, both in ends.items():
        alone = both[0][0] == both[0][0][::-1]  # type: ignore[index]
        if len(both) != 2 - alone or len(set(both)) != 1:
            yield f"the ends of message {message} disagree: {both}"
