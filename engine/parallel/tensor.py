"""Tensor and sequence parallelism (Megatron-LM: Shoeybi et al. 2019, Korthikanti et al. 2022).

Between layers a rank holds T / t rows of hidden, inside attention and MLP all T rows of its heads or channels:

    [B, T/t, d] -> norm -> GATHER [B, T, d] -> q, k, v by columns -> attention -> o by rows -> SCATTER [B, T/t, d]
                -> norm -> GATHER [B, T, d] -> gate, up by columns          -> down by rows -> SCATTER [B, T/t, d]

GATHER is an all-gather whose backward is a reduce-scatter, SCATTER the reverse, so a layer sends 4 (t-1)/t T d numbers
per rank forward and as many backward. (Megatron sends 6 backward: it gathers again what it does not keep. Here a
gathered input lives until its layer's backward, which under activation checkpointing is one layer at a time.)

Parameters are DTensors on the tp mesh, so that FSDP2, optimizer and checkpoints know their slices; activations are
plain tensors. Torch's own ColwiseParallel and RowwiseParallel make them DTensors too: their outputs are then views that
may not be changed in place, and functions of our own (norm, RoPE, attention, loss) would have to unwrap them again.
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
    """Slices every matrix of `model` over `tp_mesh` in place, before FSDP2; all ranks must call.

    Matrices that widen are sliced by output features: x [B, T, in] -> [B, T, out / t], without communication; those
    that narrow by input features: x [B, T, in / t] -> own rows [B, T / t, out] of the sum over ranks; embedding and
    head by rows of the vocabulary. Norms of own rows, or of own heads, have their whole gain on every rank. Tied
    weights must be tied again afterwards. Sizes must divide: engine.planning.topology.tensor_parallel_problems.
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
    """[B, T, ...]: the rows [B, T / t, ...] of all ranks. Its gradient is summed over ranks and divided among them."""
    out: Tensor = _Exchange.apply(x, group, True, True)  # type: ignore[no-untyped-call]
    return out


def scatter_rows(x: Tensor, group: dist.ProcessGroup, *, values: bool = True) -> Tensor:
    """[B, T / t, ...]: own rows of the sum over ranks of x [B, T, ...]; a new tensor, free to be changed in place.

    `values` False: for the gradient only; nothing is sent forward, and the result holds anything.
    """
    out: Tensor = _Exchange.apply(x, group, False, values)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """One way forward, the other way backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, gathers: bool, values: bool) -> Tensor:
        """All-gather, or reduce-scatter."""
        ctx.group, ctx.gathers = group, gathers
        if not values:
            return x.new_empty(x.shape[0], x.shape[1] // group.size(), *x.shape[2:])
        return _all_gather(x, group) if gathers else _reduce_scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        """Reduce-scatter, or all-gather."""
        dx = _reduce_scatter(dout, ctx.group) if ctx.gathers else _all_gather(dout, ctx.group)
        return dx, None, None, None


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, t * n, ...] from x [B, n, ...]."""
    ranks, (batch, rows, *rest) = group.size(), x.shape
    parts = all_gather_first(x, group)
    return parts.view(ranks, *x.shape).transpose(0, 1).reshape(batch, ranks * rows, *rest)  # no copy for a batch of one


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, n, ...] from x [B, t * n, ...]; a new tensor, no view."""
    ranks, (batch, rows, *rest) = group.size(), x.shape
    parts = x.reshape(batch, ranks, rows // ranks, *rest).transpose(0, 1)  # no copy for a batch of one
    return reduce_scatter_first(parts.flatten(0, 1), group)


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Makes the module's parameters DTensors with `placement`; one that is one already (a tied weight) stays."""
    for name, parameter in list(module.named_parameters()):
        if not isinstance(parameter, DTensor):
            sliced = nn.Parameter(distribute_tensor(parameter, mesh, [placement], src_data_rank=None))
            module.register_parameter(name, sliced)


def _slice(module: nn.Module, mesh: DeviceMesh, dim: int, forward: Callable[..., Tensor]) -> None:
    """Distributes a weight, and has `forward` work on this rank's slice: called with the module and the group first."""
    _distribute(module, mesh, Shard(dim))
    # On the instance, inside FSDP's hooks: the weight is gathered over the fsdp ranks before.
    module.forward = partial(forward, module, mesh.get_group())


def _share_norm(norm: RMSNorm, mesh: DeviceMesh) -> None:
    """The whole gain on every rank, whose parts of its gradient are summed."""
    _distribute(norm, mesh, Replicate())
    # FSDP2 sums a gradient that is Partial over the tp ranks before it reduces it further.
    norm.gain = lambda: _local(norm.weight, gradient=Partial())  # type: ignore[method-assign]


def _local(parameter: Tensor, *, gradient: Placement | None = None) -> Tensor:
    """This rank's part; its gradient is placed as the parameter, or as `gradient` says."""
    assert isinstance(parameter, DTensor)
    local: Tensor = parameter.to_local(grad_placements=None if gradient is None else [gradient])
    return local


def _widen(module: Linear, _: dist.ProcessGroup, x: Tensor, values: bool = True) -> Tensor:
    bias = None if module.bias is None else _local(module.bias)
    return linear(x, _local(module.weight), bias, values=values)


def _narrow(module: Linear, group: dist.ProcessGroup, x: Tensor, values: bool = True) -> Tensor:
    return scatter_rows(linear(x, _local(module.weight), values=values), group, values=values)


def _embed(module: nn.Embedding, group: dist.ProcessGroup, tokens: Tensor) -> Tensor:
    """Own rows [B, T / t, d] of tokens [B, T]: each rank looks up the tokens that it has, and zeros for the others."""
    weight = _local(module.weight)
    index = tokens - group.rank() * weight.shape[0]
    is_elsewhere = (index < 0) | (index >= weight.shape[0])
    found = F.embedding(index.masked_fill_(is_elsewhere, 0), weight)
    return scatter_rows(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), group)


def vocabulary_ranks(group: dist.ProcessGroup) -> VocabularyRanks:
    """The ranks of `group`, which hold slices of the vocabulary."""
    gather, scatter = (partial(function, group=group) for function in (all_gather_first, reduce_scatter_first))
    return VocabularyRanks(group.rank(), group.size(), gather, scatter)
