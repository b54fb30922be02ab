"""Tensor and sequence parallelism (Megatron-LM: Shoeybi et al. 2019, Korthikanti et al. 2022).

Between layers a rank holds T / t rows of hidden; inside attention and MLP all T rows of its heads or channels:

    [B, T/t, d] -> norm -> GATHER [B, T, d] -> q, k, v by columns -> attention -> o by rows -> SCATTER [B, T/t, d]
                -> norm -> GATHER [B, T, d] -> gate, up by columns          -> down by rows -> SCATTER [B, T/t, d]

GATHER is an all-gather whose backward is a reduce-scatter, SCATTER the reverse, so a layer sends 4 (t-1)/t T d numbers
per rank forward and as many backward. (Megatron sends 6 backward, because it gathers again instead of saving. Here a
gathered input is saved until its layer's backward, with activation checkpointing for one layer at a time.)

Parameters are DTensors on the tp mesh, so that FSDP2, optimizer and checkpoints know their slices. Activations are
plain tensors. With torch's ColwiseParallel and RowwiseParallel they would be DTensors too: views that must not be
changed in place, and that custom functions (norm, RoPE, attention, loss) would have to unwrap.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from engine.distributed.collectives import all_gather_first, reduce_scatter_first
from engine.loss.fused import VocabularyRanks
from engine.model.linear import Linear, linear
from engine.model.llama import LlamaModel, RMSNorm, TransformerBlock


def slice_model(model: LlamaModel, tp_mesh: DeviceMesh) -> None:
    """Slice every matrix of `model` over `tp_mesh` in place, before FSDP2. Collective over the tp group.

    q, k, v, gate, up are sliced by output features: x [B, T, in] -> [B, T, out / t], without communication. o and down
    are sliced by input features: x [B, T, in / t] -> local rows [B, T / t, out] of the sum over ranks. Embedding and
    head are sliced by rows of the vocabulary. Norms have their whole gain on every rank.

    Afterwards tie weights again. Sizes must divide: engine.planning.topology.tensor_parallel_problems.
    """
    group = tp_mesh.get_group()
    _slice(model.embedding, tp_mesh, 0, _embed)
    _distribute(model.head, tp_mesh, Shard(0))
    model.head.ranks = vocabulary_ranks(group)
    _share_norm(model.norm, tp_mesh)
    for layer in model.layers:
        assert isinstance(layer, TransformerBlock)
        attention, mlp = layer.self_attn, layer.mlp
        for module in (attention, mlp):
            module.register_forward_pre_hook(lambda _, args: (gather_rows(args[0], group), *args[1:]))
        for wide in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            _slice(wide, tp_mesh, 0, _widen)
        for narrow in (attention.o_proj, mlp.down_proj):
            _slice(narrow, tp_mesh, 1, _narrow)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm):
            if norm is not None:
                _share_norm(norm, tp_mesh)


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather rows, [B, T / t, ...] -> [B, T, ...]; backward reduce-scatters. Collective over `group`."""
    out: Tensor = _Exchange.apply(x, group, True, True)  # type: ignore[no-untyped-call]
    return out


def scatter_rows(x: Tensor, group: dist.ProcessGroup, *, values: bool = True) -> Tensor:
    """Reduce-scatter rows, [B, T, ...] -> [B, T / t, ...], a new tensor; backward all-gathers. Collective over `group`.

    `values` False: nothing is sent forward and the result is uninitialised, but its gradient is correct.
    """
    out: Tensor = _Exchange.apply(x, group, False, values)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """All-gather forward and reduce-scatter backward, or the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, gathers: bool, values: bool) -> Tensor:
        """All-gather or reduce-scatter x; uninitialised if not `values`."""
        ctx.group, ctx.gathers = group, gathers
        if not values:
            return x.new_empty(x.shape[0], x.shape[1] // group.size(), *x.shape[2:])
        return _all_gather(x, group) if gathers else _reduce_scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        """Reduce-scatter or all-gather the gradient."""
        dx = _reduce_scatter(dout, ctx.group) if ctx.gathers else _all_gather(dout, ctx.group)
        return dx, None, None, None


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, n, ...] -> [B, t * n, ...], a new tensor."""
    ranks, (batch, rows, *rest) = group.size(), x.shape
    parts = all_gather_first(x, group)
    return parts.view(ranks, *x.shape).transpose(0, 1).reshape(batch, ranks * rows, *rest)  # no copy for a batch of one


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, t * n, ...] -> [B, n, ...], a new tensor."""
    ranks, (batch, rows, *rest) = group.size(), x.shape
    parts = x.reshape(batch, ranks, rows // ranks, *rest).transpose(0, 1)  # no copy for a batch of one
    return reduce_scatter_first(parts.flatten(0, 1), group)


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Make the module's parameters DTensors with `placement`; skip those that are (a tied weight)."""
    for name, parameter in list(module.named_parameters()):
        if not isinstance(parameter, DTensor):
            sliced = nn.Parameter(distribute_tensor(parameter, mesh, [placement], src_data_rank=None))
            module.register_parameter(name, sliced)


def _slice(module: nn.Module, mesh: DeviceMesh, dim: int, forward: Callable[..., Tensor]) -> None:
    """Shard the module's parameters along `dim` and replace its forward by `forward(module, group, ...)`."""
    _distribute(module, mesh, Shard(dim))
    # Set on the instance: FSDP's hooks wrap the call, so the weight is gathered over the fsdp ranks before.
    module.forward = partial(forward, module, mesh.get_group())


def _share_norm(norm: RMSNorm, mesh: DeviceMesh) -> None:
    """Replicate the gain; every rank's gradient is that of its own rows or heads, so the gradients are summed."""
    _distribute(norm, mesh, Replicate())
    # FSDP2 sums a gradient that is Partial over the tp ranks before it reduces it further.
    norm.gain = lambda: _local(norm.weight, gradient=Partial())  # type: ignore[method-assign]


def _local(parameter: Tensor, *, gradient: Placement | None = None) -> Tensor:
    """Return this rank's part of a DTensor; its gradient is placed as the parameter, or as `gradient`."""
    assert isinstance(parameter, DTensor)
    local: Tensor = parameter.to_local(grad_placements=None if gradient is None else [gradient])
    return local


def _widen(module: Linear, _: dist.ProcessGroup, x: Tensor, values: bool = True) -> Tensor:
    bias = None if module.bias is None else _local(module.bias)
    return linear(x, _local(module.weight), bias, values=values)


def _narrow(module: Linear, group: dist.ProcessGroup, x: Tensor, values: bool = True) -> Tensor:
    return scatter_rows(linear(x, _local(module.weight), values=values), group, values=values)


def _embed(module: nn.Embedding, group: dist.ProcessGroup, tokens: Tensor) -> Tensor:
    """Embed tokens [B, T] -> local rows [B, T / t, d]: each rank looks up its ids, zeros for the rest; then a sum."""
    weight = _local(module.weight)
    index = tokens - group.rank() * weight.shape[0]
    is_elsewhere = (index < 0) | (index >= weight.shape[0])
    embedded = F.embedding(index.masked_fill_(is_elsewhere, 0), weight)  # [B, T, d]
    return scatter_rows(embedded.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), group)


def vocabulary_ranks(group: dist.ProcessGroup) -> VocabularyRanks:
    """Return the collectives of the fused loss over `group`, whose ranks hold slices of the vocabulary."""
    gather, scatter = (partial(function, group=group) for function in (all_gather_first, reduce_scatter_first))
    return VocabularyRanks(group.rank(), group.size(), gather, scatter)
