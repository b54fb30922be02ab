"""Every checkpoint policy gives the gradients of keeping everything: exactly in fp32, to 1e-12 in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from testkit.ranks import Pools
from testkit.resolved import method_of
from testkit.tiny_training import loss_of, mesh_of, own_part, random_batches, tiny_config, whole

from engine.activations.checkpointed import apply_policies
from engine.attention.library import ContextParallel, open_channels, resolve_here
from engine.attention.transport import Transport
from engine.config.settings import RunConfig
from engine.data.sampler import Batch
from engine.distributed.collectives import sum_over_ranks
from engine.distributed.mesh import Mesh
from engine.model.init import init_weights
from engine.model.llama import LlamaModel
from engine.parallel.parallelize import build_model, layer_executions
from engine.planning.methods.presets import PRESETS
from engine.training.train_step import rank_batch

STARTS = (0, 1, 6, 7, 20)
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "packed": {"mask": "window", "window_tokens": 5, "documents": True},
    "mixed": {"mask_layers": ("sink_window", "causal", "full"), "window_tokens": 7},
}
LAYOUTS = ("contiguous", "zigzag", "striped", "split_zigzag", "balanced")
MODEL = {"num_layers": 3}
SPLIT = "burst and tensor parallel"
# What is computed again by the same operations as before: every bit is the same.
EXACT: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpoint": "full"},
    "attn_out": {"activation_checkpoint": "attn_out"},
    "rho 0": {"activation_checkpoint": "seq_fraction", "saved_fraction": 0.0},
    "rho 1": {"activation_checkpoint": "seq_fraction", "saved_fraction": 1.0},
    "every 2": {"activation_checkpoint": "attn_out_every", "every_layers": 2},
    "every 3 on host": {"activation_checkpoint": "attn_out_every", "every_layers": 3, "activation_store": "host"},
    "full on host": {"activation_checkpoint": "full", "activation_store": "host"},
    "none on host": {"activation_checkpoint": "none", "activation_store": "host"},
    "full, two layers on host": {"activation_checkpoint": "full", "activation_store": "host", "host_layers": 2},
    "layers": {"checkpoint_layers": ("none", "attn_out_every", "attn_out_every")},
}
# Tiles of attention or of the MLP are cut otherwise: sums may round otherwise.
CLOSE: dict[str, dict[str, Any]] = {
    "rho 0.25": {"activation_checkpoint": "seq_fraction", "saved_fraction": 0.25},
    "rho 0.5 on host": {"activation_checkpoint": "seq_fraction", "saved_fraction": 0.5, "activation_store": "host"},
    "none in tiles": {"activation_checkpoint": "none", "tile_tokens": 3},
    "attn_out in tiles": {"activation_checkpoint": "attn_out", "tile_tokens": 3},
    "every 2 in tiles on host": {
        "activation_checkpoint": "attn_out_every",
        "every_layers": 2,
        "tile_tokens": 5,
        "activation_store": "host",
    },
}
POLICIES = {**EXACT, **CLOSE}


@dataclass(frozen=True)
class Difference:
    """How far one policy is from keeping everything: largest error over largest value."""

    policy: str
    loss: float
    gradient: float
    exact: bool


def ranks_of(preset: str) -> int:
    return {"single": 1, "megatron_tp": 2}.get(preset, 4)


def config_of(preset: str, settings: dict[str, Any], memory: dict[str, Any]) -> RunConfig:
    """A preset on its ranks; SPLIT names burst with sliced matrices."""
    tp_size = 2 if preset in (SPLIT, "megatron_tp") else 1
    name = "burst" if preset == SPLIT else preset
    extra: dict[str, Any] = {"chunk_tokens": 3} if PRESETS[name].chunked else {}  # type: ignore[index]
    nodes = 1 if preset in ("single", "megatron_allgather", "megatron_tp") else 2
    illegal = {"tile_tokens"} if tp_size > 1 else {"host_layers"} if PRESETS[name].chunked else set()  # type: ignore[index]
    memory = {key: value for key, value in memory.items() if key not in illegal}
    return tiny_config(
        model=MODEL,
        attention={"preset": name, **settings, **extra},
        memory=memory,
        cluster={"topology_nodes": nodes},
        parallel={"tp_size": tp_size, "cp_size": ranks_of(preset) // tp_size},
    )


def batch_of(step: int, config: RunConfig) -> Batch:
    batch = random_batches(step, sequences=1)
    starts = np.array(STARTS if config.attention.documents else (0,))
    return Batch(batch.tokens, batch.labels, (starts,))


def whole_in_float64(config: RunConfig, mesh: Mesh, channels: Transport) -> tuple[LlamaModel, ContextParallel]:
    """The whole model on every rank: FSDP reduces in fp32."""
    exact = replace(config, attention=replace(config.attention, kernel="reference"))
    attention = ContextParallel.of_run(resolve_here(exact, mesh), mesh, channels)
    model = LlamaModel(config.model, config.loss).to(torch.float64)
    init_weights(model, config.seed)
    apply_policies(model, layer_executions(config, attention.method, mesh))
    return model, attention


def gradients_of(config: RunConfig, dtype: torch.dtype, channels: Transport) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients) of two micro-batches whose forward passes both come before the backward passes, with an
    evaluation in between.
    """
    mesh = mesh_of(config.parallel, config.cluster)
    if dtype == torch.float64:
        model, attention = whole_in_float64(config, mesh, channels)
    else:  # as training builds it, in fp32
        run = resolve_here(config, mesh)
        model, attention = build_model(run, mesh, ContextParallel.of_run(run, mesh, channels))
    batches = [part for step in (0, 1) for part in own_part(batch_of(step, config), mesh)]
    local = [rank_batch(batch, model, attention, mesh) for batch in batches]
    losses = [loss_of(model, batch) for batch in local]
    with torch.no_grad():
        assert not loss_of(model, local[0]).requires_grad
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    found = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    total = sum_over_ranks(torch.stack([loss.detach() for loss in losses]).sum())
    if dtype == torch.float64:
        found = {name: sum_over_ranks(gradient) for name, gradient in found.items()}
    return float(total), found


