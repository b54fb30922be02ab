"""Attention over a ring in one or two levels: blocks hop from rank to rank, or go from their home to every reader.

`outer` rings of `inner` ranks: rank = n * inner + l. With direction d = -1 (towards lower ranks; causal zigzag then
moves up to a quarter fewer bytes than with +1) block (m, k) is visited at cycle o and inner step i by rank (m + d*o,
k + d*i), at step o * inner + i:

    inner=3, outer=2, block of rank (0,0), d=+1     step 0     1     2     3     4     5
    backward_order="same"                           (0,0) (0,1) (0,2) (1,0) (1,1) (1,2)
    "same", deferred_local_tiles=2 (5': half of the own tile) (0,0) (0,1) (1,0) (1,1) (1,2) (0,2) 6: (0,0)'
    "reversed" (d=-1 in backward)                   (1,2) (1,1) (1,0) (0,2) (0,1) (0,0)

Payload (K,V, or Q,dO,lse,scale): inner hops one step before their reader, hidden behind a tile; the block with which a
cycle starts goes to the next ring at the cycle's first step and has the whole cycle to arrive.
Gradients (dK,dV or dQ) of visited blocks are summed along each cycle, one step behind the payload, on channels of
their own. The home node's sum returns inside the ring; every other cycle's sum makes one outer hop to the home node's
rank of the same index (the relay), where sums gather before one last inner hop. The home tile's own gradient never
travels. Hops per block: payload outer*(inner-1) + outer-1; gradients the same + 1 inner (2 levels), or inner-1 (one
level).

Tail: the last gradients' way home has no tile to hide behind, one outer and one inner hop long. `deferred_local_tiles`
keeps work of the own node for it. Reversed: forward leaves the last block it held (kv_last), which backward starts from
instead of the own one; blocks come home with their gradients: one inner hop fewer, nothing without a tile to hide
behind. Forward then carries all rows that anybody needs to the end, and backward carries them home, where "same" sends
on less and less. A forward pass that runs again for some queries carries what these need, and the last block comes in
one message.

Gathered (kv_transport="all_gather"): the same visits with the hops taken out. Every rank sends its rows straight to
each reader, `inner` steps before they are needed (so that where what was posted together is complete only together,
under NCCL, blocks arrive one by one), and dK,dV go straight home during the next tile. At every step each rank is read
by one rank: nobody receives two gradients at once. inner + 2 blocks of memory, and no rank waits for another's tiles.

Only rows that somebody needs are sent, and only visits with something to compute are made.
Sources: Liu et al. 2023 (Ring Attention), Brandon et al. 2023 (striped), Gu et al. 2024 (LoongTrain's double ring),
Sun et al. 2024 (BurstAttention: circulating Q in backward); reversed and gathered are schedules of Megatron-LM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from engine.planning.methods.presets import AttentionMethod
from engine.planning.schedule.allocate import Home, Part, PlanBuilder, Rows, Span, Value
from engine.planning.schedule.plan import Channel, Direction, HeadPart, Kind
from engine.planning.sequence.mask import Mask
from engine.planning.sequence.visibility import Flags, Integers, RowTable

Number = TypeVar("Number", int, Integers)


@dataclass(frozen=True)
class Route:
    """The way of blocks around `outer` rings of `inner` ranks: +1 towards higher ranks, -1 towards lower ones."""

    inner: int
    outer: int
    direction: Literal[-1, 1] = -1

    @property
    def size(self) -> int:
        """Number of ranks, and of steps that have tiles."""
        return self.inner * self.outer

    def visitor(self, home: Number, cycle: Number, index: Number) -> Number:
        """Rank that works on the block of `home` at inner step `index` of `cycle`; numbers or arrays of them."""
        node, local = divmod(home, self.inner)
        node = (node + self.direction * cycle) % self.outer
        return node * self.inner + (local + self.direction * index) % self.inner


def route_of(method: AttentionMethod, direction: Direction) -> Route:
    """The direction that moves fewer bytes under causal zigzag (any other layout: equal).

    Downwards the payload shrinks early; upwards the gradients of a flat kv ring stay half as long for longer. A
    reversed backward pass turns the forward ring around by itself; of chunks gradients go home straight.
    """
    inner, outer = method.ring_inner_size, method.ring_outer_size
    whole = method.chunk_tokens is None
    upwards = direction == "backward" and method.backward_circulates == "kv" and outer == 1 and whole
    return Route(inner, outer, 1 if upwards and method.backward_order == "same" else -1)


def keeps_last(method: AttentionMethod) -> bool:
    """Whether forward leaves its last block for backward; a ring of one rank holds its own only."""
    return method.backward_order == "reversed" and method.ring_inner_size * method.ring_outer_size > 1


def travels(method: AttentionMethod, direction: Direction) -> Literal["kv", "q"]:
    """What goes around the ring."""
    return method.backward_circulates if direction == "backward" and method.kv_transport == "p2p" else "kv"


def last_home(method: AttentionMethod, member: int) -> int:
    """Home of the block that a member of the ring holds last in forward."""
    return route_of(method, "forward").visitor(member, 1, 1)


Members = dict[int, Value]  # by planned member of the ring


class Trip(NamedTuple):
    """What goes around the ring of one part of the heads.

    chunk      of every member's block
    spans      when its steps are: one for each member, and two in which gradients come home
    payload    what travels, by the member that it starts from
    sums       backward: its gradients, where they come home
    kv_last    where the method `keeps_last`, forward writes it: that of rank r has the rows of the block of
               `last_home(r)`. It is the payload of backward then, which never touches a rank's own K and V
    """

    head: int
    chunk: int
    spans: list[Span]
    payload: Members
    sums: Members
    kv_last: Members


class Place(NamedTuple):
    """Where a block is at one step of its way around the ring; each rank is visited once."""

    cycle: int
    inner_step: int


_START = Place(0, 0)


@dataclass(frozen=True)
class Journey:
    """One block's way around the ring, and the values it makes on planned ranks."""

    home: int
    held: dict[Place, Value] = field(default_factory=dict)  # the block
    sums: dict[Place, Value] = field(default_factory=dict)


