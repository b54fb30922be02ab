"""Attention over sequences that a group of ranks shares: its channels, opened once, and contexts made from them.

group = open_group(...)                         collective, once: process groups, one per channel
context = build_context(group, layers, ...)     plans of this rank for one length, layout and masks; no messages
out = context(q, k, v)                          differentiable; every rank of the group calls it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.buffers import BufferPool
from engine.attention.latent import LatentHeads
from engine.attention.linear.sequence import LinearSequence
from engine.attention.linear.spans import build_spans
from engine.attention.runtime import AttentionRuntime, ForwardPass, PlannedAttention, run_attention
from engine.attention.staging import StagedMessenger
from engine.attention.streams import CudaStreams, StreamTransport
from engine.attention.transport import (
    DistributedTransport,
    GroupMessenger,
    Meter,
    Transport,
    make_channel_groups,
)
from engine.config.errors import ConfigError
from engine.kernels.attention.base import TileKernel
from engine.planning.methods.blocks import Blocks, divide_sequence
from engine.planning.methods.layers import LayerAttention
from engine.planning.program.ops import Channel, LatentShape
from engine.planning.schedules.plan import channels_of, plan_method
from engine.planning.topology import Topology
from engine.planning.visibility.layout import Layout
from engine.resolve.decisions import Decision

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HeadShape:
    """Query heads, kv heads (a divisor of them), the width of one head of q and k, and that of one of v.

    latent   of what k and v are expanded, in multi-head latent attention; None: of nothing smaller
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int
    latent: LatentShape | None = field(default=None, repr=False)

    @property
    def latent_heads(self) -> LatentHeads:
        """What latents are expanded to."""
        assert self.latent is not None
        return LatentHeads(self.latent, self.num_kv_heads, self.head_dim, self.v_dim)

    def __post_init__(self) -> None:
        problems = [
            f"{name}: got {getattr(self, name)}; at least 1 is needed"
            for name in ("num_heads", "num_kv_heads", "head_dim", "v_dim")
            if getattr(self, name) < 1
        ]
        if self.latent and not (self.latent.rank >= 1 and 0 <= self.latent.rope_dim < self.head_dim):
            problems.append(
                f"latent: got {self.latent}; expected a rank of at least 1, and a rope_dim below "
                f"head_dim={self.head_dim}, of which it is a part"
            )
        if not problems and self.num_heads % self.num_kv_heads:
            problems.append(
                f"num_kv_heads: got {self.num_kv_heads}, expected a divisor of num_heads={self.num_heads}, "
                "so that every kv head serves equally many query heads"
            )
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class LayerHeads:
    """Heads of one layer, the kernel that computes them, and in which form their keys and values travel.

    kv_form   latent or expanded, and why; None: there are no latents
    """

    shape: HeadShape
    kernel: TileKernel
    kv_form: Decision | None = None


class SequenceRanks(Protocol):
    """The ranks that share sequences, and what they expect q, k and v to be; `ContextParallel` is one."""

    @property
    def size(self) -> int: ...

    @property
    def process_group(self) -> dist.ProcessGroup | None: ...

    @property
    def heads(self) -> HeadShape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


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
    comm_sms: int | None = None,
) -> Transport:
    """Channels of the group of `world_rank`. Collective: every rank of the world calls it with the same groups.

    channels        those that plans will use (see `channels_of`), the same on every rank
    comm_sms     see `make_channel_groups`
    shares_device   several ranks use one GPU, which NCCL refuses; messages then go through host memory and gloo
    """
    own = next(ranks for ranks in cp_groups if world_rank in ranks)
    rank, on_cpu = list(own).index(world_rank), device.type == "cpu"
    messages_on = torch.device("cpu") if shares_device else device
    # A rank alone takes part too: torch counts groups on every rank, and counts that differ hang the next new_group.
    shared = [ranks for ranks in cp_groups if len(ranks) > 1]
    groups = make_channel_groups(shared, world_rank, channels, timeout, messages_on, comm_sms)
    if on_cpu:
        return DistributedTransport(groups, own, topology, rank)
    streams = CudaStreams(device)
    if len(own) == 1:
        return StreamTransport(streams, None, Meter(topology, 0), streams)
    messenger = GroupMessenger(groups, own)
    staged = StagedMessenger(messenger) if shares_device else messenger
    return StreamTransport(streams, staged, Meter(topology, rank), streams)


