"""Attention over the ranks that share a sequence, as one differentiable function of local q, k, v."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from engine.attention.arithmetic import AttentionShape, TensorArithmetic
from engine.attention.executor import Execution
from engine.attention.kernels import choose_kernel
from engine.attention.kernels.base import TileKernel
from engine.attention.layout import Layout, build_layout
from engine.attention.mask import Mask
from engine.attention.merge import backward_stats
from engine.attention.methods import plan_method
from engine.attention.plan import Channel, LinkBytes, RankPlan
from engine.attention.presets import AttentionMethod, resolve_attention
from engine.attention.topology import Topology
from engine.attention.transport import DistributedTransport, LocalTransport, Transport, make_channel_groups
from engine.config import RunConfig
from engine.parallel.mesh import Mesh


@dataclass(frozen=True)
class AttentionRuntime:
    """One rank's plans with what runs them; stateless between calls, so several micro-batches may be in flight."""

    forward: RankPlan
    backward: RankPlan
    kernel: TileKernel
    transport: Transport
    wire_gradient_dtype: torch.dtype = torch.float32
    poisoned: bool = False  # fill buffers with NaN first (tests)

    def arithmetic(self, q: Tensor, k: Tensor) -> TensorArithmetic:
        """Arithmetic for these inputs, [T, heads, D]."""
        wire = torch.float64 if q.dtype == torch.float64 else self.wire_gradient_dtype
        shape = AttentionShape(q.shape[1], k.shape[1], q.shape[2], q.dtype, q.device, wire)
        return TensorArithmetic(shape, self.kernel, poisoned=self.poisoned)

    def forward_execution(self, q: Tensor, k: Tensor, v: Tensor) -> Execution:
        """The forward pass over contiguous q [T, H, D], k and v [T, K, D], not yet run."""
        pinned = {"q": {"q": q}, "kv": {"k": k, "v": v}}
        return Execution(self.forward, self.arithmetic(q, k), self.transport, pinned)

    def backward_execution(self, saved: SavedAttention, dout: Tensor) -> Execution:
        """The backward pass, not yet run; dout [T, H, D]."""
        stats = backward_stats(dout, saved.out, saved.lse)
        query = {"q": saved.q, "dout": dout, "out": saved.out, "stats": stats}
        pinned = {"qx": query, "kv": {"k": saved.k, "v": saved.v}}
        return Execution(self.backward, self.arithmetic(saved.q, saved.k), self.transport, pinned)


@dataclass(frozen=True)
class SavedAttention:
    """What backward needs: inputs and out in the compute dtype, lse [T, H] in fp32 (float64)."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class _Attention(torch.autograd.Function):
    """Runs the two plans; every piece of state lives in the autograd context."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, runtime: AttentionRuntime) -> Tensor:
        execution = runtime.forward_execution(q, k, v)
        execution.run()
        acc = execution.pinned("acc")
        out = acc["out"].to(q.dtype)
        ctx.save_for_backward(q, k, v, out, acc["lse"])
        ctx.runtime = runtime
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        saved = SavedAttention(*ctx.saved_tensors)
        execution = ctx.runtime.backward_execution(saved, grad_outputs[0].contiguous())
        execution.run()
        dkv = execution.pinned("dkv")["dkv"].to(saved.k.dtype)
        return execution.pinned("dq")["dq"].to(saved.q.dtype), dkv[:, 0], dkv[:, 1], None


@dataclass(frozen=True)
class GroupPlace:
    """A rank's place in the group that shares a sequence, and where that group's ranks lie."""

    rank: int
    topology: Topology


