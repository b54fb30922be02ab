"""Moving rows between ranks: one small protocol, a torch.distributed transport and an in-process hub for proofs.

A transport moves whole tensors and knows nothing of attention. Rules that every caller keeps (see
`engine.attention.plan`): both ends post at the same step in the same order, both wait at the same later-or-equal step,
and nothing touches the tensors in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.plan import HOST_CHANNELS, Channel, LinkBytes
from engine.attention.topology import Topology
from engine.errors import PlanError


class Parcel(NamedTuple):
    """One end of a message: its number, direction, channel, the other rank of the group and the tensors to move.

    load and store copy `tensors` to `into` on one rank, between host and device memory; `peer` is the rank itself.
    """

    message: int
    op: Literal["send", "recv", "load", "store"]
    channel: Channel
    peer: int
    tensors: tuple[Tensor, ...]  # contiguous; sent from or received into, in this order
    into: tuple[Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that are moved."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class Transport(Protocol):
    """Point-to-point messages inside one context-parallel group, and copies between host and device."""

    def post(self, parcels: Sequence[Parcel]) -> None:
        """Start all messages of a step; returns at once."""

    def wait(self, messages: Sequence[int]) -> None:
        """Return when the tensors of these messages may be used again (on CUDA: when the current stream will see
        it).
        """


class LocalTransport:
    """For a group of one rank: copies between host and device memory, and nobody to send to.

    On a CPU both memories are one, and a copy is made at once.
    """

    def __init__(self) -> None:
        self._sent = LinkBytes()

    @property
    def sent(self) -> LinkBytes:
        """Bytes moved since the last `reset`."""
        return self._sent

    def reset(self) -> None:
        """Start counting from zero."""
        self._sent = LinkBytes()

    def post(self, parcels: Sequence[Parcel]) -> None:
        """Copy."""
        for parcel in parcels:
            assert parcel.channel in HOST_CHANNELS, parcel
            for source, target in zip(parcel.tensors, parcel.into, strict=True):
                target.copy_(source)
            self._sent = replace(self._sent, host_bytes=self._sent.host_bytes + parcel.num_bytes)

    def wait(self, messages: Sequence[int]) -> None:
        """Nothing is left to wait for."""


class DistributedTransport:
    """torch.distributed point-to-point, one process group per channel; counts the bytes it sends.

    `groups` come from `make_channel_groups`; `ranks` are the group's global ranks in ring order. Every rank of the
    group must execute plans in the same order.
    """

    def __init__(
        self, groups: Mapping[Channel, dist.ProcessGroup], ranks: Sequence[int], topology: Topology, rank: int
    ) -> None:
        self._groups = dict(groups)
        self._ranks = tuple(ranks)
        self._topology = topology
        self._rank = rank
        self._works: dict[int, list[dist.Work]] = {}
        self._host = LocalTransport()
        self._sent = LinkBytes()

    @property
    def sent(self) -> LinkBytes:
        """Bytes sent, and copied between host and device, since the last `reset`."""
        return replace(self._sent, host_bytes=self._host.sent.host_bytes)

    def reset(self) -> None:
        """Start counting from zero."""
        self._sent = LinkBytes()
        self._host.reset()

    def post(self, parcels: Sequence[Parcel]) -> None:
        """Start the messages, those of one channel in one batch."""
        by_channel: defaultdict[Channel, list[Parcel]] = defaultdict(list)
        for parcel in parcels:
            by_channel[parcel.channel].append(parcel)
            if parcel.op == "send":
                self._count(parcel)
        for channel, members in by_channel.items():
            if channel in HOST_CHANNELS:
                self._host.post(members)
            else:
                self._post_channel(self._groups[channel], members)

    def wait(self, messages: Sequence[int]) -> None:
        """Wait for each message's tensors."""
        for message in messages:
            for work in self._works.pop(message, ()):  # a copy on this rank has none
                work.wait()

    def _post_channel(self, group: dist.ProcessGroup, parcels: Sequence[Parcel]) -> None:
        ops = []
        for parcel in parcels:
            call = dist.isend if parcel.op == "send" else dist.irecv
            ops += [dist.P2POp(call, tensor, self._ranks[parcel.peer], group) for tensor in parcel.tensors]
        works = dist.batch_isend_irecv(ops)
        if len(works) != len(ops):  # NCCL coalesces a batch into one work
            for parcel in parcels:
                self._works[parcel.message] = list(works)
            return
        for parcel in parcels:
            self._works[parcel.message] = [works.pop(0) for _ in parcel.tensors]

    def _count(self, parcel: Parcel) -> None:
        size = parcel.num_bytes
        same = self._topology.same_node(self._rank, parcel.peer)
        self._sent = LinkBytes(self._sent.intra_bytes + size * same, self._sent.inter_bytes + size * (not same))


