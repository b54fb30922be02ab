"""Moving rows between ranks: one small protocol, and its torch.distributed transport.

A transport moves whole tensors and knows nothing of attention. Rules that every caller keeps (see
`engine.planning.program.ops`): both ends post at the same step in the same order, both wait at the same
later-or-equal step, and nothing touches the tensors in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.stream_times import TransferTimes
from engine.distributed.waits import WaitClock
from engine.planning.program.ops import HOST_CHANNELS, Channel, LinkBytes
from engine.planning.topology import Topology


class P2POp(NamedTuple):
    """One end of a message: its number, direction, channel, the other rank of the group and the tensors to move.

    load and store copy `tensors` to `into` on one rank, between host and device memory; `peer` is the rank itself.
    """

    tag: int
    op: Literal["send", "recv", "load", "store"]
    channel: Channel
    peer: int
    tensors: tuple[Tensor, ...]  # contiguous; sent from or received into, in this order
    into: tuple[Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that are moved."""
        return sum(map(_NUM_BYTES, self.tensors))


_NUM_BYTES = attrgetter("nbytes")


class Meter:
    """Counts the bytes that one rank sends, by kind of link, and copies between host and device."""

    def __init__(self, topology: Topology, rank: int) -> None:
        self._same_node = [topology.same_node(rank, peer) for peer in range(topology.size)]
        self.reset()

    @property
    def sent(self) -> LinkBytes:
        """Bytes since the last `reset`."""
        return LinkBytes(self._intra, self._inter, self._host)

    def reset(self) -> None:
        """Start counting from zero."""
        self._intra = self._inter = self._host = 0

    def count(self, op: P2POp) -> None:
        """Add one end of a message; the receiving end counts nothing."""
        if op.op == "recv":
            return
        if op.op != "send":
            self._host += op.num_bytes
        elif self._same_node[op.peer]:
            self._intra += op.num_bytes
        else:
            self._inter += op.num_bytes


class Transport(ABC):
    """Point-to-point messages inside one context-parallel group, and copies between host and device.

    copies, messages   measure them, where streams carry them
    waits              is told whom the host waits for, by global rank
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.copies: TransferTimes[Any] = TransferTimes()
        self.messages: TransferTimes[Any] = TransferTimes()
        self.waits = WaitClock()

    @abstractmethod
    def post(self, ops: Sequence[P2POp]) -> None:
        """Start all messages of a step; returns at once."""

    @abstractmethod
    def wait(self, messages: Sequence[int]) -> None:
        """Return when the tensors of these messages may be used again (on CUDA: when the current stream will see
        it).
        """


class SilentTransport(Transport):
    """Moves nothing, so values are wrong: for the time without messages, and for memory."""

    def __init__(self) -> None:
        super().__init__(Meter(Topology(1, 1), 0))

    def post(self, ops: Sequence[P2POp]) -> None:
        """Nothing starts."""

    def wait(self, messages: Sequence[int]) -> None:
        """Nothing is waited for."""


class Messenger(Protocol):
    """Starts the messages of one channel."""

    def start(self, channel: Channel, ops: Sequence[P2POp]) -> Sequence[Sequence[Pending]]:
        """For every op what to wait for; all of them belong to one step and start together."""


class Pending(Protocol):
    """A transfer that was started."""

    def wait(self) -> object:
        """Return when its tensors may be used (under NCCL: when what the current stream is given next will see it)."""


class GroupMessenger:
    """torch.distributed point-to-point, one process group per channel.

    `groups` come from `make_channel_groups`; `ranks` are the group's global ranks in ring order.
    """

    def __init__(self, groups: Mapping[Channel, dist.ProcessGroup], ranks: Sequence[int]) -> None:
        self._groups = dict(groups)
        self._ranks = tuple(ranks)

    def start(self, channel: Channel, ops: Sequence[P2POp]) -> list[list[dist.Work]]:
        """One batch; NCCL returns one work for all of it, gloo one per tensor."""
        group = self._groups[channel]
        batch = []
        for op in ops:
            call = dist.isend if op.op == "send" else dist.irecv
            batch += [dist.P2POp(call, tensor, self._ranks[op.peer], group) for tensor in op.tensors]
        works = dist.batch_isend_irecv(batch)
        if len(works) != len(batch):
            return [works for _ in ops]
        each = iter(works)
        return [[next(each) for _ in op.tensors] for op in ops]


class DistributedTransport(Transport):
    """torch.distributed point-to-point in the memory where the tensors lie; waiting is up to the process group's works.

    For CPUs. Every rank of the group must execute plans in the same order.
    """

    def __init__(
        self, groups: Mapping[Channel, dist.ProcessGroup], ranks: Sequence[int], topology: Topology, rank: int
    ) -> None:
        super().__init__(Meter(topology, rank))
        self._messenger = GroupMessenger(groups, ranks)
        self._ranks = tuple(ranks)
        self._works: dict[int, tuple[str, int, list[dist.Work]]] = {}

    def post(self, ops: Sequence[P2POp]) -> None:
        """Start the messages, those of one channel in one batch; copies are made at once."""
        for channel, members in by_channel(ops).items():
            for op in members:
                self.meter.count(op)
            if channel in HOST_CHANNELS:
                for op in members:
                    _copy(op)
                continue
            for op, works in zip(members, self._messenger.start(channel, members), strict=True):
                self._works[op.tag] = op.op, op.peer, works

    def wait(self, messages: Sequence[int]) -> None:
        """Wait for each message's tensors."""
        for message in messages:
            if message not in self._works:
                continue  # a copy on this rank
            op, peer, works = self._works.pop(message)
            self.waits.begin(op, self._ranks[peer])
            for work in works:
                work.wait()
            self.waits.end()


