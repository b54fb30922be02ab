"""Simulates an attention plan on a machine: when each rank computes, sends and waits. No torch, no randomness.

Every rank runs its steps in order as `engine.planning.program.ops` defines: local ops, posts, tiles, waits, local ops.
A message starts when both ends have posted it, their channel has finished its messages of earlier steps (a channel is a
FIFO), and the link is free. The channels of a rank share its links. Messages are served in order of step, then channel,
then distance, so that an all-to-all causes no queue. Links are full duplex; a message occupies the sender's and the
receiver's side for bytes / rate and ends one latency later. Kernels do not slow links down; messages slow kernels down
by `Machine.message_compute_share`.

Messages are served in the plan's order, never by arrival, so times are sums and maxima of costs and a slower machine
can never make a plan faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.planning.program.ops import (
    AttentionPlan,
    Channel,
    LocalOp,
    RankPlan,
    Step,
    Tile,
    TokenBytes,
    Transfer,
)
from engine.planning.topology import Topology
from engine.predict.machine import LinkKind, Machine
from engine.predict.plan_costs import ViewBytes, expansion_flops, tile_flops

COMPUTE_LANE = "compute"
_CHANNEL_ORDER = {channel: index for index, channel in enumerate(Channel)}


class Interval(NamedTuple):
    """An activity of one rank from `start_s` to `stop_s`.

    Attributes:
        lane: "compute" or the name of a channel.
        kind: On the compute lane full, causal, band (tiles), op (local operation), copy (slowed down by messages) or
            wait; on a channel send, recv, load or store.
    """

    rank: int
    lane: str
    kind: str
    start_s: float
    stop_s: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.stop_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """The result of a replay: intervals in order of steps, and sums per rank."""

    intervals: tuple[Interval, ...]
    finish_s: Mapping[int, float]
    compute_s: Mapping[int, float]  # tiles and local operations
    waited_s: Mapping[int, float]  # exposed transfers, late ranks, and time lost to messages

    @property
    def total_s(self) -> float:
        """When the last rank finishes."""
        return max(self.finish_s.values())

    @property
    def busiest_s(self) -> float:
        """Computation of the rank that computes most."""
        return max(self.compute_s.values())

    @property
    def exposed_s(self) -> float:
        """Exposed communication: the total minus the time of the same plan with free transfers."""
        return self.total_s - self.busiest_s


class _Message(NamedTuple):
    """A transfer with both of its ends; between a device and its host memory `src` is `dst`."""

    order: tuple[int, int, int]  # channel, distance, source
    number: int
    channel: Channel
    op: str
    src: int
    dst: int
    size: int


def replay(plan: AttentionPlan, machine: Machine, token_bytes: TokenBytes, topology: Topology) -> Timeline:
    """Simulate a plan; takes about 10 microseconds per tile and message.

    If the plan has only some of the ranks, each missing rank is assumed to be as far as the planned rank that it
    exchanges a message with, on its own links.

    Args:
        plan: The plan of all or some ranks.
        machine: Rates and latencies.
        token_bytes: Bytes per token of each kind of buffer.
        topology: Nodes of the ranks.
    """
    return _Replay(plan, machine, token_bytes, topology).run()


class _Replay:
    """Clocks of all ranks and links; `run` advances them step by step."""

    def __init__(self, plan: AttentionPlan, machine: Machine, token_bytes: TokenBytes, topology: Topology) -> None:
        self.plan = plan
        self.machine = machine
        self.token_bytes = token_bytes
        self.rank_of_latents = token_bytes.latent.rank if token_bytes.latent else 0
        self.bytes = {rank: ViewBytes(rank_plan.buffers, token_bytes) for rank, rank_plan in plan.ranks.items()}
        self.network = _Network(machine, topology)
        self.clock = dict.fromkeys(plan.ranks, 0.0)
        self.compute = dict.fromkeys(plan.ranks, 0.0)
        self.waited = dict.fromkeys(plan.ranks, 0.0)
        self.intervals: list[Interval] = []

    def run(self) -> Timeline:
        """Simulate every step of every rank."""
        for _, group in sorted(_steps_by_index(self.plan.ranks.values()).items()):
            for rank, step in group:
                self._ops(rank, step.pre)
            posted = [(rank, transfer) for rank, step in group for transfer in step.post]
            self.intervals += self.network.serve(self._messages(posted), self.clock)
            self._copy(posted)
            for rank, step in group:
                self._tiles(rank, step.tiles)
                self._wait(rank, step)
                self._ops(rank, step.after)
        return Timeline(tuple(self.intervals), self.clock, self.compute, self.waited)

    def _messages(self, posted: Sequence[tuple[int, Transfer]]) -> list[_Message]:
        messages = []
        for rank, transfer in posted:
            peer = transfer.peer
            if transfer.op == "recv" and peer in self.plan.ranks:
                continue  # its sender adds it
            src, dst, op = (peer, rank, "send") if transfer.op == "recv" else (rank, peer, transfer.op)
            order = (_CHANNEL_ORDER[transfer.channel], (dst - src) % self.plan.size, src)
            size = self.bytes[rank].of_transfer(transfer)
            messages.append(_Message(order, transfer.tag, transfer.channel, op, src, dst, size))
        return sorted(messages)

    def _copy(self, posted: Iterable[tuple[int, Transfer]]) -> None:
        """Add the time that a rank's kernels lose to the messages that it sends and, equally many, receives."""
        machine = self.machine
        for rank, transfer in posted if machine.message_compute_share else ():
            if transfer.op == "send":
                start, size = self.clock[rank], self.bytes[rank].of(transfer.view)
                lost_s = machine.message_compute_share * size / machine.intra_bytes_per_s
                self.clock[rank] += lost_s
                self.waited[rank] += lost_s
                self.intervals.append(Interval(rank, COMPUTE_LANE, "copy", start, self.clock[rank]))

    def _busy(self, rank: int, kind: str, seconds: float) -> None:
        start = self.clock[rank]
        self.clock[rank] = start + seconds
        self.compute[rank] += seconds
        self.intervals.append(Interval(rank, COMPUTE_LANE, kind, start, self.clock[rank]))

    def _ops(self, rank: int, ops: Iterable[LocalOp]) -> None:
        for op in ops:
            self._busy(rank, "op", self.bytes[rank].moved_by_op(op) / self.machine.elementwise_bytes_per_s)

    def _tiles(self, rank: int, tiles: Iterable[Tile]) -> None:
        machine, buffers, direction = self.machine, self.plan.ranks[rank].buffers, self.plan.direction
        for tile in tiles:
            band = tile.band
            flops = tile_flops(tile, buffers, self.token_bytes, direction, machine.kernel_block_rows)
            seconds = (
                flops / machine.tile_flops_per_s(direction, min(band.num_queries, band.num_keys))
                + machine.tile_overhead_s
            )
            seconds += self.bytes[rank].moved_by_tile(tile) / machine.elementwise_bytes_per_s
            if expanded := expansion_flops(tile, self.token_bytes, direction):
                seconds += expanded / machine.product_flops_per_s(min(band.num_keys, self.rank_of_latents))
            self._busy(rank, band.kind, seconds)

    def _wait(self, rank: int, step: Step) -> None:
        if not step.wait:
            return
        start = self.clock[rank]
        stop = max(start, *(self.network.finish[message] for message in step.wait))
        if stop > start:
            self.clock[rank] = stop
            self.waited[rank] += stop - start
            self.intervals.append(Interval(rank, COMPUTE_LANE, "wait", start, stop))