def make_channel_groups(
    cp_groups: Sequence[Sequence[int]], rank: int, channels: Sequence[Channel], timeout: timedelta
) -> dict[Channel, dist.ProcessGroup]:
    """Process groups of this rank, one per channel. Collective: every rank of the world calls it, with the same lists.

    `timeout` must be given: a new group does not inherit the default group's and would wait 30 minutes for a dead
    peer.
    """
    own: dict[Channel, dist.ProcessGroup] = {}
    for ranks in cp_groups:
        for channel in channels:
            group = dist.new_group(list(ranks), timeout=timeout, group_desc=f"cp_{channel}")
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                own[channel] = group
    return own


@dataclass
class _Message:
    source: tuple[Tensor, ...] | None = None
    target: tuple[Tensor, ...] | None = None
    ends: int = 2
    waits: int = 0
    delivered: bool = False


class Hub:
    """All ranks of a group inside one process, for executors stepped in lockstep
    (`engine.attention.executor.lockstep`).

    `late=True` copies bytes when both ends wait, from the sender's live buffer, and poisons the receive buffer at
    post: a reader that comes too early, or a writer that reuses a buffer in flight, is found. `late=False` copies as
    soon as both ends have posted: a reader that relies on old contents is found. Sound plans give the same result
    under both.
    """

    def __init__(self, size: int, topology: Topology | None = None, *, late: bool) -> None:
        self.late = late
        self.topology = topology or Topology(1, size)
        self.sent = {rank: LinkBytes() for rank in range(size)}
        self._messages: dict[int, _Message] = {}
        self._size = size

    def transport(self, rank: int) -> HubTransport:
        """The end of one rank."""
        return HubTransport(self, rank)

    def finish(self) -> None:
        """Raise PlanError when a message was left undelivered."""
        left = [number for number, message in self._messages.items() if not message.delivered]
        if left:
            raise PlanError(f"messages {left} were posted or waited for by one end only")

    def deliver(self) -> None:
        """Copy the bytes of messages for which both ends wait (late) and check that every waiter was served."""
        for number, message in self._messages.items():
            if message.delivered or message.waits == 0:
                continue
            if message.waits < message.ends:
                raise PlanError(f"message {number}: one end waits at a step at which the other does not")
            self._copy(number, message)

    def posted(self, rank: int, parcel: Parcel) -> None:
        """Register one end."""
        message = self._messages.setdefault(parcel.message, _Message())
        if parcel.op == "send":
            self._register_send(rank, parcel, message)
        elif parcel.op == "recv":
            self._register_target(parcel.message, parcel.tensors, message)
        else:
            self._register_copy(rank, parcel, message)
        if not self.late and message.source is not None and message.target is not None:
            self._copy(parcel.message, message)

    def waited(self, number: int) -> None:
        """Register that one end waits for a message."""
        if number not in self._messages:
            raise PlanError(f"message {number} is waited for before it is posted")
        self._messages[number].waits += 1

    def _register_send(self, rank: int, parcel: Parcel, message: _Message) -> None:
        if message.source is not None:
            raise PlanError(f"message {parcel.message} is sent twice")
        message.source = parcel.tensors
        size = parcel.num_bytes
        same = self.topology.same_node(rank, parcel.peer)
        sent = self.sent[rank]
        intra, inter = sent.intra_bytes + size * same, sent.inter_bytes + size * (not same)
        self.sent[rank] = replace(sent, intra_bytes=intra, inter_bytes=inter)

    def _register_target(self, number: int, tensors: tuple[Tensor, ...], message: _Message) -> None:
        if message.target is not None:
            raise PlanError(f"message {number} is received twice")
        message.target = tensors
        for tensor in tensors:
            poison(tensor)

    def _register_copy(self, rank: int, parcel: Parcel, message: _Message) -> None:
        if message.source is not None:
            raise PlanError(f"message {parcel.message} is copied twice")
        message.source, message.ends = parcel.tensors, 1
        self._register_target(parcel.message, parcel.into, message)
        sent = self.sent[rank]
        self.sent[rank] = replace(sent, host_bytes=sent.host_bytes + parcel.num_bytes)

    def _copy(self, number: int, message: _Message) -> None:
        if message.delivered:
            return
        if message.source is None or message.target is None:
            raise PlanError(f"message {number} has one end only")
        for source, target in zip(message.source, message.target, strict=True):
            if source.shape != target.shape or source.dtype != target.dtype:
                raise PlanError(f"message {number}: {source.shape} {source.dtype} into {target.shape} {target.dtype}")
            target.copy_(source)
        message.delivered = True


class HubTransport:
    """One rank's end of a Hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank

    def post(self, parcels: Sequence[Parcel]) -> None:
        """Register the parcels with the hub."""
        for parcel in parcels:
            self._hub.posted(self._rank, parcel)

    def wait(self, messages: Sequence[int]) -> None:
        """Register the waits; bytes arrive when the lockstep driver calls `Hub.deliver`."""
        for message in messages:
            self._hub.waited(message)


def poison(tensor: Tensor) -> Tensor:
    """Fill with bytes 0xFF (NaN in floats, -1 in integers), so that reading what nobody wrote shows."""
    tensor.view(torch.uint8).fill_(0xFF)
    return tensor
