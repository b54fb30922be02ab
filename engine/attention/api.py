"""Attention of a configured run: from RunConfig and Mesh to a differentiable function on this rank."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.context import AttentionContext, AttentionGroup, build_context, open_transport
from engine.attention.kernels import KernelChoice, settle_kernel
from engine.attention.runtime import AttentionRuntime
from engine.attention.transport import Parcel, Transport
from engine.config.settings import RunConfig
from engine.parallel.mesh import Mesh, step_timeout
from engine.parallel.waits import WaitClock
from engine.planning.methods.auto import resolve_auto
from engine.planning.methods.methods import channels_of
from engine.planning.methods.presets import AttentionMethod
from engine.planning.methods.resolve import machine_of, resolve_attention
from engine.planning.methods.topology import Topology
from engine.planning.schedule.plan import HOST_CHANNELS, Channel, LinkBytes
from engine.planning.sequence.layers import attention_layers
from engine.planning.sequence.layout import Layout
from engine.planning.sequence.lengths import padded_length

CONTEXTS_KEPT = 8  # batches with different documents need different plans
WINDOWED = ("window", "sink_window")  # masks with bands that are neither full nor causal


class ParallelAttention:
    """Attention of local queries over the whole sequence: contexts for the documents of a batch, and bytes sent.

    `context()` without documents is the one context of a run whose masks do not depend on the data; calling the object
    calls that one.
    """

    def __init__(
        self,
        config: RunConfig,
        group: AttentionGroup,
        method: AttentionMethod,
        kernel_choice: KernelChoice | None = None,
    ) -> None:
        self.method = method
        self.group = group
        self.kernel_choice = kernel_choice  # why `group.kernel`, where it was chosen
        self._config = config
        self._contexts: OrderedDict[tuple[int, ...], AttentionContext] = OrderedDict()
        self._planning = threading.Lock()  # the next step's documents are planned beside this step

    @property
    def cp_rank(self) -> int:
        """This rank's place among those that share the sequence."""
        return self.group.rank

    @property
    def topology(self) -> Topology:
        """Where the ranks that share the sequence lie."""
        return self.group.topology

    @property
    def layout(self) -> Layout:
        """Which positions every rank holds, when no documents change that."""
        return self.context().layout

    @property
    def runtime(self) -> AttentionRuntime:
        """Plans of the first layer."""
        return self.context().runtimes[0]

    @property
    def padded_seq_len(self) -> int:
        """Length that the layout shards; positions past the mask's length are padding."""
        return self.layout.seq_len

    def context(self, documents: Iterable[int] = ()) -> AttentionContext:
        """Plans for a sequence whose documents start at these positions; () if it is one. For any thread."""
        key = tuple(int(start) for start in documents) if self._config.attention.documents else ()
        with self._planning:
            if key not in self._contexts:
                self._contexts[key] = self._plan(key)
                if len(self._contexts) > CONTEXTS_KEPT:
                    self._contexts.popitem(last=False)
            self._contexts.move_to_end(key)
            return self._contexts[key]

    def _plan(self, documents: tuple[int, ...]) -> AttentionContext:
        layers = attention_layers(self._config, self.method, documents)
        padded = padded_length(self._config.train.seq_len, self.method.cp_size, self._config.parallel.tp_size)
        return build_context(self.group, layers, padded)

    def with_runtimes(self, change: Callable[[AttentionRuntime], AttentionRuntime]) -> ParallelAttention:
        """The same attention with changed runtimes, such as another transport; for benchmarks and tests."""
        context = self.context()
        other = ParallelAttention(self._config, self.group, self.method, self.kernel_choice)
        other._contexts[()] = replace(context, runtimes=tuple(map(change, context.runtimes)))
        return other

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, T, H, D] of q [B, T, H, D], k and v [B, T, K, D]."""
        return self.context()(q, k, v)

    def meet_peers(self, device: torch.device) -> None:
        """Connects this rank with all that the plans send to or receive from, one number each, before a step is timed.

        All ranks of the group must call. Masks that depend on a batch's documents may still find others later.
        """
        ends = {
            (transfer.channel, transfer.op, transfer.peer)
            for runtime in self.context().runtimes
            for plan in (runtime.forward, runtime.backward, runtime.recompute)
            for transfer in (() if plan is None else plan.transfers())
            if transfer.channel not in HOST_CHANNELS
        }
        numbered = enumerate(sorted(ends))
        parcels = [
            Parcel(n, op, channel, peer, (torch.zeros(1, device=device),)) for n, (channel, op, peer) in numbered
        ]
        self.group.transport.post(parcels)
        self.group.transport.wait(range(len(parcels)))
        self.reset_traffic()

    def tell_waits_to(self, waits: WaitClock) -> None:
        """From now on `waits` knows for which rank the host waits; on a GPU it waits for none."""
        self.group.transport.waits = waits

    def traffic(self) -> LinkBytes:
        """Bytes sent and copied by this rank since the last `reset_traffic`."""
        return self.group.transport.meter.sent

    def idle_wire_s(self, device: torch.device) -> float:
        """Seconds that the messages of `traffic` would take on an idle wire, at the rates of cluster.machine."""
        machine = machine_of(self._config, _device_name(device))
        return machine.idle_wire_s(self.traffic(), self.topology.local_ranks)

    def reset_traffic(self) -> None:
        """Start counting from zero."""
        self.group.transport.meter.reset()


def build_parallel_attention(config: RunConfig, mesh: Mesh, transport: Transport | None = None) -> ParallelAttention:
    """The configured attention on this rank. Collective over all ranks of the world (it makes process groups).

    Attentions that run in turn on the same ranks may share a `transport` with all their channels (`open_channels`).
    """
    leave_multiprocessors(config.parallel.message_sms)
    topology = mesh.cp_topology
    config, method = settle_method(config, topology, mesh.device)
    choice = settle_kernel(
        config.attention.kernel,
        mesh.device,
        getattr(torch, config.train.compute_dtype),
        config.model.head_dim,
        windows=any(kind in WINDOWED for kind in config.attention.mask_layers or (config.attention.mask,)),
        deterministic=config.train.deterministic,
        documents=config.attention.documents,
    )
    for failed, problem in choice.failed.items():  # of this rank, so every rank says it
        warnings.warn(f"rank {mesh.rank} takes {choice.kernel.name} instead of {failed}, which {problem}", stacklevel=2)
    transport = transport or open_channels(config, mesh, channels_of(method))
    group = AttentionGroup(mesh.cp_rank, topology, transport, choice.kernel)
    attention = ParallelAttention(config, group, method, choice)
    attention.meet_peers(mesh.device)
    return attention


def leave_multiprocessors(count: int | None) -> None:
    """Matrix products and attention kernels that look at torch's setting leave so many multiprocessors of the GPU to
    messages: beside a kernel that takes all of them no message begins.
    """
    if torch._C._get_sm_carveout_experimental() != count:  # it warns that it is experimental
        torch._C._set_sm_carveout_experimental(count)


def open_channels(config: RunConfig, mesh: Mesh, channels: Sequence[Channel] = tuple(Channel)) -> Transport:
    """Channels between the ranks that share a sequence with this one. Collective over all ranks of the world."""
    return open_transport(
        mesh.cp_groups,
        mesh.rank,
        mesh.cp_topology,
        mesh.device,
        channels=channels,
        timeout=step_timeout(config.cluster),
        shares_device=config.cluster.ranks_share_device,
        message_sms=config.parallel.message_sms,
    )


def settle_method(config: RunConfig, topology: Topology, device: torch.device) -> tuple[RunConfig, AttentionMethod]:
    """(the configuration with a named preset, its method): what `auto` means is found here, alike on every rank.

    Collective over all ranks of the world, where there is one.
    """
    names = [_device_name(device)]
    if dist.is_initialized():  # ranks with different devices must choose alike
        dist.broadcast_object_list(names, src=0, device=device)
    machine = machine_of(config, names[0])
    choice = resolve_auto(config, topology, machine)
    method = resolve_attention(choice.config, topology, machine)
    return choice.config, replace(method, reason=choice.reason) if choice.candidates else method


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
