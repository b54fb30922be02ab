"""A GPU made of queues: work given to streams is only noted, and run later in any order that the events allow.

Two checks come from the same notes. Vector clocks say whether two accesses to the same bytes are ordered at all
(`Machine.races`); running everything in a random legal order with poisoned receive buffers says whether the numbers
come out right and whether anything deadlocks (`Machine.run`).

Streams are named (rank, name); name None is the rank's compute stream. `Network` behaves as NCCL does below torch:
the batches of a channel run in order on a stream of their own, which first waits for the stream that was current; a
batch holds that stream until all its messages have moved; a message moves after both its batches have begun, the n-th
send of a pair meets the n-th receive.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.executor import Fields, Operand
from engine.attention.transport import P2POp
from engine.planning.program.ops import HOST_CHANNELS, Buffer, Channel, Tile
from testkit.hub import poison

StreamName = tuple[int, str | None]
Clock = dict[StreamName, int]


class Access(NamedTuple):
    """Bytes [start, stop) of memory."""

    start: int
    stop: int
    writes: bool


class Point(NamedTuple):
    """How far a stream had been given work when an event was recorded."""

    stream: StreamName
    count: int
    clock: Clock


@dataclass(eq=False)
class Op:
    """One piece of work; `needs` are points that it starts after, `messages` what must move before it ends."""

    stream: StreamName
    number: int  # on its stream, from 1
    what: str
    needs: tuple[Point, ...]
    clock: Clock
    accesses: list[Access]
    body: Callable[[], None]
    messages: list[Moving] = field(default_factory=list)

    def before(self, other: Op) -> bool:
        """Whether the streams' order and the events put this op before the other one."""
        return other.clock.get(self.stream, 0) >= self.number


@dataclass(eq=False)
class Moving:
    """One message of the network."""

    source: tuple[Tensor, ...] | None = None
    target: tuple[Tensor, ...] | None = None
    begun: int = 0
    moved: bool = False


class DeadlockError(AssertionError):
    """Nothing can go on."""


class Machine:
    """Streams of all ranks of a group."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._clocks: defaultdict[StreamName, Clock] = defaultdict(dict)
        self._needs: defaultdict[StreamName, list[Point]] = defaultdict(list)
        self.current: dict[int, str | None] = defaultdict(lambda: None)

    def enqueue(self, stream: StreamName, what: str, accesses: list[Access], body: Callable[[], None]) -> Op:
        clock = self._clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        op = Op(stream, clock[stream], what, tuple(self._needs.pop(stream, ())), dict(clock), accesses, body)
        self.ops.append(op)
        return op

    def record(self, stream: StreamName) -> Point:
        # An event completes after the waits before it, even with no work between: it has a place in the queue.
        marker = self.enqueue(stream, "event", [], lambda: None)
        return Point(stream, marker.number, marker.clock)

    def hold(self, stream: StreamName, point: Point) -> None:
        self._needs[stream].append(point)
        self._clocks[stream] = joined(self._clocks[stream], point.clock)

    def races(self) -> list[str]:
        """Pairs of accesses to the same bytes, one of them a write, that may happen in either order."""
        found = []
        by_rank: defaultdict[int, list[Op]] = defaultdict(list)
        for op in self.ops:
            by_rank[op.stream[0]].append(op)
        for ops in by_rank.values():
            for index, later in enumerate(ops):
                found += [
                    f"{earlier.what} on {earlier.stream} / {later.what} on {later.stream}"
                    for earlier in ops[:index]
                    if earlier.stream != later.stream and conflict(earlier, later) and not earlier.before(later)
                ]
        return found

    def run(self, seed: int) -> None:
        """Do everything that was noted, in a random legal order."""
        choose = random.Random(seed)
        schedule = Schedule(self.ops)
        self.ops = []
        while actions := schedule.actions():
            choose.choice(actions)()
        schedule.check_done()


class Schedule:
    """Work of all streams while it is being done: every stream works on its first op, in whatever order."""

    def __init__(self, ops: list[Op]) -> None:
        self._queues: defaultdict[StreamName, deque[Op]] = defaultdict(deque)
        for op in ops:
            self._queues[op.stream].append(op)
        self._done: defaultdict[StreamName, int] = defaultdict(int)
        self._begun: dict[StreamName, Op] = {}
        self._moving: list[Moving] = []

    def actions(self) -> list[Callable[[], None]]:
        """Everything that could happen next."""
        moves = [functools.partial(self._move, message) for message in self._moving if message.begun == 2]
        ends = [functools.partial(self._end, op) for op in self._begun.values() if all(m.moved for m in op.messages)]
        starts = [
            functools.partial(self._start, queue[0])
            for stream, queue in self._queues.items()
            if queue
            and stream not in self._begun
            and all(self._done[need.stream] >= need.count for need in queue[0].needs)
        ]
        return [*moves, *ends, *starts]

    def check_done(self) -> None:
        """Raise DeadlockError if something is left."""
        left = [op.what for op in self._begun.values()] + [queue[0].what for queue in self._queues.values() if queue]
        if left:
            raise DeadlockError(f"cannot go on: {left}")

    def _start(self, op: Op) -> None:
        self._begun[op.stream] = self._queues[op.stream].popleft()
        op.body()
        for message in op.messages:
            message.begun += 1
            if message not in self._moving:
                self._moving.append(message)

    def _end(self, op: Op) -> None:
        self._done[op.stream] = self._begun.pop(op.stream).number

    def _move(self, message: Moving) -> None:
        assert message.source is not None
        assert message.target is not None
        self._moving.remove(message)
        for source, target in zip(message.source, message.target, strict=True):
            target.copy_(source)
        message.moved = True


def joined(a: Clock, b: Clock) -> Clock:
    return {stream: max(a.get(stream, 0), b.get(stream, 0)) for stream in a.keys() | b.keys()}


def conflict(a: Op, b: Op) -> bool:
    return any(x.start < y.stop and y.start < x.stop and (x.writes or y.writes) for x in a.accesses for y in b.accesses)


def access(tensors: Sequence[Tensor], *, writes: bool) -> list[Access]:
    result = []
    for tensor in tensors:
        assert tensor.is_contiguous()
        result.append(Access(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), writes))
    return result


class MachineStreams:
    """StreamOps of one rank of the machine."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self._machine = machine
        self._rank = rank

    def record(self, stream: Channel | None) -> Point:
        return self._machine.record((self._rank, stream))

    def hold(self, stream: Channel | None, event: Point) -> None:
        self._machine.hold((self._rank, stream), event)

    @contextlib.contextmanager
    def under(self, stream: Channel) -> Iterator[None]:
        before, self._machine.current[self._rank] = self._machine.current[self._rank], stream
        yield
        self._machine.current[self._rank] = before

    def copy(self, source: Tensor, target: Tensor) -> None:
        stream = (self._rank, self._machine.current[self._rank])
        assert stream[1] is not None, "copies belong to a channel's stream"
        accesses = [*access([source], writes=False), *access([target], writes=True)]
        self._machine.enqueue(stream, f"{stream[1]} copy", accesses, lambda: target.copy_(source))


