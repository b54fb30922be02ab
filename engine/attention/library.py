"""Distributed attention for models that are not ours: three names, no run configuration.

    parallel = ContextParallel(group, num_heads=32, num_kv_heads=8, head_dim=128)    all ranks of the world, once
    context = parallel.context(seq_len=131072)                                       no messages
    out = attention(q, k, v, context)                                                all ranks of the group

q [B, T, H, D], k and v [B, T, K, D] are this rank's rows of sequences that the group shares, in the order of
`context.positions`; out has q's shape. See docs/library.md.
"""

from __future__ import annotations

import itertools
import socket
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.context import AttentionContext, AttentionGroup, build_context, open_transport
from engine.attention.kernels import settle_kernel
from engine.attention.kernels.base import TileKernel
from engine.attention.runtime import run_attention
from engine.config.errors import ConfigError
from engine.config.schema import range_problems, read_dataclass
from engine.config.settings import AttentionConfig, Dtype, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from engine.planning.methods.methods import channels_of
from engine.planning.methods.presets import PRESETS, AttentionMethod, warnings_of
from engine.planning.methods.resolve import resolve_attention
from engine.planning.methods.topology import Topology
from engine.planning.schedule.plan import Channel
from engine.planning.sequence.layers import LayerAttention, attention_layers, mask_options
from engine.planning.sequence.layout import Layout
from engine.planning.sequence.lengths import padded_length
from engine.planning.sequence.mask import Mask
from engine.planning.sequence.patterns import MaskKind, build_mask

MESSAGE_TIMEOUT = timedelta(minutes=10)

# Given to `ContextParallel.context`, because they belong to a sequence and not to the ranks.
_OF_A_SEQUENCE = ("mask", "mask_layers", "documents")

# What is kept for backward is the model's own affair: autograd keeps what attention gives it.
_MEMORY = MemoryConfig(activation_checkpoint="none")


