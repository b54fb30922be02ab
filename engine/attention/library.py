"""Distributed attention for models that are not ours: three names, no run configuration.

    parallel = ContextParallel(group, num_heads=32, num_kv_heads=8, head_dim=128)    all ranks of the world, once
    context = parallel.context(seq_len=131072)                                       no messages
    out = attention(q, k, v, context)                                                all ranks of the group

q [B, T, H, D], k and v [B, T, K, D] are this rank's rows of sequences that the group shares, in the order of
`context.positions`; out has q's shape. See docs/library.md.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.attention.context import (
    AttentionGroup,
    HeadShape,
    LayerHeads,
    SequenceContext,
    build_context,
    open_transport,
)
from engine.attention.rank_info import all_gather_rank_info, device_name, find_topology
from engine.attention.runtime import AttentionRuntime
from engine.attention.transport import P2POp, Transport
from engine.config.errors import ConfigError
from engine.config.schema import range_problems, read_dataclass
from engine.config.settings import (
    AttentionConfig,
    Dtype,
    KvForm,
    MaskKind,
    MemoryConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from engine.distributed.mesh import Mesh, step_timeout
from engine.distributed.waits import WaitClock
from engine.kernels.attention import KernelChoice, TileKernel, select_kernel
from engine.planning.methods.layers import LayerPattern, attention_layers, build_layers, layer_pattern
from engine.planning.methods.presets import PRESETS, AttentionMethod, local_heads, warnings_of
from engine.planning.program.ops import HOST_CHANNELS, Channel, LatentShape, LinkBytes
from engine.planning.schedules.plan import channels_of, token_bytes_of
from engine.planning.topology import Topology, padded_length
from engine.planning.visibility.layout import Layout
from engine.planning.visibility.mask import Mask
from engine.planning.visibility.patterns import build_mask
from engine.predict.machine import Machine, machine_of
from engine.resolve.attention import resolve_attention
from engine.resolve.decisions import Decision
from engine.resolve.kv_form import latent_problem, select_kv_form
from engine.resolve.legality import heads_problem
from engine.resolve.run import ResolvedRun, resolve_run

MAX_CACHED_CONTEXTS = 8  # batches with different documents need different plans
WINDOWED = ("window", "sink_window")  # masks with bands that are neither full nor causal
MESSAGE_TIMEOUT = timedelta(minutes=10)

# Given to `ContextParallel.context`, because they belong to a sequence and not to the ranks.
_OF_A_SEQUENCE = ("mask", "mask_layers", "documents")

# What is kept for backward is the model's own affair: autograd keeps what attention gives it.
_MEMORY = MemoryConfig(activation_checkpoint="none")


class ContextParallel:
    """The ranks that share sequences, how they divide attention, and the channels between them: the one door to it.

    Made so for other people's models; `of_run` makes that of a configured run.

    group         process group whose ranks share every sequence; None: all ranks, or this process alone where
                  torch.distributed is not initialised
    num_heads     query heads of the whole model; num_kv_heads of them for keys and values (None: as many)
    head_dim      width of one head of q and k; the softmax scale is 1/sqrt(head_dim)
    v_dim         width of one head of v and of the output; None: head_dim. A narrower one travels as it is, and is
                  padded with zeros in kernels that need that. Costs are predicted for heads of head_dim
    latent        of what k and v are expanded, in multi-head latent attention; None: they are not
    kv_form       where there are latents: `latent` sends these, `expanded` k and v, `auto` what a context's length
                  and ranks are predicted to be faster with (`SequenceContext.kv_form` says which, and why)
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

    dtype: torch.dtype
    kernel_choice: KernelChoice | None  # why `group.kernel`, where it was chosen
    process_group: dist.ProcessGroup | None  # that was given
    machine: Machine | None  # on which the method was chosen; None: of a group that is imagined
    kv_form: KvForm  # that was asked for

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        v_dim: int | None = None,
        latent: LatentShape | None = None,
        kv_form: KvForm = "auto",
        preset: str = "burst",
        nodes: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        timeout: timedelta = MESSAGE_TIMEOUT,
        **axes: Any,
    ) -> None:
        heads = HeadShape(
            num_heads,
            num_heads if num_kv_heads is None else num_kv_heads,
            head_dim,
            head_dim if v_dim is None else v_dim,
            latent,
        )
        if kv_form not in get_args(KvForm):
            raise ConfigError(f"kv_form: got {kv_form!r}, expected one of {', '.join(get_args(KvForm))}")
        device = torch.device(device) if device is not None else _default_device(group)
        axes_read = _read_axes(preset, axes)
        places = all_gather_rank_info(group, device, (heads, kv_form, preset, str(dtype), nodes, sorted(axes.items())))
        world_rank = dist.get_rank() if dist.is_initialized() else 0
        ranks = places[world_rank].ranks
        topology = find_topology([places[rank].host for rank in ranks], nodes)
        config = _run_config(axes_read, heads, dtype, topology)
        machine = machine_of(config, places[ranks[0]].device)
        method = resolve_attention(config, topology, machine)
        for text in warnings_of(method, topology):
            warnings.warn(text, stacklevel=2)
        choice = select_kernel(axes_read.kernel, device, dtype, head_dim, v_dim=heads.v_dim)
        groups = sorted({place.ranks for place in places})
        # All ranks of the world must open the same channels, and other groups may lie, and so work, differently.
        channels = channels_of(method) if len(groups) == 1 else tuple(Channel)
        transport = open_transport(groups, world_rank, topology, device, channels=channels, timeout=timeout)
        self._join(config, AttentionGroup(ranks.index(world_rank), topology, transport, choice.kernel), method)
        self.heads, self.dtype, self.device, self.kernel_choice = heads, dtype, device, choice
        self.process_group, self.machine, self.kv_form = group, machine, kv_form

    @classmethod
    def of_run(cls, run: ResolvedRun, mesh: Mesh, transport: Transport | None = None) -> ContextParallel:
        """That of a resolved run, connected. Collective over all ranks of the world (it makes process groups).

        Runs whose attentions work in turn on the same ranks may share a `transport` with all channels
        (`open_channels`).
        """
        config, method, device = run.config, run.method, mesh.device
        set_sm_carveout(config.parallel.comm_sms)
        choice = select_kernel(
            config.attention.kernel,
            device,
            getattr(torch, config.train.compute_dtype),
            config.model.head_dim,
            v_dim=config.model.v_head_dim or config.model.head_dim,
            windows=any(kind in WINDOWED for kind in config.attention.mask_layers or (config.attention.mask,)),
            deterministic=config.train.deterministic,
            documents=config.attention.documents,
        )
        for failed, problem in choice.failed.items():  # of this rank, so every rank says it
            text = f"rank {mesh.rank} takes {choice.kernel.name} instead of {failed}, which {problem}"
            warnings.warn(text, stacklevel=2)
        transport = transport or open_channels(config, mesh, channels_of(method))
        made = cls.of_group(config, AttentionGroup(mesh.cp_rank, run.group, transport, choice.kernel), method)
        made.device, made.kernel_choice = device, choice
        made._pattern, made.machine = run.layers, run.machine
        made.warm_up_connections()
        return made

    @classmethod
    def of_group(cls, config: RunConfig, group: AttentionGroup, method: AttentionMethod) -> ContextParallel:
        """That of a run whose method is known and whose ranks are connected, or imagined."""
        made = cls.__new__(cls)
        made._join(config, group, method)
        return made

    def _join(self, config: RunConfig, group: AttentionGroup, method: AttentionMethod) -> None:
        model = local_heads(config.model, config.parallel.tp_size)
        self.config, self.group, self.method = config, group, method
        self._pattern: Sequence[LayerPattern] = layer_pattern(config, method)
        self.machine = None
        self.kv_form = "expanded"
        v_dim = model.v_head_dim or model.head_dim
        self.heads = HeadShape(model.num_heads, model.num_kv_heads, model.head_dim, v_dim)
        self.dtype = getattr(torch, config.train.compute_dtype)
        self.device = torch.device("cpu")
        self.kernel_choice = None
        self.process_group = None
        self._contexts: OrderedDict[tuple[int, ...], SequenceContext] = OrderedDict()
        self._planning = threading.Lock()  # the next step's documents are planned beside this step

    @property
    def rank(self) -> int:
        """This rank's place among those that share sequences."""
        return self.group.rank

    @property
    def topology(self) -> Topology:
        """Where they lie."""
        return self.group.topology

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.topology.size

    def context(
        self,
        seq_len: int,
        mask: Mask | MaskKind | Sequence[Mask | MaskKind] = "causal",
        documents: Iterable[int] = (),
        heads: Sequence[HeadShape] = (),
    ) -> SequenceContext:
        """What this rank does for sequences of `seq_len` tokens (over all ranks); sends nothing.

        mask        one mask for all layers, or those of the layers in turn; a name takes its options from `axes`
        documents   ascending start positions of packed documents that no attention crosses, the first 0
        heads       of the layers in turn, where they differ; (): those that this was made for, in all layers. The
                    method stays the one that was chosen for these

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
        shapes = tuple(heads) or (self.heads,)
        problems = [problem for shape in dict.fromkeys(shapes) for problem in self.head_problems(shape)]
        if problems:
            raise ConfigError(problems)
        count = math.lcm(len(masks), len(shapes))
        turn = replace(self.config.attention, mask_layers=(causal,) * count)
        run = replace(self.config, attention=turn, train=replace(self.config.train, seq_len=seq_len))
        of_layers = [shapes[index % len(shapes)] for index in range(count)]
        has_documents = any(mask.documents for mask in masks)
        kernels = {shape: self._kernel_for(shape, has_documents) for shape in set(shapes)}
        layers, chosen_heads = [], []
        for index, layer in enumerate(attention_layers(run, self.method)):
            shape, layer_mask = of_layers[index], masks[index % len(masks)]
            method, form = self._method_for(shape, layer_mask)
            layers.append(replace(layer, mask=layer_mask, method=method))
            chosen_heads.append(LayerHeads(shape, kernels[shape], form))
        return build_context(self.group, layers, padded_length(seq_len, self.size), self, chosen_heads)

    def head_problems(self, shape: HeadShape) -> list[str]:
        """Why layers with such heads cannot use this method; [] if they can. ConfigError if no kernel takes them."""
        problem = heads_problem(
            self.method.head_parallel_size,
            replace(self.config.model, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads),
        )
        self._kernel_for(shape, has_documents=False)
        problems = [f"attention.head_parallel_size: {problem}, of layers with {shape}"] if problem else []
        if self.kv_form == "latent":
            found = latent_problem(self.method) if shape.latent else "are not known to be expanded from latents"
            problems += [f"kv_form=latent: keys and values of layers with {shape}: {found}"] if found else []
        return problems

    def _method_for(self, shape: HeadShape, mask: Mask) -> tuple[AttentionMethod, Decision | None]:
        """The method of layers with such heads, and the form of their keys and values."""
        method = replace(self.method, kv_replicated=self.method.head_parallel_size > shape.num_kv_heads)
        if shape.latent is None or self.machine is None:
            return method, None
        run = replace(self.config, train=replace(self.config.train, seq_len=mask.seq_len))
        expanded = token_bytes_of(run, method)
        sizes = replace(
            expanded,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            qk_dim=shape.head_dim,
            v_dim=shape.v_dim,
            latent=shape.latent,
        )
        return select_kv_form(self.kv_form, run, method, mask, self.topology, self.machine, sizes)

    def _kernel_for(self, shape: HeadShape, has_documents: bool) -> TileKernel:
        if replace(shape, latent=self.heads.latent) == self.heads and not has_documents:
            return self.group.kernel
        name = self.config.attention.kernel
        return select_kernel(
            name, self.device, self.dtype, shape.head_dim, v_dim=shape.v_dim, documents=has_documents
        ).kernel

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add up every `.grad` over the ranks that share a sequence, in place. Collective over the group.

        A parameter without a gradient on this rank (an expert that none of its tokens chose) counts as zeros where
        another rank has one, and stays None where none has. For models whose parameters every rank holds; with DDP or
        FSDP, which reduce gradients themselves, see docs/library.md.

        Args:
            parameters: the same ones on every rank, in the same order.

        Raises:
            ValueError: a parameter is a DTensor, whose shards differ between ranks.
        """
        given = list(parameters)
        if self.size == 1 or not given:
            return
        if any(isinstance(parameter, DTensor) for parameter in given):
            raise ValueError("sum_gradients: got sharded parameters (DTensor); FSDP reduces their gradients itself")
        has_gradient = torch.tensor([x.grad is not None for x in given], dtype=torch.int32, device=self.device)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=self.process_group)
        for parameter, is_on_a_rank in zip(given, has_gradient.tolist(), strict=True):
            if is_on_a_rank:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self.process_group)

    def _mask(self, mask: Mask | MaskKind, seq_len: int, documents: tuple[int, ...]) -> Mask:
        if not isinstance(mask, Mask):
            return build_mask(mask, seq_len, self.config.attention, documents)
        if mask.seq_len != seq_len:
            raise ConfigError(f"mask: made for {mask.seq_len} tokens, but the sequence has {seq_len}")
        if mask.query_stop is not None:
            raise ConfigError("mask: made by queries_before, which is for recomputation; give the whole mask")
        if documents and mask.documents and mask.documents != documents:
            raise ConfigError("documents: the mask has other documents than those given; give them once")
        return replace(mask, documents=documents) if documents else mask

    # ---- of a configured run ----------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Which positions every rank holds, when no documents change that."""
        return self.run_context().layout

    @property
    def padded_seq_len(self) -> int:
        """Length that the layout shards; positions past the mask's length are padding."""
        return self.layout.seq_len

    def run_context(self, documents: Iterable[int] = ()) -> SequenceContext:
        """Plans for a sequence of the run whose documents start at these positions; () if it is one. For any thread."""
        key = tuple(int(start) for start in documents) if self.config.attention.documents else ()
        with self._planning:
            if key not in self._contexts:
                self._contexts[key] = self._plan(key)
                if len(self._contexts) > MAX_CACHED_CONTEXTS:
                    self._contexts.popitem(last=False)
            self._contexts.move_to_end(key)
            return self._contexts[key]

    def _plan(self, documents: tuple[int, ...]) -> SequenceContext:
        layers = build_layers(self._pattern, self.config, self.method, documents)
        padded = padded_length(self.config.train.seq_len, self.method.cp_size, self.config.parallel.tp_size)
        return build_context(self.group, layers, padded, self)

    def with_runtimes(self, change: Callable[[AttentionRuntime], AttentionRuntime]) -> ContextParallel:
        """The same attention with changed runtimes, such as another transport; for benchmarks and tests."""
        context = self.run_context()
        other = ContextParallel.of_group(self.config, self.group, self.method)
        other._contexts[()] = context.with_runtimes(change)
        return other

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, T, H, D] of q [B, T, H, D], k and v [B, T, K, D]."""
        return self.run_context()(q, k, v)

    def warm_up_connections(self) -> None:
        """Connects this rank with all that the plans send to or receive from, one number each, before a step is timed.

        All ranks of the group must call. Masks that depend on a batch's documents may still find others later.
        """
        ends = {
            (transfer.channel, transfer.op, transfer.peer)
            for runtime in self.run_context().runtimes
            for plan in (runtime.forward, runtime.backward, runtime.recompute)
            for transfer in (() if plan is None else plan.transfers())
            if transfer.channel not in HOST_CHANNELS
        }
        numbered = enumerate(sorted(ends))
        ops = [
            P2POp(n, op, channel, peer, (torch.zeros(1, device=self.device),)) for n, (channel, op, peer) in numbered
        ]
        self.group.transport.post(ops)
        self.group.transport.wait(range(len(ops)))
        self.reset_traffic()

    def set_wait_clock(self, waits: WaitClock) -> None:
        """From now on `waits` knows for which rank the host waits; on a GPU it waits for none."""
        self.group.transport.waits = waits

    def traffic(self) -> LinkBytes:
        """Bytes sent and copied by this rank since the last `reset_traffic`."""
        return self.group.transport.meter.sent

    def idle_wire_s(self) -> float:
        """Seconds that the messages of `traffic` would take on an idle wire, at the rates of the run's machine."""
        assert self.machine is not None, "ranks that are imagined send nothing"
        return self.machine.idle_wire_s(self.traffic(), self.topology.local_ranks)

    def reset_traffic(self) -> None:
        """Start counting from zero."""
        self.group.transport.meter.reset()