def differences(preset: str, settings: dict[str, Any], names: tuple[str, ...], dtype: torch.dtype) -> list[Difference]:
    """Of every policy, on this rank."""
    found = []
    first = config_of(preset, settings, {})
    mesh = mesh_of(first.parallel, first.cluster)
    channels = open_channels(first, mesh)
    keeping_all: dict[str, tuple[float, dict[str, torch.Tensor]]] = {}
    for name in names:
        config = config_of(preset, settings, POLICIES[name])
        # The layout may follow the policy's cut: what it is compared with has the same one.
        layout = method_of(config, mesh.cp_topology).layout
        if layout not in keeping_all:
            keeps_all = config_of(preset, {**settings, "layout": layout}, {"activation_checkpoint": "none"})
            keeping_all[layout] = gradients_of(keeps_all, dtype, channels)
        want_loss, want = keeping_all[layout]
        loss, got = gradients_of(config, dtype, channels)
        errors = [float((got[k] - want[k]).abs().max() / want[k].abs().max()) for k in want]
        exact = loss == want_loss and all(torch.equal(got[k], want[k]) for k in want)
        found.append(Difference(name, abs(loss - want_loss) / abs(want_loss), max(errors), exact))
    return found


def check(ranks: Pools, preset: str, settings: dict[str, Any], names: tuple[str, ...], dtype: torch.dtype) -> None:
    """Every rank finds the same loss and gradients under these policies as without any."""
    loss, gradient = (1e-12, 1e-12) if dtype == torch.float64 else (1e-6, 1e-5)
    for of_rank in ranks(ranks_of(preset)).run(differences, preset, settings, names, dtype):
        assert [found.policy for found in of_rank] == list(names)
        for found in of_rank:
            assert found.exact or dtype == torch.float64 or found.policy in CLOSE, found
            assert found.loss < loss, found
            assert found.gradient < gradient, found


ON_RANKS = ("attn_out", "every 3 on host", "layers", "rho 0.25", "rho 0.5 on host", "attn_out in tiles")


@pytest.mark.parametrize("preset", [*PRESETS, SPLIT])
@pytest.mark.thorough_for(*{*PRESETS, SPLIT} - {"single", "burst"})
def test_policies_have_the_gradients_of_keeping_everything(ranks: Pools, preset: str) -> None:
    check(ranks, preset, MASKS["causal"], tuple(POLICIES) if preset == "single" else ON_RANKS, torch.float32)


@pytest.mark.parametrize("preset", [*PRESETS, SPLIT])
@pytest.mark.thorough_for(*{*PRESETS, SPLIT} - {"burst"})
def test_with_packed_documents_too(ranks: Pools, preset: str) -> None:
    check(ranks, preset, MASKS["packed"], ("full", "rho 0.25", "every 2 in tiles on host"), torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", ["burst", "loongtrain", "megatron_cp", "megatron_allgather"])
@pytest.mark.thorough
def test_in_every_layout_in_float64(ranks: Pools, preset: str, layout: str) -> None:
    settings = {**MASKS["mixed"], "layout": layout}
    check(ranks, preset, settings, ("attn_out", "every 2", "rho 0.25"), torch.float64)


def test_in_float64_they_are_the_same(ranks: Pools) -> None:
    settings = {**MASKS["mixed"], "layout": "balanced"}
    check(ranks, "burst", settings, ("attn_out in tiles", "rho 0.5 on host", "every 2"), torch.float64)