class Circulation(ABC):
    """Emits one trip of every member's block, or of a chunk of it, around a ring with a planned rank; all methods write
    into the builder, whose direction says which pass.

    What touches no planned rank is skipped: arrays over all visits [home, cycle, inner step] say what does, and only
    that is emitted one by one.
    """

    def __init__(self, method: AttentionMethod, mask: Mask, builder: PlanBuilder, trip: Trip) -> None:
        self.builder = builder
        self.route = route_of(method, builder.direction)
        self.head, self.chunk, self.spans, self.payload, self.home_sums, self.kv_last = trip
        self.ranks, self.heads = method.grid.ring(self.head), HeadPart(self.head, method.grid.heads)
        self.kept = frozenset(member for member, rank in enumerate(self.ranks) if rank in builder.kept)
        self.backward = builder.direction == "backward"
        self.gathers = method.kv_transport == "all_gather"
        # Gradients go home from every visit by themselves.
        self.straight = self.gathers or method.chunk_tokens is not None
        self.leaves_last = keeps_last(method) and not self.backward
        self.reversed = keeps_last(method) and self.backward
        # Behind a window no step waits for the last hop, and a tail would add one.
        tails = self.backward and not self.reversed and not self.straight and mask.window is None
        self.tail = min(method.deferred_local_tiles, self.route.inner) if tails and self.route.size > 1 else 0
        queries_travel = travels(method, builder.direction) == "q"
        self.payload_kind = Kind.QX if queries_travel else Kind.KV
        self.gradient_kind = Kind.DQ if queries_travel else Kind.DKV
        narrow = {Kind.DKV: Kind.DKV_WIRE, Kind.DQ: Kind.DQ_WIRE}[self.gradient_kind]
        self.wire_kind = self.gradient_kind if method.gradient_wire_dtype == "float32" else narrow
        # If only some ask, few rows travel the whole way, and the last block better comes by itself.
        self.shortcut = self.leaves_last and mask.query_stop is not None
        self.step = self._steps()
        self.rank = self._ranks()
        planned = np.isin(range(self.route.size), list(self.kept))
        self.planned = planned[self.rank]
        nodes = planned.reshape(self.route.outer, -1).any(axis=1)
        self.at_planned_node = np.repeat(nodes, self.route.inner)
        self.needed = self._needed()
        self._find_messages()
        if self.backward:
            self._find_gradients()

    @abstractmethod
    def rows_needed(self, blocks: Collection[int], readers: Collection[int], *, ever: bool = False) -> RowTable:
        """Rows [home, member] of what travels that every member needs of `blocks`, and `readers` of all.

        ever   all queries count, even if only some ask now
        """

    @abstractmethod
    def compute(self, journey: Journey, place: Place) -> None:
        """Tiles of a visit on a planned rank."""

    def travel(self) -> None:
        """Emit every block's journey."""
        messages, tiles = _by_home(self.received), _by_home(self.needed.exists & self.planned)
        if self.backward:
            sums, ends = _by_home(self.chained), _by_home(self.ends)
        for home in range(self.route.size):
            start = int(self.rank[home, 0, 0])
            journey = Journey(home, {_START: self.payload[start]} if start in self.payload else {})
            self._send_payload(journey, messages[home])
            for place in tiles[home]:
                self.compute(journey, place)
            if self.backward:
                for place in sums[home]:
                    self._pass_sum_on(journey, place)
                self._return_gradients(journey, ends[home])

    def _steps(self) -> dict[Place, int]:
        """The step of every (cycle, inner step): the own node first, but for what is kept for the tail."""
        inner, late = self.route.inner, max(0, self.tail - 1)
        remote = [Place(cycle, index) for cycle in range(1, self.route.outer) for index in range(inner)]
        own = [Place(0, index) for index in range(inner)]
        return {place: step for step, place in enumerate([*own[: inner - late], *remote, *own[inner - late :]])}

    def _ranks(self) -> Integers:
        """Rank at which each block is: backward may go back from where forward ended."""
        homes, cycles, indices = np.ogrid[: self.route.size, : self.route.outer, : self.route.inner]
        if self.reversed:
            cycles, indices = -1 - cycles, -1 - indices
        return self.route.visitor(homes, cycles, indices)

    def _needed(self) -> RowTable:
        """Rows of the block that are sent to each visit, as far as planned ranks take part: visits at their nodes, and
        all visits of the blocks that they start, take between nodes, hold last or gather the gradients of.
        """
        homes = np.arange(self.route.size)
        if self.gathers:
            blocks = readers = list(self.kept)
        else:
            whole_way = self.at_planned_node | self.planned[:, :, 0].any(axis=1) | self.planned[:, -1].any(axis=1)
            blocks, readers = np.flatnonzero(whole_way).tolist(), np.flatnonzero(self.at_planned_node).tolist()
        by_rank = self.rows_needed(blocks, readers)
        index = homes[:, None, None], self.rank
        needed = RowTable(by_rank.start[index], by_rank.stop[index])
        if self.leaves_last:
            # All queries take part in the backward pass that starts from the last block.
            whole = self.rows_needed(blocks, readers, ever=True) if self.shortcut else by_rank
            needed.start[:, -1, -1], needed.stop[:, -1, -1] = whole.hull(axis=1)
        return needed

    # ---- payload ------------------------------------------------------------------------------------------------

    def _find_messages(self) -> None:
        """Which visits receive the block, with which rows and from which visit of the same cycle (the first visit of a
        cycle: from that of which cycle).
        """
        passed_on = np.ones(self.rank.shape, dtype=np.bool_)
        passed_on[:, 0, 0] = False
        passed_on[:, -1, -1] &= not self.shortcut
        readers = self.needed.where(passed_on)
        if self.gathers:
            self.carried = readers
            self.received = readers.exists & (self.planned | self.planned[:, :1, :1])
            return
        self.carried = readers.from_here_on(axis=2)
        cycles = RowTable(self.carried.start[:, :, 0], self.carried.stop[:, :, 0])
        receives = readers.exists
        receives[:, 1:, 0] = cycles.exists[:, 1:]
        self.source = _before(receives, axis=2, otherwise=0)
        source_is_planned = np.take_along_axis(self.planned, self.source, axis=2)
        self.source[:, :, 0] = _before(cycles.exists, axis=1, otherwise=0)
        source_is_planned[:, :, 0] = np.take_along_axis(self.planned[:, :, 0], self.source[:, :, 0], axis=1)
        self.carried.start[:, :, 0], self.carried.stop[:, :, 0] = cycles.from_here_on(axis=1)
        self.received = receives & (self.planned | source_is_planned)

    def _send_payload(self, journey: Journey, received: list[Place]) -> None:
        """Messages that bring the block to all who need it."""
        if self.shortcut:
            self._send_last(journey)
        for place in received:
            step, inside = self.step[place], self._inside(place)
            if self.gathers:
                before, when = _START, (max(0, step - 1 - self.route.inner), step - 1, inside)
            elif place.inner_step:
                before = Place(place.cycle, int(self.source[journey.home, *place]))
                when = (step - 1, step - 1, Channel.PAYLOAD_INNER)
            else:
                before = Place(int(self.source[journey.home, *place]), 0)
                when = (self.step[Place(place.cycle - 1, 0)], step - 1, Channel.PAYLOAD_OUTER)
            self._pass_on(journey, when, before, place, _rows(self.carried, journey.home, place))

    def _send_last(self, journey: Journey) -> None:
        """The message that brings the block straight to who keeps it, hidden behind the tiles of the last cycle."""
        place = Place(self.route.outer - 1, self.route.inner - 1)
        rows = _rows(self.needed, journey.home, place)
        if rows.start < rows.stop:
            wait = self.step[place] - 1
            post = min(self.step[Place(place.cycle, 0)], wait) if place.cycle else wait
            self._pass_on(journey, (post, wait, self._inside(place)), _START, place, rows)

    @staticmethod
    def _inside(place: Place) -> Channel:
        """Of a message between home and a visit."""
        return Channel.PAYLOAD_OUTER if place.cycle else Channel.PAYLOAD_INNER

    def _pass_on(
        self, journey: Journey, when: tuple[int, int, Channel], before: Place, after: Place, rows: Rows
    ) -> None:
        """Send rows of the block from one visit to another."""
        held, receiver = journey.held.get(before), int(self.rank[journey.home, *after])
        if held is None:  # on a rank that is not planned
            held = self._value(int(self.rank[journey.home, *before]), self.payload_kind, rows)
        stays = self.leaves_last and self.step[after] == self.route.size - 1
        last = self.kv_last.get(receiver) if stays else None
        journey.held[after] = last or self._value(receiver, self.payload_kind, rows)
        self._message(*when, (held, rows), (journey.held[after], rows))

    def _value(self, member: int, kind: Kind, rows: Rows) -> Value:
        return self.builder.value(self.ranks[member], Home(kind, self.heads), rows)

    def _message(self, post: int, wait: int, channel: Channel, src: Part, dst: Part) -> None:
        self.builder.message(self.spans[post].post, self.spans[wait].wait, channel, src, dst)

    # ---- gradients ----------------------------------------------------------------------------------------------

    def travelling_sum(self, journey: Journey, place: Place) -> Value | None:
        """The gradient sum that travels and that a visit adds to; None: it adds to none."""
        return self._sum(journey, place) if self.backward and self.adds[journey.home, *place] else None

    def _sum(self, journey: Journey, place: Place) -> Value:
        """The gradient sum that a visit adds to."""
        if place not in journey.sums:
            rank, rows = int(self.rank[journey.home, *place]), _rows(self.summed, journey.home, place)
            journey.sums[place] = self._value(rank, self.gradient_kind, rows)
        return journey.sums[place]

    def _find_gradients(self) -> None:
        """Which visits add to a gradient sum that travels, which rows it then has, and where each cycle's ends."""
        at_home = self.rank == np.arange(self.route.size)[:, None, None]
        self.adds = self.needed.exists & ~at_home
        self.summed = self.needed.where(self.adds)
        if self.straight:
            self.chained = np.zeros_like(self.adds)
            self.ends = self.adds & (self.planned | self.planned[:, :1, :1])
            return
        self.summed = self.summed.up_to_here(axis=2)
        self.added_before = _before(self.adds, axis=2, otherwise=-1)
        passes = np.take_along_axis(self.planned, self.added_before, axis=2)
        self.chained = self.adds & (self.added_before >= 0) & (self.planned | passes)
        is_last = self.adds & (np.cumsum(self.adds, axis=2) == self.adds.sum(axis=2, keepdims=True))
        self.ends = is_last & (self.planned | self.at_planned_node[:, None, None])

    def _return_gradients(self, journey: Journey, ends: list[Place]) -> None:
        """The sums of all cycles come home: straight inside the node, over a relay from others."""
        target = self.home_sums.get(journey.home) or self._value(journey.home, self.gradient_kind, Rows(0, 0))
        home_cycle = self.route.outer - 1 if self.reversed else 0
        deadline = self.route.size - (self.tail > 1)
        arrivals: defaultdict[int, list[tuple[int, int, Value]]] = defaultdict(list)  # relay -> (post, wait, tail)
        for place in ends:
            post, tail = self.step[place] + 1, self._sum(journey, place)
            if self.straight or place.cycle == home_cycle:
                channel = Channel.GRADIENT_INNER if place.cycle == home_cycle else Channel.GRADIENT_OUTER
                self._add(post, target, self._hop(post, post, channel, tail, journey.home))
            else:
                wait = max(post, min(post + self.route.inner - 1, deadline))
                arrivals[int(self.rank[journey.home, home_cycle, place.inner_step])].append((post, wait, tail))
        for relay, tails in arrivals.items():
            self._collect(relay, tails, target, journey.home)

    def _pass_sum_on(self, journey: Journey, place: Place) -> None:
        """Add the sum of the visit before to this one's, one step late so that the hop hides behind the tile."""
        before = Place(place.cycle, int(self.added_before[journey.home, *place]))
        source, target, step = self._sum(journey, before), self._sum(journey, place), self.step[place]
        rank = int(self.rank[journey.home, *place])
        self._add(step, target, self._hop(step, step, Channel.GRADIENT_INNER, source, rank))

    def _collect(self, relay: int, tails: list[tuple[int, int, Value]], target: Value, home: int) -> None:
        """Bring the sums of far cycles to the home node's rank `relay`, then home."""
        if relay == home:
            for post, wait, tail in tails:
                self._add(wait, target, self._hop(post, wait, Channel.GRADIENT_OUTER, tail, relay))
            return
        if len(tails) == 1:
            post, done, tail = tails[0]
            total = self._hop(post, done, Channel.GRADIENT_OUTER, tail, relay)
        else:
            rows = Rows(min(tail.rows.start for *_, tail in tails), max(tail.rows.stop for *_, tail in tails))
            total = self._value(relay, self.gradient_kind, rows)
            for post, wait, tail in tails:
                self._add(wait, total, self._hop(post, wait, Channel.GRADIENT_OUTER, tail, relay))
            done = max(wait for _, wait, _ in tails)
        self._add(done + 1, target, self._hop(done + 1, done + 1, Channel.GRADIENT_INNER, total, home))

    def _hop(self, post: int, wait: int, channel: Channel, src: Value, to: int) -> Value:
        """Value that arrives on rank `to`; cast to the wire's dtype first where that is narrower."""
        if src.kind != self.wire_kind:
            narrow = self.builder.value(src.rank, src.home._replace(kind=self.wire_kind), src.rows)
            self.builder.op(self.spans[post].post, "pre", "copy", narrow.whole, src.whole)
            src = narrow
        arrived = self._value(to, self.wire_kind, src.rows)
        self._message(post, wait, channel, src.whole, arrived.whole)
        return arrived

    def _add(self, step: int, dst: Value, src: Value) -> None:
        self.builder.op(self.spans[step].wait, "after", "add", (dst, src.rows), src.whole)


def _rows(table: RowTable, home: int, place: Place) -> Rows:
    return Rows(int(table.start[home, *place]), int(table.stop[home, *place]))


def _before(chosen: Flags, axis: int, otherwise: int) -> Integers:
    """For every entry the index of the last chosen one before it along an axis."""
    shape = [1] * chosen.ndim
    shape[axis] = -1
    index = np.where(chosen, np.arange(chosen.shape[axis]).reshape(shape), otherwise)
    before = np.roll(np.maximum.accumulate(index, axis), 1, axis)
    before.swapaxes(0, axis)[0] = otherwise
    return before


def _by_home(chosen: Flags) -> list[list[Place]]:
    """The chosen visits of every block, in order."""
    places: list[list[Place]] = [[] for _ in chosen]
    for home, cycle, index in np.argwhere(chosen).tolist():
        places[home].append(Place(cycle, index))
    return places
