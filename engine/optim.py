"""AdamW, learning rate schedules as pure functions, clipping by the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.config import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (0 .. total_steps-1).

    Warm-up rises linearly and reaches the top at step warmup_steps-1; cosine and wsd reach
    min_learning_rate_ratio * learning_rate exactly at the last step.
    """
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * (step + 1) / optimizer.warmup_steps
    share = _share_after_warmup(optimizer, step, total_steps)
    floor = optimizer.min_learning_rate_ratio
    return optimizer.learning_rate * (floor + (1.0 - floor) * share)


def _share_after_warmup(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """How far above the floor the learning rate lies: 1 at the top, 0 at the last step."""
    if optimizer.schedule == "constant":
        return 1.0
    if optimizer.schedule == "cosine":
        span = max(1, total_steps - optimizer.warmup_steps)
        progress = min(1.0, (step - optimizer.warmup_steps + 1) / span)
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    decay_steps = optimizer.decay_steps or max(1, total_steps // 10)
    return min(1.0, max(0.0, (total_steps - 1 - step) / decay_steps))


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the fp32 master weights of `model`; weight decay acts on matrices only, never on norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Gives every parameter group the learning rate `value`."""
    for group in optimizer.param_groups:
        group["lr"] = value


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Global 2-norm of all gradients before clipping (fp32 scalar, equal on all ranks); scales them to `max_norm`.

    Gradients may be FSDP2 shards: the norm then spans all shards (all ranks must call). `max_norm` null never scales.
    """
    owners = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in owners if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm(gradients, foreach=True)
    norm = total.full_tensor() if isinstance(total, DTensor) else total
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(owners, max_norm, norm, foreach=True)
    return norm
