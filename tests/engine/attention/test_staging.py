"""Staging through host memory: the same values and the same counted bytes as direct messages, over real gloo."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from attention_oracle import causal, gather, oracle, random_inputs

from engine.attention.arithmetic import AttentionShape, TensorArithmetic
from engine.attention.executor import Execution
from engine.attention.kernels.reference import ReferenceKernel
from engine.attention.layout import build_layout
from engine.attention.mask import Mask, Visibility
from engine.attention.merge import backward_stats
from engine.attention.plan import HOST_CHANNELS, Channel, LinkBytes
from engine.attention.planners.ring import Ring, plan_backward, plan_forward
from engine.attention.staging import NoStreams, StagedTransport
from engine.attention.streams import CudaStreams
from engine.attention.topology import Topology
from engine.attention.transport import DistributedTransport, GroupMessenger, Meter, Parcel, make_channel_groups

CPU = torch.device("cpu")
ROWS, HEADS, KV_HEADS, HEAD_DIM = 21, 4, 2, 8


def transports(rank: int, size: int, device: torch.device):
    """The staged transport and the direct one, on groups of their own (the direct one moves CPU tensors only)."""
    topology = Topology(1, size)
    ranks = tuple(range(size))
    groups = [make_channel_groups([ranks], rank, tuple(Channel), timedelta(seconds=30), CPU) for _ in range(2)]
    assert HOST_CHANNELS.isdisjoint(groups[0])
    streams = NoStreams() if device.type == "cpu" else CudaStreams(device)
    staged = StagedTransport(streams, GroupMessenger(groups[0], ranks), Meter(topology, rank))
    return staged, DistributedTransport(groups[1], ranks, topology, rank)


def run_rank(inner: int, outer: int, circulates: str, device_type: str = "cpu") -> list[tuple[dict, LinkBytes]]:
    """Forward and backward of this rank over both transports: tensors in float64 and bytes counted."""
    rank, size = dist.get_rank(), inner * outer
    device = torch.device(device_type)
    layout, ring = build_layout("zigzag", ROWS, size), Ring(inner, outer)
    visibility = Visibility(Mask(ROWS), layout)
    index = torch.from_numpy(layout.positions(rank))
    data = random_inputs(ROWS, HEADS, KV_HEADS, HEAD_DIM)
    q, k, v, dout = (x[index].to(device) for x in (data.q, data.k, data.v, data.dout))
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, torch.float64, device, torch.float64)
    results = []
    staged, direct = transports(rank, size, device)
    for transport in (staged, direct) if device.type == "cpu" else (staged,):
        arithmetic = TensorArithmetic(shape, ReferenceKernel(), poisoned=True)
        pinned = {"q": {"q": q}, "kv": {"k": k, "v": v}}
        forward = Execution(plan_forward(visibility, ring).ranks[rank], arithmetic, transport, pinned)
        forward.run()
        acc = forward.pinned("acc")
        query = {"q": q, "dout": dout, "out": acc["out"], "stats": backward_stats(dout, acc["out"], acc["lse"])}
        plan = plan_backward(visibility, ring, circulates).ranks[rank]  # type: ignore[arg-type]
        backward = Execution(plan, arithmetic, transport, {"qx": query, "kv": {"k": k, "v": v}})
        backward.run()
        dkv = backward.pinned("dkv")["dkv"]
        values = {"out": acc["out"], "dq": backward.pinned("dq")["dq"], "dk": dkv[:, 0], "dv": dkv[:, 1]}
        results.append(({name: value.cpu() for name, value in values.items()}, transport.sent))
    return results


@pytest.mark.parametrize(("inner", "outer", "circulates"), [(3, 1, "kv"), (2, 2, "q")])
def test_staged_messages_give_dense_attention_and_count_as_direct_ones(
    ranks, inner: int, outer: int, circulates: str
) -> None:
    replies = ranks(inner * outer).run(run_rank, inner, outer, circulates)
    check(inner * outer, [reply[0][0] for reply in replies])
    for staged, direct in replies:
        assert all(torch.equal(staged[0][name], direct[0][name]) for name in direct[0])
        assert staged[1] == direct[1]
        assert staged[1].total > 0


def check(size: int, values: list[dict]) -> None:
    layout = build_layout("zigzag", ROWS, size)
    index = [torch.from_numpy(layout.positions(rank)) for rank in range(size)]
    want = oracle(random_inputs(ROWS, HEADS, KV_HEADS, HEAD_DIM), causal(ROWS))
    for name in ("out", "dq", "dk", "dv"):
        assert ((gather(index, [value[name] for value in values]) - want[name]).abs() < 1e-10).all(), name


def exchange_without_device_copies() -> float:
    """Changes a sent tensor after the post and reads a received one before the wait; what arrived."""
    rank = dist.get_rank()
    staged, _ = transports(rank, 2, CPU)
    sent, received = torch.full((5,), float(rank)), torch.full((5,), -1.0)
    channel = Channel.PAYLOAD_INNER
    pair = [Parcel(rank, "send", channel, 1 - rank, (sent,)), Parcel(1 - rank, "recv", channel, 1 - rank, (received,))]
    staged.post(pair)
    sent.fill_(99.0)  # gloo would send these: it reads the buffer that it was given
    assert (received == -1.0).all()
    staged.wait([0, 1])
    return float(received[0])


def test_bytes_are_staged_at_the_post_and_unstaged_at_the_wait(ranks) -> None:
    assert ranks(2).run(exchange_without_device_copies) == [1.0, 0.0]


def test_loads_and_stores_beside_messages_keep_to_the_device() -> None:
    meter = Meter(Topology(1, 1), 0)
    transport = StagedTransport(NoStreams(), GroupMessenger({}, (0,)), meter)
    source, target = torch.arange(4.0), torch.zeros(4)
    transport.post([Parcel(0, "store", Channel.TO_HOST, 0, (source,), (target,))])
    transport.wait([0])
    assert torch.equal(source, target)
    assert transport.sent == LinkBytes(host_bytes=16)


@pytest.mark.gpu
@pytest.mark.parametrize("circulates", ["kv", "q"])
def test_four_ranks_share_one_gpu(ranks, circulates: str) -> None:
    replies = ranks(4).run(run_rank, 2, 2, circulates, "cuda")
    check(4, [reply[0][0] for reply in replies])