class ParallelAttention:
    """Attention of local queries over the whole sequence; an AttentionFn.

    Call with q [B, T, H, D], k and v [B, T, K, D] of this rank's rows in layout order; returns out [B, T, H, D]. All
    ranks of the group must call it (and run its backward) the same number of times in the same order.
    """

    def __init__(self, runtime: AttentionRuntime, layout: Layout, method: AttentionMethod, place: GroupPlace) -> None:
        self.runtime = runtime
        self.layout = layout
        self.method = method
        self.place = place

    @property
    def cp_rank(self) -> int:
        """This rank's place among those that share the sequence."""
        return self.place.rank

    @property
    def topology(self) -> Topology:
        """Where the ranks that share the sequence lie."""
        return self.place.topology

    @property
    def padded_seq_len(self) -> int:
        """Length that the layout shards; positions past the mask's length are padding."""
        return self.layout.seq_len

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, T, H, D]; sequences of a batch are folded into the heads."""
        batch = q.shape[0]
        folded = [_fold(x) for x in (q, k, v)]
        out: Tensor = _Attention.apply(*folded, self.runtime)  # type: ignore[no-untyped-call]
        return out.view(out.shape[0], batch, -1, out.shape[2]).transpose(0, 1)

    def traffic(self) -> LinkBytes:
        """Bytes sent by this rank since the last `reset_traffic`."""
        transport = self.runtime.transport
        return transport.sent if isinstance(transport, DistributedTransport) else LinkBytes()

    def reset_traffic(self) -> None:
        """Start counting from zero."""
        if isinstance(self.runtime.transport, DistributedTransport):
            self.runtime.transport.reset()


def _fold(x: Tensor) -> Tensor:
    """[B, T, heads, D] -> [T, B*heads, D]; a view when B is 1. Query head h of sequence b still meets its own kv
    head.
    """
    return x.transpose(0, 1).flatten(1, 2).contiguous()


def build_parallel_attention(config: RunConfig, mesh: Mesh) -> ParallelAttention:
    """The configured attention on this rank. Collective over all ranks of the world (it makes process groups)."""
    topology = mesh.topology.group(mesh.cp_size)
    seq_len = config.train.seq_len
    method = resolve_attention(config, topology)
    layout = build_layout(method.layout, padded_length(seq_len, mesh.cp_size), mesh.cp_size)
    mask = Mask(seq_len, causal=config.attention.mask == "causal")
    plans = plan_method(method, mask, layout, mesh.cp_rank)
    dtype = getattr(torch, config.train.compute_dtype)
    transport: Transport = LocalTransport()
    if mesh.cp_size > 1:
        groups = make_channel_groups(mesh.cp_groups, mesh.rank, tuple(Channel), timedelta(minutes=10))
        transport = DistributedTransport(groups, mesh.cp_groups[_group_of(mesh)], topology, mesh.cp_rank)
    runtime = AttentionRuntime(
        plans.forward.ranks[mesh.cp_rank],
        plans.backward.ranks[mesh.cp_rank],
        choose_kernel(config.attention.kernel, mesh.device, dtype, config.model.head_dim),
        transport,
        getattr(torch, method.gradient_wire_dtype),
    )
    return ParallelAttention(runtime, layout, method, GroupPlace(mesh.cp_rank, topology))


def padded_length(seq_len: int, cp_size: int) -> int:
    """seq_len rounded up so that every rank gets two equal chunks."""
    multiple = 2 * cp_size if cp_size > 1 else 1
    return -(-seq_len // multiple) * multiple


def _group_of(mesh: Mesh) -> int:
    return next(index for index, ranks in enumerate(mesh.cp_groups) if mesh.rank in ranks)


def local_attention(
    seq_len: int, *, causal: bool = True, kernel: TileKernel | None = None, device: torch.device | None = None
) -> ParallelAttention:
    """Attention of one rank that holds the whole sequence, through the same plans and executor."""
    method = AttentionMethod("single", "contiguous", 1, 1, "kv", "float32", "one rank")
    layout = build_layout("contiguous", seq_len, 1)
    plans = plan_method(method, Mask(seq_len, causal=causal), layout, 0)
    chosen = kernel or choose_kernel("auto", device or torch.device("cpu"), torch.bfloat16, 64)
    runtime = AttentionRuntime(plans.forward.ranks[0], plans.backward.ranks[0], chosen, LocalTransport())
    return ParallelAttention(runtime, layout, method, GroupPlace(0, Topology(1, 1)))
