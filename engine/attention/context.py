"""Attention over sequences that a group of ranks shares: its channels, opened once, and contexts made from them.

group = open_group(...)                         collective, once: process groups, one per channel
context = build_context(group, layers, ...)     plans of this rank for one length, layout and masks; no messages
out = context(q, k, v)                          differentiable; every rank of the group calls it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from engine.attention.buffers import BufferPool
from engine.attention.kernels.base import TileKernel
from engine.attention.runtime import AttentionRuntime, ForwardPass, PlannedAttention, run_attention
from engine.attention.staging import StagedMessenger
from engine.attention.streams import CudaStreams, StreamTransport
from engine.attention.transport import (
    DistributedTransport,
    GroupMessenger,
    LocalTransport,
    Meter,
    Transport,
    make_channel_groups,
)
from engine.planning.methods.grid import Blocks, divide_sequence
from engine.planning.methods.methods import plan_method
from engine.planning.methods.topology import Topology
from engine.planning.schedule.plan import Channel
from engine.planning.sequence.layers import LayerAttention
from engine.planning.sequence.layout import Layout

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionGroup:
    """This rank's place among those that share a sequence, where these lie, and the channels between them."""

    rank: int
    topology: Topology
    transport: Transport
    kernel: TileKernel
    pool: BufferPool = field(default_factory=BufferPool)  # of all layers: they run in turn


def open_transport(
    cp_groups: Sequence[Sequence[int]],
    world_rank: int,
    topology: Topology,
    device: torch.device,
    *,
    channels: Sequence[Channel] = tuple(Channel),
    timeout: timedelta,
    shares_device: bool = False,
    message_sms: int | None = None,
) -> Transport:
    """Channels of the group of `world_rank`. Collective: every rank of the world calls it with the same groups.

    channels        those that plans will use (see `channels_of`), the same on every rank
    message_sms     see `make_channel_groups`
    shares_device   several ranks use one GPU, which NCCL refuses; messages then go through host memory and gloo
    """
    own = next(ranks for ranks in cp_groups if world_rank in ranks)
    rank, on_cpu = list(own).index(world_rank), device.type == "cpu"
    messages_on = torch.device("cpu") if shares_device else device
    # A rank alone takes part too: torch counts groups on every rank, and counts that differ hang the next new_group.
    shared = [ranks for ranks in cp_groups if len(ranks) > 1]
    groups = make_channel_groups(shared, world_rank, channels, timeout, messages_on, message_sms)
    if on_cpu:
        return LocalTransport() if len(own) == 1 else DistributedTransport(groups, own, topology, rank)
    streams = CudaStreams(device)
    if len(own) == 1:
        return StreamTransport(streams, None, Meter(topology, 0), streams)
    messenger = GroupMessenger(groups, own)
    staged = StagedMessenger(messenger) if shares_device else messenger
    return StreamTransport(streams, staged, Meter(topology, rank), streams)


@dataclass(frozen=True)
class AttentionContext:
    """Attention of one rank over sequences of one length, layout and set of masks; an AttentionFn of the first layer.

    Call with q [B, T, H, D], k and v [B, T, K, D] of this rank's rows in the order of `layout`; returns out
    [B, T, H, D]. All ranks of the group must call it (and run its backward) equally often in the same order.
    """

    group: AttentionGroup
    blocks: Blocks
    layers: tuple[LayerAttention, ...]
    runtimes: tuple[AttentionRuntime, ...]  # of the layers in turn

    @property
    def layout(self) -> Layout:
        """Which positions every rank holds."""
        return self.blocks.home

    @property
    def runtime(self) -> AttentionRuntime:
        """Plans of the first layer."""
        return self.runtimes[0]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the first layer."""
        return run_attention(q, k, v, self.runtimes[0])

    def functions(self, num_layers: int) -> list[AttentionFn]:
        """Attention of every layer of a model, for its forward passes one after the other."""
        forward_pass = ForwardPass()
        turn = [PlannedAttention(runtime, forward_pass) for runtime in self.runtimes]
        return [turn[index % len(turn)] for index in range(num_layers)]


def build_context(group: AttentionGroup, layers: Sequence[LayerAttention], padded_len: int) -> AttentionContext:
    """Plans of this rank for the given layers; `padded_len` tokens are divided, those past the masks' length unseen."""
    blocks = divide_sequence(layers[0].method, padded_len, [layer.mask for layer in layers])
    runtimes: dict[LayerAttention, AttentionRuntime] = {}
    for layer in layers:
        if layer not in runtimes:
            cut = layer.recompute_before
            plans = plan_method(layer.method, layer.mask, blocks, group.rank, recompute_before=cut)
            runtimes[layer] = AttentionRuntime(
                plans.forward.ranks[group.rank],
                plans.backward.ranks[group.rank],
                group.kernel,
                group.transport,
                getattr(torch, layer.method.gradient_wire_dtype),
                pool=group.pool,
                recompute=plans.recompute.ranks[group.rank] if plans.recompute else None,
                recomputed_rows=0 if cut is None else blocks.recomputed_rows(cut, group.rank),
            )
    return AttentionContext(group, blocks, tuple(layers), tuple(runtimes[layer] for layer in layers))
