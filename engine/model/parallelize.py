"""THE order of composition: context parallel -> tensor parallel -> activation checkpoint -> compile -> FSDP2.

The model knows none of this: attention over the ranks is a function it is given at every call, and tensor parallelism
changes what its modules hold and do, never their shapes as the model sees them.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.attention.api import ParallelAttention, build_parallel_attention
from engine.config import RunConfig
from engine.config_checks import tensor_parallel_problems
from engine.errors import ConfigError
from engine.model.chunked import tile_layers
from engine.model.init import init_weights
from engine.model.llama import LlamaModel
from engine.parallel.fsdp import shard_model
from engine.parallel.mesh import Mesh
from engine.parallel.tensor import slice_model
from engine.tiling import layer_tiling


def build_model(config: RunConfig, mesh: Mesh) -> tuple[LlamaModel, ParallelAttention]:
    """(the model, sharded and initialised by the seed; its attention over the cp ranks). All ranks must call.

    The model is built without memory, sharded, and only then given memory, so no rank ever holds all of it.
    """
    with torch.device("meta"):
        model = LlamaModel(config.model, config.loss)
    attention = parallelize(model, config, mesh)
    model.to_empty(device=mesh.device)
    init_weights(model, config.seed)
    return model, attention


def parallelize(model: LlamaModel, config: RunConfig, mesh: Mesh) -> ParallelAttention:
    """Changes `model` in place to run on `mesh`; returns the attention over the cp ranks to call it with."""
    problems = tensor_parallel_problems(config.model, mesh.tp_size)
    if problems:
        raise ConfigError(problems)
    attention = build_parallel_attention(config, mesh)
    if mesh.tp_mesh is not None:
        slice_model(model, model.layers, mesh.tp_mesh)
        model.tie_weights()
    if tiling := layer_tiling(config, attention.method):
        tile_layers(model, tiling)
    elif config.memory.activation_checkpoint == "full":
        checkpoint_layers(model)
    if config.train.compile:
        compile_layers(model, mesh.device)
    shard_model(
        model,
        [*model.layers, *_embedding_and_head(model, tied=config.model.tie_embeddings)],
        mesh,
        parallel=config.parallel,
        compute_dtype=config.train.compute_dtype,
    )
    return attention


def checkpoint_layers(model: LlamaModel) -> None:
    """Every layer keeps its input only and is computed again in backward, attention and its messages included.

    All ranks reach the same layer's recomputation in the same order, so its messages match. No random numbers are
    drawn in a layer, so no generator state is kept.
    """
    for layer in model.layers:
        _wrap_forward(layer)


def compile_layers(model: LlamaModel, device: torch.device) -> None:
    """Compiles every layer by itself; the graph breaks at attention, whose messages cannot be traced.

    Raises ConfigError where the C++ compiler that the CPU code needs is missing.
    """
    compilers = (os.environ.get("CXX"), "g++", "clang++")
    if device.type == "cpu" and not any(name and shutil.which(name) for name in compilers):
        raise ConfigError(
            "train.compile=true needs a C++ compiler on a CPU, and neither g++ nor clang++ was found; "
            "install g++, name another compiler in the variable CXX, or set train.compile=false"
        )
    for layer in model.layers:
        layer.compile()


def _wrap_forward(layer: nn.Module) -> None:
    forward = layer.forward

    def forward_checkpointed(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    # On the instance, inside FSDP's hooks: weights are gathered before the recomputation, which runs without hooks.
    layer.forward = forward_checkpointed


def _embedding_and_head(model: LlamaModel, *, tied: bool) -> list[nn.Module | list[nn.Module]]:
    """Units of the two largest matrices; when they are one and the same, one unit."""
    return [[model.embedding, model.head]] if tied else [model.embedding, model.head]
