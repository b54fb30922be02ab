"""FSDP2 over the flattened dp_shard x cp ranks: fp32 master weights, summed gradients, no stale gathered weights.

Gradients are summed over ranks, not averaged: the trainer divides the loss by the number of labels on all ranks, so
every token weighs the same even if ranks have different numbers of labels.
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
    """Return the device of this rank's fp32 shards, their gradients and moments; pass it to `to_empty`."""
    return torch.device("cpu") if store == "host" else device


def offload_policy(store: Store, device: torch.device) -> OffloadPolicy:
    """Return FSDP2's policy for shards in `store`.

    host: a unit's shards are copied to the device before it is gathered, and its reduced gradients are copied back; the
    optimizer steps on the CPU. Copies overlap with computation only if host memory is pinned.
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
    """Shard `model` in place. Collective over all ranks, in the same order.

    Parameters are gathered in `compute_dtype`, gradients reduced in fp32. Afterwards allocate the model on
    `parameter_device(store, mesh.device)`.

    Args:
        model: The root; it owns the parameters that are in no unit.
        units: Modules that are gathered on their own. A list of modules is one unit; tied weights must share one.
        mesh: Provides the fsdp mesh.
        compute_dtype: Of gathered parameters.
        store: Where the shards are.
    """
    dtype = None if compute_dtype == "float32" else torch.bfloat16
    for unit in [*units, model]:
        fully_shard(
            unit,
            mesh=mesh.fsdp_mesh,
            reshard_after_forward=True,
            # Inputs are not cast: positions and rotary tables must stay exact whatever the dtype of the weights.
            mp_policy=MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
            offload_policy=offload_policy(store, mesh.device),
        )
    if mesh.fsdp_mesh.size() == 1:
        return  # nothing to sum; setting a factor of 1 would cost a copy of every gradient
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)  # sum, not mean
        # With a custom divide factor FSDP2 uses a scaled reduction, which gloo does not have; force a plain sum.
        module.set_force_sum_reduction_for_comms(True)


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield every FSDP unit of `model`, the root first."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module


def unit_parameters(unit: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters that are gathered with `unit`, not with a unit nested in it."""
    inside = [module for module in unit.modules() if isinstance(module, FSDPModule) and module is not unit]
    others = {parameter for module in inside for parameter in module.parameters()}
    return [parameter for parameter in unit.parameters() if parameter.requires_grad and parameter not in others]


def set_gradient_sync(model: nn.Module, *, is_last: bool) -> None:
    """Set how the next backward reduces gradients: only the last micro-step all-reduces them over replicas.

    Every micro-step reduce-scatters over the ranks that share parameters. Accumulating unreduced gradients instead
    would take 4 bytes per parameter of the whole model on every rank.
    """
    next(fsdp_modules(model)).set_requires_all_reduce(is_last)  # of the root, and of every unit in it


def release_gathered_weights(model: nn.Module) -> None:
    """Free the gathered weights of every unit.

    FSDP2 leaves the root gathered after a forward without a backward (evaluation). It would then compute with stale
    weights if they are changed before the next backward, and its parameters would not be the sharded ones.
    """
    for module in fsdp_modules(model):
        module.reshard()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the body, for forward passes without a backward; frees gathered weights afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        release_gathered_weights(model)
        model.train(was_training)