class LinearLayer:
    """Stands for the AttentionFn of a layer without attention; `linear`: what its linear attention needs."""

    def __init__(self, linear: LinearSequence) -> None:
        self.linear = linear

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Raise ValueError."""
        raise ValueError("attention.mask_layers says no_attention for this layer, but it has attention")


class SequenceContext:
    """Sequences of one length on one rank: which rows it holds, and the plans of attention over all of them.

    Made by `ContextParallel`. Holds no tensor of a sequence, so one serves any number of batches and layers. An
    AttentionFn of the first layer: all ranks of the group must call it (and run its backward) equally often in the
    same order.
    """

    # A plain class: wrappers of models copy the dataclasses that they find among the arguments.
    def __init__(
        self,
        group: AttentionGroup,
        blocks: Blocks,
        layers: Sequence[LayerAttention],
        runtimes: Sequence[AttentionRuntime],
        parallel: SequenceRanks | None = None,
        heads: Sequence[LayerHeads] = (),
    ) -> None:
        self.group, self.blocks, self.layers, self.runtimes = group, blocks, tuple(layers), tuple(runtimes)
        self._parallel = parallel  # that made it; None: made for its plans alone
        self._heads = tuple(heads)  # of the layers; (): those of `parallel`

    @property
    def parallel(self) -> SequenceRanks:
        """The ranks that share the sequences."""
        assert self._parallel is not None
        return self._parallel

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence over all ranks, without padding."""
        return self.layers[0].mask.seq_len

    @property
    def layout(self) -> Layout:
        """Which positions every rank holds."""
        return self.blocks.rank_layout

    @property
    def padded_len(self) -> int:
        """Tokens that are divided among the ranks: seq_len and padding, which sees nothing and is seen by nobody."""
        return self.layout.seq_len

    @property
    def local_len(self) -> int:
        """Rows T of this rank, padding included."""
        return self.layout.row_counts[self.group.rank]

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64 on the ranks' device; those from seq_len on are padding."""
        return torch.from_numpy(self.layout.positions(self.group.rank)).to(self.parallel.device)

    @cached_property
    def linear(self) -> LinearSequence:
        """The sequences for linear attention, whose messages are counted with those of attention; sends nothing.

        Raises ConfigError where the layout has no runs of consecutive positions, or layers have unlike documents.
        """
        documents = {layer.mask.documents for layer in self.layers}
        if len(documents) > 1:
            raise ConfigError(
                f"documents: layers have {len(documents)} different lists of documents; linear attention needs one"
            )
        channels = channels_of(self.layers[0].method)
        return LinearSequence(
            build_spans(self.layout, documents.pop(), self.seq_len),
            self.group.rank,
            self.group.transport,
            channels[0] if channels else None,  # each has all ranks of the group, and is idle between layers
            self.parallel.device,
        )

    @property
    def runtime(self) -> AttentionRuntime:
        """Plans of the first layer."""
        return self.runtimes[0]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int = 0, sinks: Tensor | None = None) -> Tensor:
        """`attention` of a layer without its checks: out [B, T, H, D] of q [B, T, H, D], k and v [B, T, K, D]."""
        return run_attention(q, k, v, self.layer_runtime(layer), sinks)

    def layer_runtime(self, layer: int) -> AttentionRuntime:
        """Plans of a layer."""
        return self.runtimes[layer % len(self.runtimes)]

    def heads(self, layer: int = 0) -> HeadShape:
        """Heads of a layer."""
        return self._heads[layer % len(self._heads)].shape if self._heads else self.parallel.heads

    def kv_form(self, layer: int = 0) -> Decision | None:
        """Whether keys and values of a layer travel as latents or expanded, and why; None: there are no latents."""
        return self._heads[layer % len(self._heads)].kv_form if self._heads else None

    def moves_latents(self, layer: int = 0) -> bool:
        """Whether latents travel in place of the keys and values of a layer."""
        decision = self.kv_form(layer)
        return decision is not None and decision.value == "latent"

    def functions(self, num_layers: int) -> list[AttentionFn]:
        """Attention of every layer of a model, for its forward passes one after the other."""
        forward_pass = ForwardPass()
        turn: list[AttentionFn] = [
            PlannedAttention(runtime, forward_pass) if layer.attends else LinearLayer(self.linear)
            for runtime, layer in zip(self.runtimes, self.layers, strict=True)
        ]
        return [turn[index % len(turn)] for index in range(num_layers)]

    def with_runtimes(self, change: Callable[[AttentionRuntime], AttentionRuntime]) -> SequenceContext:
        """The same with changed runtimes, such as another transport; for benchmarks and tests."""
        runtimes = [*map(change, self.runtimes)]
        return SequenceContext(self.group, self.blocks, self.layers, runtimes, self._parallel, self._heads)

    def shard(self, whole: Tensor, dim: int = 1, pad_value: float = 0) -> Tensor:
        """This rank's rows of a tensor with all seq_len of them along `dim`, padding filled, on the context's device.

        Every rank gives the same `whole`. Shift labels before (docs/library.md). Differentiable; sends nothing.
        """
        if whole.shape[dim] != self.seq_len:
            raise ValueError(
                f"shard: dimension {dim} of {tuple(whole.shape)} has {whole.shape[dim]} rows; expected the whole "
                f"sequence, seq_len={self.seq_len}"
            )
        positions = self.positions.to(whole.device)
        local = whole.index_select(dim, positions.clamp(max=self.seq_len - 1))
        if self.padded_len > self.seq_len:
            shape = [1] * whole.dim()
            shape[dim] = -1
            local = local.masked_fill((positions >= self.seq_len).view(shape), pad_value)
        return local.to(self.parallel.device)

    def gather(self, local: Tensor, dim: int = 1) -> Tensor:
        """All rows in the order of their positions, without padding, on every rank; the inverse of `shard`.

        All ranks of the group must call it. Not differentiable: the result is detached. Sends local's bytes to all.
        """
        rows = self.layout.row_counts
        if local.shape[dim] != self.local_len:
            raise ValueError(
                f"gather: dimension {dim} of {tuple(local.shape)} has {local.shape[dim]} rows; expected this rank's "
                f"{self.local_len}"
            )
        rows_first = local.detach().movedim(dim, 0).contiguous()
        whole = rows_first.new_empty(self.seq_len, *rows_first.shape[1:])
        for rank, part in enumerate(self._all_parts(rows_first, max(rows))):
            positions = torch.from_numpy(self.layout.positions(rank)).to(rows_first.device)
            real = positions < self.seq_len
            whole[positions[real]] = part[: rows[rank]][real]
        return whole.movedim(0, dim)

    def _all_parts(self, local: Tensor, most_rows: int) -> list[Tensor]:
        """`local` of every rank, each with at least its own rows."""
        if self.parallel.size == 1:
            return [local]
        sent = local.new_zeros(most_rows, *local.shape[1:])
        sent[: len(local)] = local
        parts = [torch.empty_like(sent) for _ in range(self.parallel.size)]
        dist.all_gather(parts, sent, group=self.parallel.process_group)
        return parts


