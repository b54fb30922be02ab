"""Real streams on a GPU: copies and messages keep the order that `test_streams.py` proves on a machine of integers."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from testkit.stream_machine import host_waits_are_errors

from engine.attention.streams import CudaStreams, StreamTransport
from engine.attention.transport import GroupMessenger, Meter, P2POp, make_channel_groups
from engine.planning.program.ops import Channel
from engine.planning.topology import Topology


def delay() -> None:
    """Keeps the compute stream busy, so that transfers that do not wait for it come too early."""
    torch.cuda._sleep(50_000_000)


@pytest.mark.gpu
def test_gpu_copies_synchronise_with_compute() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    transport = StreamTransport(CudaStreams(device), None, Meter(Topology(1, 1), 0))
    source, target = torch.zeros(1 << 22, device=device), torch.zeros(1 << 22, device=device)
    host = torch.empty(1 << 22, pin_memory=True)
    torch.cuda.synchronize()
    with host_waits_are_errors():
        for value in (1.0, 2.0):
            delay()
            source.fill_(value)
            transport.post([P2POp(0, "store", Channel.TO_HOST, 0, (source,), (host,))])
            transport.wait([0])
            source.fill_(-1.0)
            transport.post([P2POp(1, "load", Channel.TO_DEVICE, 0, (host,), (target,))])
            delay()
            transport.wait([1])
            seen = target.clone()
    assert bool((seen == 2.0).all())


def messages_to_itself() -> bool:
    """One rank's NCCL groups: what was sent is what compute had written, whatever the channel."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    groups = make_channel_groups([(0,)], 0, tuple(Channel), timedelta(seconds=60), device, comm_sms=8)
    transport = StreamTransport(CudaStreams(device), GroupMessenger(groups, (0,)), Meter(Topology(1, 1), 0))
    source, target = torch.zeros(1 << 22, device=device), torch.zeros(1 << 22, device=device)
    right = True
    for value, channel in enumerate(groups, start=1):
        torch.cuda.synchronize()
        delay()
        source.fill_(float(value))
        ends = [P2POp(0, "send", channel, 0, (source,)), P2POp(1, "recv", channel, 0, (target,))]
        transport.post(ends)
        transport.wait([0, 1])
        source.fill_(-1.0)
        right = right and bool((target == float(value)).all())
    return right


@pytest.mark.gpu
def test_nccl_messages_synchronise_with_compute(ranks) -> None:
    assert ranks(1).run(messages_to_itself) == [True]