class Network:
    """Messages between the ranks of a machine; `one_queue`: a rank runs the batches of all its channels in turn."""

    def __init__(self, machine: Machine, *, one_queue: bool = False) -> None:
        self.machine = machine
        self.one_queue = one_queue
        self._sends: defaultdict[tuple[Channel, int, int], list[Moving]] = defaultdict(list)
        self._receives: defaultdict[tuple[Channel, int, int], list[Moving]] = defaultdict(list)

    def messenger(self, rank: int) -> NetworkMessenger:
        return NetworkMessenger(self, rank)

    def end(self, channel: Channel, rank: int, op: P2POp) -> Moving:
        """The message of this end, made by whichever end comes first."""
        send = op.op == "send"
        pair = (channel, rank, op.peer) if send else (channel, op.peer, rank)
        mine, others = (self._sends, self._receives) if send else (self._receives, self._sends)
        count = len(mine[pair])
        message = others[pair][count] if count < len(others[pair]) else Moving()
        mine[pair].append(message)
        if send:
            message.source = op.tensors
        else:
            message.target = op.tensors
        return message


class NetworkMessenger:
    """One rank's end of the network; a Messenger."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self._rank = rank

    def start(self, channel: Channel, ops: Sequence[P2POp]) -> list[list[Work]]:
        assert channel not in HOST_CHANNELS
        machine = self._network.machine
        current = (self._rank, machine.current[self._rank])
        own = (self._rank, "nccl" if self._network.one_queue else f"nccl {channel}")
        machine.hold(own, machine.record(current))
        accesses = [a for p in ops for a in access(p.tensors, writes=p.op == "recv")]
        received = [t for p in ops if p.op == "recv" for t in p.tensors]
        what = f"{channel}: " + ", ".join(f"{p.op} {p.tag}" for p in ops)
        op = machine.enqueue(own, what, accesses, lambda: [poison(t) for t in received])
        op.messages = [self._network.end(channel, self._rank, op) for op in ops]
        work = Work(machine, self._rank, machine.record(own))
        return [[work] for _ in ops]


@dataclass
class Work:
    """What a batch returns: waiting holds the current stream."""

    machine: Machine
    rank: int
    done: Point

    def wait(self) -> None:
        self.machine.hold((self.rank, self.machine.current[self.rank]), self.done)


class DeferredArithmetic:
    """An arithmetic whose tiles and local ops become work of the rank's compute stream."""

    def __init__(self, inner, machine: Machine, rank: int) -> None:
        self._inner = inner
        self._machine = machine
        self._stream = (rank, None)
        self._late: list = []  # what the last tile adds to after the tile

    def allocate(self, buffer: Buffer) -> Fields:
        return self._inner.allocate(buffer)

    def run_tile(self, tile: Tile, fields: Mapping[str, Fields]) -> None:
        accesses = [
            a
            for name, tensors in fields.items()
            for a in access(list(tensors.values()), writes=name in ("sums", "kv_sums"))
        ]
        self._machine.enqueue(self._stream, f"tile {tile}", accesses, lambda: self._inner.run_tile(tile, fields))
        self._late = list(fields.get("kv_sums", {}).values())

    def finish_step(self) -> None:
        self._machine.enqueue(self._stream, "rest", access(self._late, writes=True), self._inner.finish_step)
        self._late = []

    def run_op(self, op: str, dst: Operand, src: Operand | None) -> None:
        accesses = access(list(dst.fields.values()), writes=True)
        accesses += access(list(src.fields.values()), writes=False) if src else []
        self._machine.enqueue(self._stream, op, accesses, lambda: self._inner.run_op(op, dst, src))

    def wire_fields(self, buffer: Buffer, fields: Fields) -> tuple[Tensor, ...]:
        return self._inner.wire_fields(buffer, fields)

    def release(self) -> None:
        self._inner.release()


@contextlib.contextmanager
def host_waits_are_errors() -> Iterator[None]:
    """On a real GPU: torch raises when an operation makes the host wait for it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