class _Network:
    """When each link and channel becomes free."""

    def __init__(self, machine: Machine, topology: Topology) -> None:
        self.machine = machine
        self.topology = topology
        self.finish: dict[int, float] = {}  # by message
        self._link_free: defaultdict[tuple[LinkKind, str, int], float] = defaultdict(float)
        self._channel_free: defaultdict[tuple[Channel, int], float] = defaultdict(float)

    def serve(self, messages: Iterable[_Message], posted: Mapping[int, float]) -> list[Interval]:
        """Return both ends of all messages of one step as intervals; `posted` is the time at which each rank posts."""
        intervals: list[Interval] = []
        done: dict[tuple[Channel, int], float] = {}
        for message in messages:
            channel, src, dst = message.channel, message.src, message.dst
            free = max(self._channel_free[channel, src], self._channel_free[channel, dst])
            ready = max(posted[rank] for rank in (src, dst) if rank in posted)
            start, stop = self._send(message, max(free, ready))
            self.finish[message.number] = stop
            for rank, kind in self._ends(message):
                if rank not in posted:
                    continue
                done[channel, rank] = max(stop, done.get((channel, rank), 0.0))
                intervals.append(Interval(rank, channel.value, kind, start, stop))
        # After the loop, because messages of one channel and step are one group and start together.
        self._channel_free.update(done)
        return intervals

    def _ends(self, message: _Message) -> tuple[tuple[int, str], ...]:
        if message.op == "send":
            return (message.src, "send"), (message.dst, "recv")
        return ((message.src, message.op),)

    def _send(self, message: _Message, ready: float) -> tuple[float, float]:
        """Return start and end of a message that may start at `ready`, and occupy the two sides of its link."""
        link, near, far = self._sides(message)
        seconds = message.size / self.machine.bytes_per_s(link)
        start = max(ready, self._link_free[near])
        self._link_free[near] = start + seconds
        stop = max(start, self._link_free[far]) + seconds if far else start + seconds
        if far:
            self._link_free[far] = stop
        return start, stop + self.machine.latency_s(link)

    def _sides(self, message: _Message) -> tuple[LinkKind, tuple[LinkKind, str, int], tuple[LinkKind, str, int] | None]:
        if message.op != "send":
            return "host", ("host", message.op, message.src), None
        src, dst = message.src, message.dst
        link: LinkKind = "intra" if self.topology.same_node(src, dst) else "inter"
        if link == "inter" and self.machine.shared_nic:
            src, dst = self.topology.node_of(src), self.topology.node_of(dst)
        return link, (link, "out", src), (link, "in", dst)


def _steps_by_index(plans: Iterable[RankPlan]) -> dict[int, list[tuple[int, Step]]]:
    steps: defaultdict[int, list[tuple[int, Step]]] = defaultdict(list)
    for plan in plans:
        for step in plan.steps:
            steps[step.index].append((plan.rank, step))
    return steps
