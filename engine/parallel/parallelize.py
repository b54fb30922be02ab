"""Applies all parallelisms to a model, in this order: context -> tensor -> compile -> checkpoint policies -> FSDP2.

The model is unaware of them: attention over the ranks is a function passed at every call, and tensor parallelism
changes what modules hold and do, never the shapes that the model sees. The only file that knows the order.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import torch

from engine.activations.checkpointed import apply_policies
from engine.activations.layer_call import LayerExecution
from engine.activations.store import ActivationStore, DeviceStore, host_store
from engine.attention.library import ContextParallel
from engine.config.errors import ConfigError
from engine.config.settings import MemoryConfig, RunConfig
from engine.distributed.mesh import Mesh
from engine.hugging_face.decoder import HuggingFaceDecoder, mask_problems, position_problems
from engine.model.decoder import Decoder
from engine.model.init import init_weights
from engine.model.llama import LlamaModel
from engine.parallel.fsdp import parameter_device, shard_model
from engine.parallel.tensor import slice_model
from engine.planning.checkpoint_policy import layer_policies
from engine.planning.methods.presets import AttentionMethod, tile_tokens_of
from engine.predict.memory import host_memory
from engine.predict.policy_cost import layers_on_host, state_bytes
from engine.resolve.run import ResolvedRun


def build_model(
    run: ResolvedRun, mesh: Mesh, attention: ContextParallel | None = None
) -> tuple[Decoder, ContextParallel]:
    """Return the model, sharded and initialised, and its attention over the cp ranks. Collective over all ranks.

    The model is built on the meta device, sharded, and allocated afterwards, so no rank ever holds all of it.

    Args:
        attention: Of the run, if the caller has built it (building one opens process groups); None: it is built here.
    """
    model, attention = build_empty_model(run, mesh, attention)
    set_first_weights(model, run.config)
    return model, attention


def set_first_weights(model: Decoder, config: RunConfig) -> None:
    """Load the weights of model.init_from, or draw initial ones from the seed, in place. Collective over all ranks.

    Raises:
        ConfigError: The folder does not hold a model of this shape.
    """
    source = config.model.init_from
    loaded = frozenset[str]() if source is None else model.load(Path(source).expanduser())
    init_weights(model, config.seed, loaded)
    model.derive_weights()


def build_empty_model(
    run: ResolvedRun, mesh: Mesh, attention: ContextParallel | None = None
) -> tuple[Decoder, ContextParallel]:
    """Return what `build_model` returns, with uninitialised weights."""
    config = run.config
    model = build_decoder(config)
    attention = attention or ContextParallel.of_run(run, mesh)
    parallelize(model, config, mesh, attention)
    model.to_empty(device=parameter_device(config.memory.optimizer_store, mesh.device))
    model.fill_buffers(mesh.device)
    return model, attention


def build_decoder(config: RunConfig) -> Decoder:
    """Return the decoder of a run on the meta device, not parallelized.

    Raises:
        ConfigError: It is one of transformers that cannot be trained here; the reasons are named.
    """
    if config.model.implementation == "burst":
        with torch.device("meta"):
            return LlamaModel(config.model, config.loss)
    decoder = HuggingFaceDecoder(config.model, config.loss)
    problems = [
        *mask_problems(decoder, config.attention, config.train.seq_len),
        *position_problems(decoder, config.train.seq_len),
    ]
    if problems:
        raise ConfigError(problems)
    return decoder


def parallelize(model: Decoder, config: RunConfig, mesh: Mesh, attention: ContextParallel) -> None:
    """Change `model`, on the meta device, in place to run on `mesh` with this attention. Collective over all ranks."""
    if mesh.tp_mesh is not None:  # before FSDP2, which shards the tensor-parallel slices further
        assert isinstance(model, LlamaModel), "refused by engine.resolve.rules"
        slice_model(model, mesh.tp_mesh)
        model.tie_weights()
    if config.train.compile:  # before the policies, which call the compiled halves
        assert isinstance(model, LlamaModel), "refused by engine.resolve.rules"
        compile_layers(model, mesh.device)
    shards = mesh.fsdp_mesh.size(mesh.fsdp_mesh.ndim - 1)  # the last dimension; one of replicas may come before it
    parameters = sum(parameter.numel() for parameter in model.parameters()) // shards
    apply_policies(model, layer_executions(config, attention.method, mesh, parameters))
    # Embedding and head are units of their own, to be freed early; tied, they share a parameter and so must share one.
    largest = [[model.embedding, model.head]] if config.model.tie_embeddings else [model.embedding, model.head]
    shard_model(
        model,
        [*model.layers, *largest],
        mesh,
        compute_dtype=config.train.compute_dtype,
        store=config.memory.optimizer_store,
    )


def layer_executions(
    config: RunConfig, method: AttentionMethod, mesh: Mesh, parameters: int = 0
) -> list[LayerExecution]:
    """Return how each layer runs: its checkpoint policy, the store of its saved tensors, its tiles.

    All layers on the host share one store, which prefetches in the reverse of the order in which they saved.

    Args:
        config: The resolved configuration.
        method: The attention method, which limits tiles and layers on the host.
        mesh: Ranks and device meshes.
        parameters: Elements of this rank's shards, for the memory of an optimizer on the host.
    """
    memory, tile_tokens = config.memory, tile_tokens_of(config, method)
    on_device: ActivationStore = DeviceStore()
    on_host, host_layers = on_device, layers_on_host(config, method)
    if memory.activation_store == "host":
        limit = activation_limit(memory, mesh.device, mesh.topology.local_ranks, parameters)
        on_host = host_store(mesh.device, limit)
    return [
        LayerExecution(
            policy,
            on_host if index < host_layers else on_device,
            tile_tokens,
            projects_once=mesh.degrees.tp_size > 1,
        )
        for index, policy in enumerate(layer_policies(memory, config.model.num_layers))
    ]


def activation_limit(memory: MemoryConfig, device: torch.device, local_ranks: int, parameters: int) -> int | None:
    """Return the bytes of host memory for the activations of one of `local_ranks` ranks; None: no limit.

    memory.host_bytes is for all ranks of a node and includes the optimizer's states. If it is unset, a rank with a GPU
    may use its share of the machine's memory, since pinned memory cannot be swapped out; a rank on a CPU has no limit,
    because its host memory is its device memory and is planned as such.
    """
    on_gpu = device.type == "cuda"
    node_bytes = memory.host_bytes
    if node_bytes is None and on_gpu:
        node_bytes, _ = host_memory()
    if node_bytes is None:
        return None
    states = state_bytes(memory, parameters) if on_gpu and memory.optimizer_store == "host" else 0
    return max(0, node_bytes // local_ranks - states)


def compile_layers(model: LlamaModel, device: torch.device) -> None:
    """Compile the two halves of every layer, `project` and `finish`, in place.

    Attention between them is not compiled: its messages cannot be traced. On a CPU every process compiles into its own
    temporary folder, unless TORCHINDUCTOR_CACHE_DIR names one.

    Raises:
        ConfigError: The device is a CPU and no C++ compiler is installed.
    """
    compilers = (os.environ.get("CXX"), "g++", "clang++")
    if device.type == "cpu" and not any(name and shutil.which(name) for name in compilers):
        raise ConfigError(
            "train.compile=true needs a C++ compiler on a CPU, and neither g++ nor clang++ was found; "
            "install g++, name another compiler in the variable CXX, or set train.compile=false"
        )
    if device.type == "cpu":
        _use_private_cache()
    for layer in model.layers:
        for half in ("project", "finish"):
            setattr(layer, half, torch.compile(getattr(layer, half)))


def _use_private_cache() -> None:
    """Point torch's compiler at a temporary folder instead of the user's shared one.

    A process that is killed while the linker writes to the shared folder leaves a truncated library, which torch (2.13)
    loads in every later run of that user: `ImportError: ...so: file too short`. GPU kernels are moved into place
    atomically, so they may stay shared.
    """
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # torch itself sets the variable to the shared folder, TMP/torchinductor_USER, and child processes inherit that.
    if given is None or Path(given).name.startswith("torchinductor_"):
        folder = tempfile.mkdtemp(prefix="burst-compiled-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