def build_context(
    group: AttentionGroup,
    layers: Sequence[LayerAttention],
    padded_len: int,
    parallel: SequenceRanks | None = None,
    heads: Sequence[LayerHeads] = (),
) -> SequenceContext:
    """Plans of this rank for the given layers.

    Args:
        group: This rank's.
        layers: Those that repeat.
        padded_len: Tokens that are divided; those past the masks' length are not seen.
        parallel: Whose context it is; None: made for its plans alone.
        heads: Of each of `layers`; (): the same of all, with the kernel of `group`. Plans do not depend on them.
    """
    blocks = divide_sequence(layers[0].method, padded_len, [layer.mask for layer in layers])
    kernels = [each.kernel for each in heads] or [group.kernel] * len(layers)
    made: dict[LayerAttention, AttentionRuntime] = {}
    runtimes = []
    for layer, kernel in zip(layers, kernels, strict=True):
        if layer not in made:
            cut = layer.recompute_before
            plans = plan_method(layer.method, layer.mask, blocks, group.rank, recompute_before=cut)
            made[layer] = AttentionRuntime(
                plans.forward.ranks[group.rank],
                plans.backward.ranks[group.rank],
                kernel,
                group.transport,
                getattr(torch, layer.method.gradient_wire_dtype),
                pool=group.pool,
                recompute=plans.recompute.ranks[group.rank] if plans.recompute else None,
                recomputed_rows=0 if cut is None else blocks.recomputed_rows(cut, group.rank),
            )
        runtime = made[layer]
        runtimes.append(runtime if runtime.kernel is kernel else replace(runtime, kernel=kernel))
    return SequenceContext(group, blocks, layers, runtimes, parallel, heads)


