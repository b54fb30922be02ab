"""Every preset trains like one rank: gradients of a whole model and losses of three steps, causal and packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from testkit.ranks import Pools
from testkit.tiny_training import mesh_of, own_part, random_batches, start_run, tiny_config, whole

from engine.attention.presets import PRESETS
from engine.config import RunConfig
from engine.data import Batch
from engine.train_step import count_labels, rank_batch, sequence_loss

STEPS = 3
STARTS = (0, 1, 6, 7, 20)  # a document of one token, and some that cross every chunk's edge
CAUSAL: dict[str, Any] = {}
WINDOWED: dict[str, Any] = {"mask": "window", "window_tokens": 5, "documents": True}
# Every other layer sees all, and what circulates takes turns too.
MIXED: dict[str, Any] = {"mask_layers": ("sink_window", "causal"), "window_tokens": 7, "documents": True}
DISTRIBUTED = [name for name in PRESETS if name != "single"]


def config_of(preset: str, settings: dict[str, Any]) -> RunConfig:
    if preset == "megatron_tp":
        return tiny_config(attention={"preset": preset, **settings}, parallel={"tp_size": 2, "cp_size": 1})
    extra: dict[str, Any] = {"chunk_tokens": 3} if PRESETS[preset].chunked else {}  # type: ignore[index]
    nodes = 1 if preset == "megatron_allgather" else 2
    return tiny_config(attention={"preset": preset, **settings, **extra}, cluster={"topology_nodes": nodes})


def ranks_of(preset: str) -> int:
    return 2 if preset == "megatron_tp" else 4


def batch_of(step: int, config: RunConfig) -> Batch:
    batch = random_batches(step, sequences=1)
    starts = np.array(STARTS if config.attention.documents else (0,))
    return Batch(batch.tokens, batch.labels, (starts,))


def losses(config: RunConfig) -> list[float]:
    run = start_run(config)
    return [run.train_step(step, own_part(batch_of(step, config), run.mesh)).loss for step in range(STEPS)]


def gradients(config: RunConfig) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss of one batch, gathered whole."""
    run = start_run(config)
    (batch,) = own_part(batch_of(0, config), mesh_of(config.parallel, config.cluster))
    local = rank_batch(batch, run.model, run.attention, run.mesh)
    labels = count_labels([local.rows], run.mesh.device)
    (sequence_loss(run.model, local.rows, local.attention) / labels).backward()
    return {name: whole(parameter.grad) for name, parameter in run.model.named_parameters()}


@pytest.fixture(scope="module")
def alone(ranks: Pools) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    """Losses and gradients of one rank per kind of mask."""
    found = {}
    for name, settings in (("causal", CAUSAL), ("windowed", WINDOWED), ("mixed", MIXED)):
        config = tiny_config(attention={"preset": "single", **settings})
        found[name] = (ranks(1).run(losses, config)[0], ranks(1).run(gradients, config)[0])
    return found


def test_masks_change_the_losses(alone) -> None:
    assert alone["causal"][0] != pytest.approx(alone["windowed"][0], rel=1e-3)
    assert alone["causal"][0] != pytest.approx(alone["mixed"][0], rel=1e-3)


@pytest.mark.parametrize("name", ["causal", pytest.param("windowed", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("preset", DISTRIBUTED)
def test_three_steps_of_every_preset_give_the_losses_of_one_rank(ranks: Pools, alone, preset: str, name: str) -> None:
    config = config_of(preset, {"causal": CAUSAL, "windowed": WINDOWED}[name])
    for found in ranks(ranks_of(preset)).run(losses, config):
        assert found == pytest.approx(alone[name][0], rel=1e-5)


@pytest.mark.parametrize("name", [pytest.param("causal", marks=pytest.mark.thorough), "mixed"])
@pytest.mark.parametrize("preset", DISTRIBUTED)
def test_gradients_of_every_preset_are_those_of_one_rank(ranks: Pools, alone, preset: str, name: str) -> None:
    config = config_of(preset, {"causal": CAUSAL, "mixed": MIXED}[name])
    expected = alone[name][1]
    for found in ranks(ranks_of(preset)).run(gradients, config):
        for parameter, gradient in found.items():
            scale = float(expected[parameter].abs().max())
            torch.testing.assert_close(gradient, expected[parameter], rtol=0, atol=3e-6 * scale)


def test_layers_may_circulate_different_things(ranks: Pools, alone) -> None:
    settings = {**MIXED, "circulates_layers": ("q", "kv"), "layout": "balanced"}
    for found in ranks(4).run(losses, config_of("burst", settings)):
        assert found == pytest.approx(alone["mixed"][0], rel=1e-5)
