"""Learning rate schedules against their closed forms; AdamW groups; the clipped norm."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from testkit.ranks import Pools
from torch import nn
from torchao.optim import AdamW8bit

from engine.config.errors import ConfigError
from engine.config.settings import OptimizerConfig
from engine.optim.adamw import build_optimizer, clip_gradients, learning_rate, load_adamw_8bit, set_learning_rate

STEPS = 50


def rates(config: OptimizerConfig, steps: int = STEPS) -> list[float]:
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_warmup_is_linear() -> None:
    values = rates(OptimizerConfig(learning_rate=2.0, warmup_steps=10, min_learning_rate_ratio=0.1))
    assert values[:10] == pytest.approx([0.2 * step for step in range(1, 11)])


def test_cosine_ends_at_the_floor() -> None:
    values = rates(OptimizerConfig(learning_rate=2.0, warmup_steps=10, min_learning_rate_ratio=0.1))
    assert values[-1] == pytest.approx(0.2)


def test_cosine_is_its_closed_form() -> None:
    values = rates(OptimizerConfig(learning_rate=2.0, warmup_steps=10, min_learning_rate_ratio=0.1))
    for step in range(10, STEPS):
        share = 0.5 * (1 + math.cos(math.pi * (step - 9) / 40))
        assert values[step] == pytest.approx(2.0 * (0.1 + 0.9 * share))


def test_wsd_is_flat_then_falls_linearly_to_the_floor() -> None:
    values = rates(OptimizerConfig(learning_rate=1.0, schedule="wsd", decay_steps=10, min_learning_rate_ratio=0.0))
    assert values[: STEPS - 10] == [1.0] * (STEPS - 10)
    assert values[STEPS - 10 :] == pytest.approx([(9 - i) / 10 for i in range(10)])
    values = rates(OptimizerConfig(learning_rate=1.0, schedule="wsd", min_learning_rate_ratio=0.5))
    # a tenth of all steps by default, and one at least
    assert values.count(1.0) == STEPS - 5
    assert values[-1] == 0.5
    assert rates(OptimizerConfig(learning_rate=1.0, schedule="wsd"), 9).count(1.0) == 8
    schedules: tuple[Any, ...] = ("cosine", "wsd", "constant")  # of one step, too, within bounds
    for one in (OptimizerConfig(learning_rate=1.0, schedule=name, min_learning_rate_ratio=0.1) for name in schedules):
        assert 0.1 <= learning_rate(one, 0, 1) <= 1.0


def test_weight_decay_acts_on_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.RMSNorm(4))
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.3))
    decays = {parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert decays[model[0].weight] == 0.3
    assert decays[model[1].weight] == 0.0
    shared = [(group["lr"], group["betas"], group["eps"], group["fused"]) for group in optimizer.param_groups]
    assert shared == [(3e-4, (0.9, 0.95), 1e-8, True)] * 2
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_int8_moments_follow_the_learning_rate() -> None:
    layer = nn.Linear(64, 64, bias=False)
    before = layer.weight.detach().clone()
    optimizer = build_optimizer(layer, OptimizerConfig(learning_rate=1.0, weight_decay=0.0), "int8")
    layer.weight.grad = torch.ones_like(layer.weight)
    assert type(optimizer).__name__ == "HostAdamW8bit"
    set_learning_rate(optimizer, 0.25)
    optimizer.step()
    # The first AdamW update is the learning rate, in the direction of the gradient's sign.
    torch.testing.assert_close(before - layer.weight.detach(), torch.full((64, 64), 0.25), rtol=1e-5, atol=0)


def test_8_bit_moments_on_a_gpu_are_updated_by_torchao() -> None:
    assert load_adamw_8bit(is_on_host=False) is AdamW8bit


def test_importing_torchao_logs_nothing() -> None:
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.setLevel(logging.INFO)
    load_adamw_8bit(is_on_host=False)
    assert [logger.level for logger in loggers] == [logging.ERROR] * 2


@pytest.mark.parametrize("is_on_host", [False, True])
def test_without_torchao_int8_moments_are_refused_with_what_to_install(is_on_host: bool) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    with pytest.raises(ConfigError, match=r"torchao\.optim.*pip install 'burst-train\[int8\]'"):
        load_adamw_8bit(missing, is_on_host=is_on_host)


def clipped(gradient: list[float], limit: float | None) -> tuple[float, list[float]]:
    """(norm before, gradient after) of a single weight."""
    parameter = nn.Parameter(torch.zeros(len(gradient)))
    parameter.grad = torch.tensor(gradient)
    return clip_gradients([parameter], limit).item(), parameter.grad.tolist()


CLIPPED: list[tuple[list[float], float | None, list[float]]] = [
    ([3.0, 4.0], 1.0, [0.6, 0.8]),  # clip_grads divides by norm + 1e-6
    ([0.3, 0.4], 1.0, [0.3, 0.4]),
    ([3.0, 4.0], None, [3.0, 4.0]),
]


def test_clipping_returns_the_norm_before_it(ranks: Pools) -> None:
    for gradient, limit, after in CLIPPED:
        ((norm, found),) = ranks(1).run(clipped, gradient, limit)
        assert norm == pytest.approx(math.hypot(*gradient))
        assert found == pytest.approx(after, rel=1e-6)
