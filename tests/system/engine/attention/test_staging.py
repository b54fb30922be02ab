"""Staging through host memory: the same bytes as direct messages, taken at the post."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.attention.staging import StagedMessenger
from engine.attention.streams import CudaStreams, NoStreams, StreamTransport
from engine.attention.transport import GroupMessenger, Meter, P2POp, make_channel_groups
from engine.planning.program.ops import HOST_CHANNELS, Channel, LinkBytes
from engine.planning.topology import Topology

CPU = torch.device("cpu")
CHANNELS = (Channel.PAYLOAD_INNER, Channel.GRADIENT_INNER)


def exchange(device_type: str) -> tuple[list[float], LinkBytes]:
    """Messages to the other rank on two channels; what arrived, and what was counted.

    A sent tensor changes after its post.
    """
    rank, device = dist.get_rank(), torch.device(device_type)
    groups = make_channel_groups([(0, 1)], rank, tuple(Channel), timedelta(seconds=30), CPU)
    assert HOST_CHANNELS.isdisjoint(groups)
    streams = NoStreams() if device.type == "cpu" else CudaStreams(device)
    messenger = StagedMessenger(GroupMessenger(groups, (0, 1)))
    staged: StreamTransport[Any] = StreamTransport(streams, messenger, Meter(Topology(1, 2), rank))
    sent = [torch.full((5,), 10.0 * number + rank, device=device) for number in range(2)]
    received = [torch.full((5,), -1.0, device=device) for _ in range(2)]
    for number, channel in enumerate(CHANNELS):
        mine, theirs = 2 * number + rank, 2 * number + 1 - rank
        ends = [
            P2POp(mine, "send", channel, 1 - rank, (sent[number],)),
            P2POp(theirs, "recv", channel, 1 - rank, (received[number],)),
        ]
        staged.post(ends)
        sent[number].fill_(99.0)  # gloo would send these: it reads the buffer that it was given
    staged.wait([0, 1])
    staged.wait([2, 3])
    return [float(tensor.mean()) for tensor in received], staged.meter.sent


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]  # where both ranks share one GPU


@pytest.mark.parametrize("device_type", DEVICES)
def test_staged_messages_arrive_by_their_wait(ranks, device_type: str) -> None:
    found = ranks(2).run(exchange, device_type)
    assert found == [([1.0, 11.0], LinkBytes(40)), ([0.0, 10.0], LinkBytes(40))]


def test_host_copies_are_not_staged() -> None:
    meter = Meter(Topology(1, 1), 0)
    transport: StreamTransport[None] = StreamTransport(NoStreams(), StagedMessenger(GroupMessenger({}, (0,))), meter)
    source, target = torch.arange(4.0), torch.zeros(4)
    transport.post([P2POp(0, "store", Channel.TO_HOST, 0, (source,), (target,))])
    transport.wait([0])
    assert torch.equal(source, target)
    assert transport.meter.sent == LinkBytes(host_bytes=16)
