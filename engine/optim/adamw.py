"""AdamW, learning rate schedules as pure functions, clipping by the global gradient norm."""

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
    """Learning rate of optimizer step `step` (0 .. total_steps-1).

    Warm-up rises linearly and reaches the top at step warmup_steps-1; cosine and wsd reach
    min_learning_rate_ratio * learning_rate exactly at the last step.
    """
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * (step + 1) / optimizer.warmup_steps
    share = 1.0  # of the way from the floor to the top
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
    """AdamW over the fp32 master weights of `model`; weight decay acts on matrices only, never on norms.

    int8 moments (Dettmers et al. 2022: blocks of 256 numbers share a scale) take 2 bytes per parameter instead of 8. A
    rank's part of a parameter that has fewer than 4096 elements, or no multiple of 256, keeps fp32 moments. Raises
    ConfigError when torchao is missing.
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
    """The class torchao.optim.AdamW8bit, or what stands for it on the host. Raises ConfigError when torchao is missing
    or too old.

    torchao compiles the update of every shape. On a CPU that would need a C++ compiler, and it fails for shards that
    lie in host memory while their mesh is of GPUs (pytorch/ao issue 1931).
    """
    module, name = ("engine.optim.host_moments", "HostAdamW8bit") if is_on_host else ("torchao.optim", "AdamW8bit")
    try:
        for logger in ("torchao", "torch.utils._pytree"):  # would tell which GPU kernels, never used, do not load here
            logging.getLogger(logger).setLevel(logging.ERROR)
        optimizer: Callable[..., torch.optim.Optimizer] = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"memory.moments_dtype: int8 needs torchao.optim.AdamW8bit, which could not be imported ({error}); "
            "install it with `pip install 'burst-train[int8]'`, or set memory.moments_dtype=float32"
        ) from error
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Gives every parameter group the learning rate `value`."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)  # torchao's: a new number would be compiled anew
        else:
            group["lr"] = value


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """The `global_norm` of all gradients before clipping; scales them to `max_norm`, null never. Collective."""
    owners = [parameter for parameter in parameters if parameter.grad is not None]
    norm = global_norm(square_sum([parameter.grad for parameter in owners if parameter.grad is not None]))
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(owners, max_norm, norm, foreach=True)
    return norm


def global_norm(squares: Tensor) -> Tensor:
    """2-norm of all ranks' gradients from the `square_sum` of each: fp32 scalar, equal on all ranks. Collective."""
    return sum_over_ranks(squares).sqrt().float()


def square_sum(gradients: Sequence[Tensor]) -> Tensor:
    """This rank's share of the squared 2-norm: what several ranks hold alike they share equally. float64 scalar."""
    norms = torch._foreach_norm([local_part(gradient) for gradient in gradients])
    shares = torch._foreach_div(norms, [_copies(gradient) ** 0.5 for gradient in gradients])
    return torch.stack(shares).double().square().sum()


def local_part(tensor: Tensor) -> Any:
    """This rank's numbers of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(gradient: Tensor) -> int:
    """How many ranks hold the same part."""
    if not isinstance(gradient, DTensor):
        return 1
    mesh = gradient.device_mesh
    return math.prod(mesh.size(dim) for dim, place in enumerate(gradient.placements) if place.is_replicate())
