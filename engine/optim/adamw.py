"""AdamW, learning rate schedules as pure functions, and clipping by the global gradient norm."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.config.errors import ConfigError
from engine.config.settings import MomentsDtype, OptimizerConfig
from engine.distributed.collectives import sum_over_ranks


def learning_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0 .. total_steps - 1).

    Warm-up rises linearly and reaches the peak at step warmup_steps - 1. cosine and wsd (warm-up, stable, decay) reach
    min_learning_rate_ratio * learning_rate exactly at the last step.
    """
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * (step + 1) / optimizer.warmup_steps
    share = 1.0  # 0 at the floor, 1 at the peak
    if optimizer.schedule == "cosine":
        span = max(1, total_steps - optimizer.warmup_steps)
        share = 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - optimizer.warmup_steps + 1) / span)))
    elif optimizer.schedule == "wsd":
        decay_steps = optimizer.decay_steps or max(1, total_steps // 10)
        share = min(1.0, max(0.0, (total_steps - 1 - step) / decay_steps))
    floor = optimizer.min_learning_rate_ratio
    return optimizer.learning_rate * (floor + (1.0 - floor) * share)


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, moments_dtype: MomentsDtype = "float32"
) -> torch.optim.Optimizer:
    """Build AdamW over the fp32 master weights of `model`. Weight decay acts on matrices only, not norms and biases.

    int8 moments (Dettmers et al. 2022: blocks of 256 elements share a scale) take 2 bytes per parameter instead of 8.
    Shards with fewer than 4096 elements, or not a multiple of 256, have fp32 moments.

    Raises:
        ConfigError: moments_dtype is int8 and torchao is missing.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, others = ([p for p in parameters if (p.ndim >= 2) == wide] for wide in (True, False))
    decays = (config.weight_decay, matrices), (0.0, others)
    groups = [{"params": members, "weight_decay": decay} for decay, members in decays if members]
    betas = (config.beta1, config.beta2)
    shared: dict[str, Any] = {"lr": config.learning_rate, "betas": betas, "eps": config.epsilon}
    if moments_dtype == "float32":
        return torch.optim.AdamW(groups, fused=True, **shared)
    is_on_host = all(parameter.device.type == "cpu" for parameter in parameters)
    return load_adamw_8bit(is_on_host=is_on_host)(groups, **shared)


def load_adamw_8bit(
    import_module: Callable[[str], Any] = importlib.import_module, *, is_on_host: bool
) -> Callable[..., torch.optim.Optimizer]:
    """Import torchao.optim.AdamW8bit, or `HostAdamW8bit` for weights on the host.

    torchao compiles the update of every shape. On a CPU that needs a C++ compiler, and it fails for shards in host
    memory whose mesh is of GPUs (pytorch/ao#1931).

    Raises:
        ConfigError: torchao is missing or too old.
    """
    module, name = ("engine.optim.host_moments", "HostAdamW8bit") if is_on_host else ("torchao.optim", "AdamW8bit")
    try:
        for logger in ("torchao", "torch.utils._pytree"):  # they warn of GPU kernels that are never used here
            logging.getLogger(logger).setLevel(logging.ERROR)
        optimizer: Callable[..., torch.optim.Optimizer] = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"memory.moments_dtype: int8 needs torchao.optim.AdamW8bit, which could not be imported ({error}); "
            "install it with `pip install 'burst-train[int8]'`, or set memory.moments_dtype=float32"
        ) from error
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)  # torchao holds a tensor: a Python float would recompile the update at every step
        else:
            group["lr"] = value


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients to a global norm of at most `max_norm` (None: do not); return the norm before. Collective."""
    owners = [parameter for parameter in parameters if parameter.grad is not None]
    norm = global_norm(square_sum([parameter.grad for parameter in owners if parameter.grad is not None]))
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(owners, max_norm, norm, foreach=True)
    return norm


def global_norm(squares: Tensor) -> Tensor:
    """Return the 2-norm of the gradients of all ranks from this rank's `square_sum`, fp32 scalar. Collective."""
    return sum_over_ranks(squares).sqrt().float()


def square_sum(gradients: Sequence[Tensor]) -> Tensor:
    """Return this rank's share of the squared 2-norm, float64 scalar; the shares of all ranks add up to it."""
    norms = torch._foreach_norm([local_part(gradient) for gradient in gradients])
    # n ranks that hold the same part count 1/n of its square each.
    shares = torch._foreach_div(norms, [_copies(gradient) ** 0.5 for gradient in gradients])
    return torch.stack(shares).double().square().sum()


def local_part(tensor: Tensor) -> Any:
    """Return this rank's shard of `tensor` as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(gradient: Tensor) -> int:
    """Return how many ranks hold the same part of the gradient."""
    if not isinstance(gradient, DTensor):
        return 1
    mesh = gradient.device_mesh
    return math.prod(mesh.size(dim) for dim, place in enumerate(gradient.placements) if place.is_replicate())
