"""All ranks of a group in one process: a hub that delivers messages late or early, and the loop that steps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.executor import Execution
from engine.attention.transport import P2POp
from engine.planning.program.ops import LinkBytes
from engine.planning.topology import Topology


class PlanError(Exception):
    """A plan breaks one of its own rules."""


@dataclass
class _Message:
    source: tuple[Tensor, ...] | None = None
    target: tuple[Tensor, ...] | None = None
    ends: int = 2
    waits: int = 0
    delivered: bool = False


class Hub:
    """All ranks of a group inside one process, for executors stepped by `lockstep`.

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

    def posted(self, rank: int, op: P2POp) -> None:
        """Register one end."""
        message = self._messages.setdefault(op.tag, _Message())
        if op.op == "send":
            self._register_send(rank, op, message)
        elif op.op == "recv":
            self._register_target(op.tag, op.tensors, message)
        else:
            self._register_copy(rank, op, message)
        if not self.late and message.source is not None and message.target is not None:
            self._copy(op.tag, message)

    def waited(self, number: int) -> None:
        """Register that one end waits for a message."""
        if number not in self._messages:
            raise PlanError(f"message {number} is waited for before it is posted")
        self._messages[number].waits += 1

    def _register_send(self, rank: int, op: P2POp, message: _Message) -> None:
        if message.source is not None:
            raise PlanError(f"message {op.tag} is sent twice")
        message.source = op.tensors
        size = op.num_bytes
        same = self.topology.same_node(rank, op.peer)
        sent = self.sent[rank]
        intra, inter = sent.intra_bytes + size * same, sent.inter_bytes + size * (not same)
        self.sent[rank] = sent._replace(intra_bytes=intra, inter_bytes=inter)

    def _register_target(self, number: int, tensors: tuple[Tensor, ...], message: _Message) -> None:
        if message.target is not None:
            raise PlanError(f"message {number} is received twice")
        message.target = tensors
        for tensor in tensors:
            poison(tensor)

    def _register_copy(self, rank: int, op: P2POp, message: _Message) -> None:
        if message.source is not None:
            raise PlanError(f"message {op.tag} is copied twice")
        message.source, message.ends = op.tensors, 1
        self._register_target(op.tag, op.into, message)
        sent = self.sent[rank]
        self.sent[rank] = sent._replace(host_bytes=sent.host_bytes + op.num_bytes)

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

    def post(self, ops: Sequence[P2POp]) -> None:
        """Register the ops with the hub."""
        for op in ops:
            self._hub.posted(self._rank, op)

    def wait(self, messages: Sequence[int]) -> None:
        """Register the waits; bytes arrive when the lockstep driver calls `Hub.deliver`."""
        for message in messages:
            self._hub.waited(message)


def poison(tensor: Tensor) -> Tensor:
    """Fill with bytes 0xFF (NaN in floats, -1 in integers), so that reading what nobody wrote shows."""
    tensor.view(torch.uint8).fill_(0xFF)
    return tensor


def lockstep(executions: Sequence[Execution], hub: Hub) -> None:
    """Run the executions of all ranks of a group in one process, step by step, over `hub`."""
    running = [({step.index for step in execution.plan.steps}, execution.steps()) for execution in executions]
    for step in sorted(set().union(*(indexes for indexes, _ in running))):
        active = [steps for indexes, steps in running if step in indexes]
        for steps in active:
            next(steps)
        for steps in active:
            next(steps)
        hub.deliver()
        for steps in active:
            next(steps)
    hub.finish()