@dataclass(frozen=True)
class HeadShape:
    """Query heads, kv heads (a divisor of them) and the width of one head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        problems = [
            f"{field.name}: got {getattr(self, field.name)}; at least 1 is needed"
            for field in fields(self)
            if getattr(self, field.name) < 1
        ]
        if not problems and self.num_heads % self.num_kv_heads:
            problems.append(
                f"num_kv_heads: got {self.num_kv_heads}, expected a divisor of num_heads={self.num_heads}, "
                "so that every kv head serves equally many query heads"
            )
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class _Place:
    """What every rank tells all others: the ranks it shares sequences with, its machine, and its settings."""

    ranks: tuple[int, ...]
    host: str
    settings: tuple[object, ...]


class ContextParallel:
    """The ranks that share sequences, how they divide attention, and the channels between them.

    group         process group whose ranks share every sequence; None: all ranks, or this process alone where
                  torch.distributed is not initialised
    num_heads     query heads of the whole model; num_kv_heads of them for keys and values (None: as many)
    head_dim      width of one head; the softmax scale is 1/sqrt(head_dim)
    preset        a named method, see docs/attention.md; it names the attention part of a method only
    nodes         machines over which the group's ranks lie, in equal runs; None: found by host name
    dtype         of q, k and v
    device        where q, k and v lie; None: the current GPU under NCCL (or with no process group), else the CPU
    timeout       how long a message waits for a dead peer
    axes          what differs from the preset: layout, head_parallel_size, ring_inner_size, ring_outer_size,
                  placement, kv_transport, backward_circulates, backward_order, gradient_wire_dtype, kernel, the
                  options of masks (window_tokens, ...); see the group `attention` in docs/configuration.md

    Collective: EVERY rank of the default process group makes one, at the same point of its program, each with the
    group that it belongs to. Groups may not overlap; a rank that shares its sequences with nobody gives a group of
    itself. Nothing is sent afterwards but by `attention` and the methods that say so.

    Raises ConfigError with every broken rule and the legal degrees.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        preset: str = "burst",
        nodes: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        timeout: timedelta = MESSAGE_TIMEOUT,
        **axes: Any,
    ) -> None:
        self.heads = HeadShape(num_heads, num_heads if num_kv_heads is None else num_kv_heads, head_dim)
        self.dtype = dtype
        self.device = torch.device(device) if device is not None else _default_device(group)
        self._config = _read_axes(preset, axes)
        self._process_group = group
        places = _tell_everybody(group, (self.heads, preset, str(dtype), nodes, sorted(axes.items())))
        world_rank = dist.get_rank() if dist.is_initialized() else 0
        ranks = places[world_rank].ranks
        self.topology = _find_topology([places[rank].host for rank in ranks], nodes)
        self.method = _resolve(self._config, self.heads, dtype, self.topology)
        kernel = self._kernel()
        groups = sorted({place.ranks for place in places})
        # All ranks of the world must open the same channels, and other groups may lie, and so work, differently.
        channels = channels_of(self.method) if len(groups) == 1 else tuple(Channel)
        transport = open_transport(groups, world_rank, self.topology, self.device, channels=channels, timeout=timeout)
        self._group = AttentionGroup(ranks.index(world_rank), self.topology, transport, kernel)

    @property
    def rank(self) -> int:
        """This rank's place among those that share sequences."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.topology.size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group that was given."""
        return self._process_group

    def context(
        self,
        seq_len: int,
        mask: Mask | MaskKind | Sequence[Mask | MaskKind] = "causal",
        documents: Iterable[int] = (),
    ) -> SequenceContext:
        """What this rank does for sequences of `seq_len` tokens (over all ranks); sends nothing.

        mask        one mask for all layers, or those of the layers in turn; a name takes its options from `axes`
        documents   ascending start positions of packed documents that no attention crosses, the first 0

        All ranks of the group must make it with the same arguments. Plans are made here: keep the context and use it
        for every sequence of this length. Raises ConfigError.
        """
        if seq_len < self.size:
            raise ConfigError(f"seq_len: got {seq_len} tokens for {self.size} ranks; every rank needs at least one")
        chosen = [mask] if isinstance(mask, (Mask, str)) else list(mask)
        if not chosen:
            raise ConfigError("mask: got an empty list; give one mask, or those of the layers in turn")
        starts = tuple(int(start) for start in documents)
        masks = [self._mask(each, seq_len, starts) for each in chosen]
        causal: MaskKind = "causal"  # stands for each mask, some of which have no name
        turn = replace(self._config, mask_layers=(causal,) * len(masks))
        run = RunConfig(attention=turn, memory=_MEMORY, train=TrainConfig(seq_len=seq_len))
        layers = [
            replace(layer, mask=masks[index % len(masks)])
            for index, layer in enumerate(attention_layers(run, self.method))
        ]
        has_documents = any(mask.documents for mask in masks)
        group = replace(self._group, kernel=self._kernel(documents=True)) if has_documents else self._group
        return SequenceContext(self, group, seq_len, layers)

    def _kernel(self, *, documents: bool = False) -> TileKernel:
        name, head_dim = self._config.kernel, self.heads.head_dim
        return settle_kernel(name, self.device, self.dtype, head_dim, documents=documents).kernel

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Adds up every `.grad` over the ranks that share a sequence, in place; all of them must call it.

        For small models whose parameters every rank holds. With DDP or FSDP, which reduce gradients themselves, see
        docs/library.md.
        """
        for parameter in parameters:
            if parameter.grad is not None and self.size > 1:
                dist.all_reduce(parameter.grad, group=self._process_group)

    def _mask(self, mask: Mask | MaskKind, seq_len: int, documents: tuple[int, ...]) -> Mask:
        if not isinstance(mask, Mask):
            return build_mask(mask, seq_len, mask_options(self._config, mask), documents)
        if mask.seq_len != seq_len:
            raise ConfigError(f"mask: made for {mask.seq_len} tokens, but the sequence has {seq_len}")
        if mask.query_stop is not None:
            raise ConfigError("mask: made by queries_before, which is for recomputation; give the whole mask")
        if documents and mask.documents and mask.documents != documents:
            raise ConfigError("documents: the mask has other documents than those given; give them once")
        return replace(mask, documents=documents) if documents else mask


class SequenceContext:
    """Sequences of one length on one rank: which rows it holds, and the plans of attention over all of them.

    Made by `ContextParallel.context`. Holds no tensor of a sequence, so one serves any number of batches and layers.
    """

    # A plain class: wrappers of models copy the dataclasses that they find among the arguments.
    def __init__(
        self, parallel: ContextParallel, group: AttentionGroup, seq_len: int, layers: Sequence[LayerAttention]
    ) -> None:
        self.parallel = parallel
        self.seq_len = seq_len
        self._attention: AttentionContext = build_context(group, layers, padded_length(seq_len, parallel.size))
        rows = torch.from_numpy(self.layout.positions(parallel.rank))
        self._has_padding = bool((rows >= seq_len).any())
        self.positions = rows.to(parallel.device)  # [T] int64; those from seq_len on are padding

    @property
    def layout(self) -> Layout:
        """Which positions every rank holds."""
        return self._attention.layout

    @property
    def padded_len(self) -> int:
        """Tokens that are divided among the ranks: seq_len and padding, which sees nothing and is seen by nobody."""
        return self.layout.seq_len

    @property
    def local_len(self) -> int:
        """Rows T of this rank, padding included."""
        return self.layout.rows(self.parallel.rank)

    def mask(self, layer: int) -> Mask:
        """Who sees whom in a layer."""
        layers = self._attention.layers
        return layers[layer % len(layers)].mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """`attention` without its checks."""
        runtimes = self._attention.runtimes
        return run_attention(q, k, v, runtimes[layer % len(runtimes)])

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
        if self._has_padding:
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
        own = local.detach().movedim(dim, 0).contiguous()
        whole = own.new_empty(self.seq_len, *own.shape[1:])
        for rank, part in enumerate(self._all_parts(own, max(rows))):
            positions = torch.from_numpy(self.layout.positions(rank)).to(own.device)
            real = positions < self.seq_len
            whole[positions[real]] = part[: rows[rank]][real]
        return whole.movedim(0, dim)

    def _all_parts(self, own: Tensor, most_rows: int) -> list[Tensor]:
        """`own` of every rank, each with at least its own rows."""
        if self.parallel.size == 1:
            return [own]
        sent = own.new_zeros(most_rows, *own.shape[1:])
        sent[: len(own)] = own
        parts = [torch.empty_like(sent) for _ in range(self.parallel.size)]
        dist.all_gather(parts, sent, group=self.parallel.process_group)
        return parts


def attention(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, layer: int = 0) -> Tensor:
    """out [B, T, H, D]: softmax(q k^T / sqrt(D)) v of this rank's queries over the keys of all ranks.

    q [B, T, H, D], k and v [B, T, K, D] in the context's dtype, on its device, rows in the order of
    `context.positions`. `layer` chooses among the masks that the context was given.

    Under autocast the tensors are cast first, as torch's own attention does; the context's dtype is then autocast's.

    Differentiable. All ranks of the group must call it, and run backward through it, equally often in the same order:
    each call sends messages that the others wait for. Raises ValueError for tensors that do not fit.
    """
    kind = context.parallel.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    problems = _input_problems(q, k, v, context)
    if problems:
        raise ValueError("attention: " + "; ".join(problems))
    with torch.autocast(kind, enabled=False):
        return context.attend(q, k, v, layer)


def _input_problems(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> list[str]:
    """One sentence per tensor that does not fit."""
    parallel, heads = context.parallel, context.parallel.heads
    problems = []
    batch = q.shape[0] if q.dim() == 4 else "B"
    rows = context.local_len
    for name, tensor, count in (("q", q, heads.num_heads), ("k", k, heads.num_kv_heads), ("v", v, heads.num_kv_heads)):
        expected = (batch, rows, count, heads.head_dim)
        if tuple(tensor.shape) != expected:
            note = f"; this rank holds {rows} of {context.padded_len} rows" if tensor.shape[1:2] != (rows,) else ""
            problems.append(
                f"{name} has shape {tuple(tensor.shape)}, expected [batch, rows, heads, head_dim] = "
                f"({', '.join(map(str, expected))}){note}"
            )
        if tensor.dtype != parallel.dtype:
            problems.append(
                f"{name} is {tensor.dtype}, expected {parallel.dtype}: cast it, or set ContextParallel(dtype=)"
            )
        if tensor.device.type != parallel.device.type:
            problems.append(f"{name} lies on {tensor.device}, expected {parallel.device}")
    return problems


def _read_axes(preset: str, axes: dict[str, Any]) -> AttentionConfig:
    """The settings of attention; ConfigError with every unknown name, wrong type and number out of bounds."""
    config, found = read_dataclass(AttentionConfig, {"preset": preset, **axes})
    assert isinstance(config, AttentionConfig)
    problems = [problem.text for problem in (*found, *range_problems(config))]
    problems += [
        f"{name}: give it to ContextParallel.context(mask=, documents=)" for name in _OF_A_SEQUENCE if name in axes
    ]
    if not problems and config.preset not in PRESETS:
        problems.append(f"preset: {preset} is chosen by a run's cost model; name one of {', '.join(PRESETS)}")
    if problems:
        raise ConfigError(problems)
    return config


def _resolve(config: AttentionConfig, heads: HeadShape, dtype: torch.dtype, topology: Topology) -> AttentionMethod:
    """The legal method on these ranks; the length of sequences is not known yet and is checked by `context`."""
    compute: Dtype = "bfloat16" if dtype.itemsize <= 2 else "float32"  # what costs are reckoned in
    run = RunConfig(
        model=ModelConfig(num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim),
        attention=config,
        memory=_MEMORY,
        train=TrainConfig(seq_len=topology.size, compute_dtype=compute),
    )
    method = resolve_attention(run, topology)
    for text in warnings_of(method, topology):
        warnings.warn(text, stacklevel=3)
    return method


def _default_device(group: dist.ProcessGroup | None) -> torch.device:
    if not torch.cuda.is_available() or (dist.is_initialized() and "nccl" not in dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _tell_everybody(group: dist.ProcessGroup | None, settings: tuple[object, ...]) -> list[_Place]:
    """The places of all ranks of the world; ConfigError, on every rank alike, when they do not fit together."""
    if not dist.is_initialized():
        if group is not None:
            raise ConfigError("group: got a process group, but torch.distributed is not initialised")
        return [_Place((0,), socket.gethostname(), settings)]
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    own = _Place(tuple(ranks), socket.gethostname(), settings)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    places: list[_Place] = told
    problems = []
    for rank, place in enumerate(places):
        if rank not in place.ranks:
            problems.append(
                f"group: rank {rank} gave the group of ranks {list(place.ranks)}, to which it does not belong"
            )
        for member in place.ranks:
            if places[member].ranks != place.ranks:
                problems.append(
                    f"group: rank {rank} shares its sequences with ranks {list(place.ranks)}, but rank {member} with "
                    f"{list(places[member].ranks)}; every rank must give the one group that it belongs to"
                )
            elif places[member].settings != place.settings and member > rank:
                problems.append(
                    f"settings: ranks {rank} and {member} share their sequences, but gave {place.settings} and "
                    f"{places[member].settings}; give the same everywhere"
                )
    if problems:
        raise ConfigError(problems)
    return places


def _find_topology(hosts: Sequence[str], nodes: int | None) -> Topology:
    """Nodes x local ranks of a group whose ranks lie on these machines, in order.

    Where the machines have unequal shares, or a machine's ranks are no neighbours, every rank counts as its own node.
    """
    if nodes is not None:
        if nodes < 1 or len(hosts) % nodes:
            legal = ", ".join(str(n) for n in range(1, len(hosts) + 1) if len(hosts) % n == 0)
            raise ConfigError(
                f"nodes: got {nodes}, which does not divide the group's {len(hosts)} ranks; legal: {legal}"
            )
        return Topology(nodes, len(hosts) // nodes)
    runs = [len(list(run)) for _, run in itertools.groupby(hosts)]
    if len(runs) == len(set(hosts)) and len(set(runs)) == 1:
        return Topology(len(runs), runs[0])
    return Topology(len(hosts), 1)
