"""FSDP2 over the flattened dp_shard x cp ranks: fp32 master weights, summed gradients, no stale gathered weights.

Gradients are summed over ranks, never averaged: the trainer divides the loss by the number of labels on all ranks, so
ranks with different counts weigh as their tokens do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from engine.config.settings import Dtype, Store
from engine.distributed.mesh import Mesh


def parameter_device(store: Store, device: torch.device) -> torch.device:
    """Where this rank's fp32 shards lie, and with them gradients and moments: what `to_empty` must be given."""
    return torch.device("cpu") if store == "host" else device


def offload_policy(store: Store, device: torch.device) -> OffloadPolicy:
    """FSDP2's policy for shards in `store`.

    host: before a unit is gathered its shards are copied to the device, and its reduced gradients are copied back; the
    optimizer steps on the CPU. Copies overlap with computation only from and to pinned memory.
    """
    return CPUOffloadPolicy(pin_memory=device.type == "cuda") if store == "host" else OffloadPolicy()


def shard_model(
    model: nn.Module,
    units: Sequence[nn.Module | list[nn.Module]],
    mesh: Mesh,
    *,
    compute_dtype: Dtype,
    store: Store,
) -> None:
    """Shards `model` in place: every unit is gathered on its own, what is left belongs to the root.

    Parameters are gathered in `compute_dtype`, gradients reduced in fp32. Inputs are not cast: positions and rotary
    tables must stay exact whatever the weights are.

    A list of modules is one unit (tied weights must share one). All ranks must call, in the same order. Afterwards the
    model is given memory on `parameter_device(store, mesh.device)`.
    """
    dtype = None if compute_dtype == "float32" else torch.bfloat16
    for unit in [*units, model]:
        fully_shard(
            unit,
            mesh=mesh.fsdp_mesh,
            reshard_after_forward=True,
            mp_policy=MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
            offload_policy=offload_policy(store, mesh.device),
        )
    if mesh.fsdp_mesh.size() == 1:
        return  # nothing to sum; a factor of 1 would cost a copy of every gradient
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        # gloo has no scaled reduction: without this a divide factor of our own asks it for one and fails.
        module.set_force_sum_reduction_for_comms(True)


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Every FSDP unit of `model`, the root first."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module


def own_parameters(unit: nn.Module) -> list[nn.Parameter]:
    """Those that are trained and gathered with `unit`, not with a unit inside it."""
    inside = [module for module in unit.modules() if isinstance(module, FSDPModule) and module is not unit]
    others = {parameter for module in inside for parameter in module.parameters()}
    return [parameter for parameter in unit.parameters() if parameter.requires_grad and parameter not in others]


def set_gradient_sync(model: nn.Module, *, is_last: bool) -> None:
    """Says what the next backward does with its gradients: that of the last micro-step sums them over all ranks.

    Those before it sum them over the ranks that share parameters: kept whole until the last they would take 4 bytes for
    every parameter of the model on every rank. Copies of the sharded model wait for the last.
    """
    next(fsdp_modules(model)).set_requires_all_reduce(is_last)  # of the root, and of every unit in it


def release_gathered_weights(model: nn.Module) -> None:
    """Frees gathered weights of every unit.

    The one that holds the root's own parameters stays gathered after a forward without a backward (evaluation): it
    would not see weights that are changed before the next backward, nor be found by what asks for its parameters.
    """
    for module in fsdp_modules(model):
        module.reshard()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Around forward passes without a backward: evaluation mode, and no gathered weights afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        release_gathered_weights(model)
        model.train(was_training)