def attention(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, layer: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """out [B, T, H, v_dim]: softmax(q k^T / sqrt(head_dim)) v of this rank's queries over the keys of all ranks.

    Under autocast q, k and v are cast first, as torch's own attention does; the context's dtype is then autocast's.

    Differentiable. All ranks of the group must call it, and run backward through it, equally often in the same order:
    each call sends messages that the others wait for.

    Args:
        q: [B, T, H, head_dim] in the context's dtype, on its device, as k and v; rows in the order of
            `context.positions`.
        k: [B, T, K, head_dim].
        v: [B, T, K, v_dim].
        context: Plans and ranks.
        layer: Chooses among the masks, and the shapes of heads, that the context was given.
        sinks: Learnable attention sinks [H] of this rank's query heads, of any floating dtype: one logit more per head
            in the softmax's denominator, without a value (GPT-OSS). Their gradient is this rank's share, as that of
            any parameter: sum it over the ranks (`ContextParallel.sum_gradients`, DDP, FSDP). They have nothing to do
            with the first tokens that `Mask(sink=)` lets every window see.

    Raises:
        ValueError: a tensor does not fit.
    """
    kind = context.parallel.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    heads = context.heads(layer)
    kv_heads = heads.num_kv_heads
    expected = {
        "q": (q, (heads.num_heads, heads.head_dim)),
        "k": (k, (kv_heads, heads.head_dim)),
        "v": (v, (kv_heads, heads.v_dim)),
    }
    problems = input_problems(expected, context)
    if sinks is not None:
        problems += sink_problems(sinks, heads.num_heads, context.parallel.device)
    if problems:
        raise ValueError("attention: " + "; ".join(problems))
    with torch.autocast(kind, enabled=False):
        return context(q, k, v, layer, sinks)


def input_problems(tensors: Mapping[str, tuple[Tensor, tuple[int, ...]]], context: SequenceContext) -> list[str]:
    """One sentence per tensor that does not fit; `tensors`: by name, with what follows [batch, rows] of its shape."""
    parallel = context.parallel
    problems = []
    q, _ = tensors["q"]
    batch = q.shape[0] if q.dim() == 4 else "B"
    rows, axes = context.local_len, ("", "channels", "heads, head_dim")
    for name, (tensor, widths) in tensors.items():
        expected = (batch, rows, *widths)
        if tuple(tensor.shape) != expected:
            note = f"; this rank holds {rows} of {context.padded_len} rows" if tensor.shape[1:2] != (rows,) else ""
            problems.append(
                f"{name} has shape {tuple(tensor.shape)}, expected [batch, rows, {axes[len(widths)]}] = "
                f"({', '.join(map(str, expected))}){note}"
            )
        if tensor.dtype != parallel.dtype:
            problems.append(
                f"{name} is {tensor.dtype}, expected {parallel.dtype}: cast it, or set ContextParallel(dtype=)"
            )
        if tensor.device.type != parallel.device.type:
            problems.append(f"{name} lies on {tensor.device}, expected {parallel.device}")
    return problems


def sink_problems(sinks: Tensor, num_heads: int, device: torch.device) -> list[str]:
    """One sentence per property of learnable sinks that does not fit."""
    problems = []
    if tuple(sinks.shape) != (num_heads,):
        problems.append(f"sinks has shape {tuple(sinks.shape)}, expected one number per query head: ({num_heads},)")
    if not sinks.dtype.is_floating_point:
        problems.append(f"sinks is {sinks.dtype}, expected a floating dtype")
    if sinks.device.type != device.type:
        problems.append(f"sinks lies on {sinks.device}, expected {device}")
    return problems
