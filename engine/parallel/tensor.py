"""Tensor and sequence parallelism (Megatron-LM: Shoeybi et al. 2019, Korthikanti et al. 2022) as parallel styles.

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

from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from engine.loss.fused import VocabularyRanks
from engine.loss.head import LMHead
from engine.model.linear import linear
from engine.parallel.collectives import all_gather_first, reduce_scatter_first


def slice_model(model: nn.Module, layers: Iterable[nn.Module], tp_mesh: DeviceMesh) -> None:
    """Slices every matrix of `model` over `tp_mesh` in place, before FSDP2; all ranks must call.

    `model` has `embedding`, `norm` and `head`; each of `layers` the module names of a Llama block. Tied weights must be
    tied again afterwards. Sizes must divide: engine.planning.methods.topology.tensor_parallel_problems.
    """
    parallelize_module(model, tp_mesh, {"embedding": SlicedEmbedding(), "norm": SequenceNorm(), "head": SlicedHead()})
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": SequenceNorm(),
        "self_attn": GatheredInput(),
        "self_attn.q_proj": ColumnLinear(),
        "self_attn.k_proj": ColumnLinear(),
        "self_attn.v_proj": ColumnLinear(),
        "self_attn.o_proj": RowLinear(),
        "post_attention_layernorm": SequenceNorm(),
        "mlp": GatheredInput(),
        "mlp.gate_proj": ColumnLinear(),
        "mlp.up_proj": ColumnLinear(),
        "mlp.down_proj": RowLinear(),
    }
    for layer in layers:
        present = {name for name, _ in layer.named_modules()}
        norms = {name: SequenceNorm() for name in ("self_attn.q_norm", "self_attn.k_norm") if name in present}
        parallelize_module(layer, tp_mesh, {**plan, **norms})


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
    if batch == 1:  # the parts lie one after the other: no copy
        return parts.view(1, ranks * rows, *rest)
    return parts.view(ranks, *x.shape).transpose(0, 1).reshape(batch, ranks * rows, *rest)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, n, ...] from x [B, t * n, ...]; a new tensor, no view."""
    ranks, (batch, rows, *rest) = group.size(), x.shape
    parts = x.reshape(batch, ranks, rows // ranks, *rest).transpose(0, 1)  # no copy for a batch of one
    return reduce_scatter_first(parts.flatten(0, 1), group)


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Makes the module's parameters DTensors with `placement`; one that is one already (a tied weight) stays."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not isinstance(parameter, DTensor):
            sliced = nn.Parameter(distribute_tensor(parameter, mesh, [placement], src_data_rank=None))
            module.register_parameter(name, sliced)


def _local_weight(module: nn.Module, *, gradient: Placement | None = None) -> Tensor:
    """This rank's slice of the weight; its gradient is placed as the weight, or as `gradient` says."""
    weight = module.weight
    assert isinstance(weight, DTensor)
    local: Tensor = weight.to_local(grad_placements=None if gradient is None else [gradient])
    return local


def _local_bias(module: nn.Module) -> Tensor | None:
    """This rank's slice of the bias, if there is one."""
    bias = module.bias
    return bias.to_local() if isinstance(bias, DTensor) else None


class GatheredInput(ParallelStyle):
    """The module's first argument [B, T / t, d] is gathered to [B, T, d] before every forward."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def gather_first(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return gather_rows(args[0], group), *args[1:]

        module.register_forward_pre_hook(gather_first)
        return module


class _SlicedWeight(ParallelStyle):
    """A module whose weight is distributed and whose forward works on this rank's slice."""

    placement: Placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, self.placement)
        # On the instance, inside FSDP's hooks: the weight is gathered over the fsdp ranks before.
        module.forward = partial(self.forward_of(module, device_mesh.get_group()), module)
        return module

    @abstractmethod
    def forward_of(self, module: nn.Module, group: dist.ProcessGroup) -> Callable[..., Tensor]:
        """The function that replaces the module's forward, called with the module first."""


class ColumnLinear(_SlicedWeight):
    """Linear by output features: x [B, T, in] -> [B, T, out / t]; no communication."""

    placement = Shard(0)

    def forward_of(self, module: nn.Module, group: dist.ProcessGroup) -> Callable[..., Tensor]:
        """x @ slice.T, plus the slice of the bias."""
        return lambda module, x, values=True: linear(x, _local_weight(module), _local_bias(module), values=values)


class RowLinear(_SlicedWeight):
    """Linear by input features: x [B, T, in / t] -> own rows [B, T / t, out] of the sum over ranks."""

    placement = Shard(1)

    def forward_of(self, module: nn.Module, group: dist.ProcessGroup) -> Callable[..., Tensor]:
        """Own rows of the sum over ranks of x @ slice.T."""
        return lambda module, x, values=True: scatter_rows(
            linear(x, _local_weight(module), values=values), group, values=values
        )


class SequenceNorm(ParallelStyle):
    """RMSNorm of own rows, or of own heads; its gain is whole on every rank, whose parts of its gradient are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())
        # FSDP2 sums a gradient that is Partial over the tp ranks before it reduces it further.
        module.gain = partial(_local_weight, module, gradient=Partial())  # type: ignore[assignment]
        return module


class SlicedEmbedding(_SlicedWeight):
    """Embedding by rows of the vocabulary: tokens [B, T] of all ranks -> own rows [B, T / t, d]."""

    placement = Shard(0)

    def forward_of(self, module: nn.Module, group: dist.ProcessGroup) -> Callable[..., Tensor]:
        """Own rows of the sum over ranks: each looks up the tokens that it has, and zeros for the others."""

        def forward(embedding: nn.Module, tokens: Tensor) -> Tensor:
            weight = _local_weight(embedding)
            index = tokens - group.rank() * weight.shape[0]
            is_elsewhere = (index < 0) | (index >= weight.shape[0])
            found = F.embedding(index.masked_fill_(is_elsewhere, 0), weight)
            return scatter_rows(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), group)

        return forward


class SlicedHead(ParallelStyle):
    """LM head by rows of the vocabulary: its loss is of own rows, its logits never meet on a rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, LMHead)
        _distribute(module, device_mesh, Shard(0))
        module.ranks = vocabulary_ranks(device_mesh.get_group())
        return module


def vocabulary_ranks(group: dist.ProcessGroup) -> VocabularyRanks:
    """The ranks of `group`, which hold slices of the vocabulary."""
    gather, scatter = (partial(function, group=group) for function in (all_gather_first, reduce_scatter_first))
    return VocabularyRanks(group.rank(), group.size(), gather, scatter)