def _copy(op: P2POp) -> None:
    for source, target in zip(op.tensors, op.into, strict=True):
        target.copy_(source)


def by_channel(ops: Sequence[P2POp]) -> dict[Channel, list[P2POp]]:
    """The ops of every channel, in the given order; channels in the order of their definition.

    All ranks then start their batches in the same order, by step and channel. Where a device runs the batches of
    several channels one after the other (few hardware queues, all multiprocessors taken), another order could leave
    two ranks waiting for each other.
    """
    found: dict[Channel, list[P2POp]] = {}
    for op in ops:
        found.setdefault(op.channel, []).append(op)
    return found if len(found) == 1 else {channel: found[channel] for channel in sorted(found, key=_ORDER.__getitem__)}


_ORDER = {channel: order for order, channel in enumerate(Channel)}


def make_channel_groups(
    cp_groups: Sequence[Sequence[int]],
    rank: int,
    channels: Sequence[Channel],
    timeout: timedelta,
    device: torch.device | None = None,
    comm_sms: int | None = None,
) -> dict[Channel, dist.ProcessGroup]:
    """Process groups of this rank, one per channel that leaves the rank. Collective: every rank of the world calls it,
    with the same lists. `device`: a GPU for NCCL groups, a CPU for gloo; None takes the default group's backend.
    `comm_sms`: so many multiprocessors an NCCL group uses at most; None: as it likes.

    `timeout` must be given: a new group does not inherit the default group's and would wait 30 minutes for a dead
    peer.
    """
    backend = None if device is None else "nccl" if device.type == "cuda" else "gloo"
    own: dict[Channel, dist.ProcessGroup] = {}
    for ranks in cp_groups:
        for channel in channels:
            if channel in HOST_CHANNELS:
                continue
            group = dist.new_group(
                list(ranks),
                timeout=timeout,
                backend=backend,
                pg_options=_nccl_options(timeout, comm_sms) if backend == "nccl" else None,
                group_desc=f"cp_{channel}",
            )
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                own[channel] = group
    if backend == "nccl":
        # All ranks of a group must take part in making its communicator, and not all need be in a plan's first batch.
        # A collective would do, and build buffers that no message uses.
        for group in own.values():
            group._get_backend(torch.device("cuda")).eager_connect_single_device(device)
    return own


def _nccl_options(timeout: timedelta, comm_sms: int | None) -> Any:
    """Options of one group (torch writes into them); high priority, lest a transfer's few thread blocks queue behind
    those of a tile. Each channel of NCCL is a thread block, which takes a multiprocessor.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns when it differs from the group's
    if comm_sms is not None:
        options.config.max_ctas = comm_sms
    return options