def _read_axes(preset: str, axes: dict[str, Any]) -> AttentionConfig:
    """The settings of attention; ConfigError with every unknown name, wrong type and number out of bounds."""
    config, found = read_dataclass(AttentionConfig, {"preset": preset, **axes})
    problems = [problem.text for problem in (*found, *range_problems(config))]
    problems += [
        f"{name}: give it to ContextParallel.context(mask=, documents=)" for name in _OF_A_SEQUENCE if name in axes
    ]
    if not problems and config.preset not in PRESETS:
        problems.append(f"preset: {preset} is chosen by a run's cost model; name one of {', '.join(PRESETS)}")
    if problems:
        raise ConfigError(problems)
    return config


def _run_config(attention: AttentionConfig, heads: HeadShape, dtype: torch.dtype, topology: Topology) -> RunConfig:
    """The shortest run of these settings; the length of sequences is not known yet and is checked by `context`."""
    compute: Dtype = "bfloat16" if dtype.itemsize <= 2 else "float32"  # what costs are reckoned in
    return RunConfig(
        model=ModelConfig(num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim),
        attention=attention,
        memory=_MEMORY,
        train=TrainConfig(seq_len=topology.size, compute_dtype=compute),
    )


def _default_device(group: dist.ProcessGroup | None) -> torch.device:
    if not torch.cuda.is_available() or (dist.is_initialized() and "nccl" not in dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def set_sm_carveout(count: int | None) -> None:
    """Matrix products and attention kernels that look at torch's setting leave so many multiprocessors of the GPU to
    messages: beside a kernel that takes all of them no message begins.
    """
    if torch._C._get_sm_carveout_experimental() != count:  # it warns that it is experimental
        torch._C._set_sm_carveout_experimental(count)


def open_channels(config: RunConfig, mesh: Mesh, channels: Sequence[Channel] = tuple(Channel)) -> Transport:
    """Channels between the ranks that share a sequence with this one. Collective over all ranks of the world."""
    return open_transport(
        mesh.degrees.cp_groups(),
        mesh.rank,
        mesh.cp_topology,
        mesh.device,
        channels=channels,
        timeout=step_timeout(config.cluster),
        shares_device=config.cluster.ranks_share_device,
        comm_sms=config.parallel.comm_sms,
    )


def resolve_here(config: RunConfig, mesh: Mesh) -> ResolvedRun:
    """A run that no launch has resolved, such as one of a benchmark, on the ranks of `mesh`.

    Collective over all ranks of the world: ranks with different devices must choose alike. Its memory policy is named.
    """
    names = [device_name(mesh.device)]
    if dist.is_initialized():
        dist.broadcast_object_list(names, src=0, device=mesh.device)
    return resolve_run(config, mesh.topology, machine_of(config, names[0]))
