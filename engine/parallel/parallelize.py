"""THE order of composition: context parallel -> tensor parallel -> compile -> checkpoint policies -> FSDP2.

The model knows none of this: attention over the ranks is a function it is given at every call, and tensor parallelism
changes what its modules hold and do, never their shapes as the model sees them.
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
from engine.model.init import init_weights
from engine.model.llama import LlamaModel
from engine.model.weights import load_weights
from engine.parallel.fsdp import parameter_device, shard_model
from engine.parallel.tensor import slice_model
from engine.planning.checkpoint_policy import layer_policies
from engine.planning.methods.presets import AttentionMethod, tile_tokens_of
from engine.predict.memory import host_memory
from engine.predict.policy_cost import layers_on_host, state_bytes
from engine.resolve.run import ResolvedRun


def build_model(
    run: ResolvedRun, mesh: Mesh, attention: ContextParallel | None = None
) -> tuple[LlamaModel, ContextParallel]:
    """(the model, sharded and initialised by the seed; its attention over the cp ranks). All ranks must call.

    The model is built without memory, sharded, and only then given memory, so no rank ever holds all of it.
    `attention`: of the run, if the caller has built it (it opens process groups); None: it is built here.
    """
    model, attention = build_empty_model(run, mesh, attention)
    set_first_weights(model, run.config)
    return model, attention


def set_first_weights(model: LlamaModel, config: RunConfig) -> None:
    """The weights that training begins with: those of model.init_from, else drawn by the seed. All ranks must call.

    Raises ConfigError where the folder holds no such model.
    """
    if config.model.init_from is None:
        init_weights(model, config.seed)
    else:
        load_weights(model, Path(config.model.init_from).expanduser())


def build_empty_model(
    run: ResolvedRun, mesh: Mesh, attention: ContextParallel | None = None
) -> tuple[LlamaModel, ContextParallel]:
    """As `build_model`, with whatever the memory of its weights holds."""
    config = run.config
    with torch.device("meta"):
        model = LlamaModel(config.model, config.loss)
    attention = attention or ContextParallel.of_run(run, mesh)
    parallelize(model, config, mesh, attention)
    model.to_empty(device=parameter_device(config.memory.optimizer_store, mesh.device))
    return model, attention


def parallelize(model: LlamaModel, config: RunConfig, mesh: Mesh, attention: ContextParallel) -> None:
    """Changes `model` in place to run on `mesh` with this attention over the cp ranks."""
    if mesh.tp_mesh is not None:
        slice_model(model, mesh.tp_mesh)
        model.tie_weights()
    if config.train.compile:
        compile_layers(model, mesh.device)
    shards = mesh.fsdp_mesh.size(mesh.fsdp_mesh.ndim - 1)  # a dimension of replicas stands before it
    parameters = sum(parameter.numel() for parameter in model.parameters()) // shards
    apply_policies(model, layer_executions(config, attention.method, mesh, parameters))
    # Units of the two largest matrices; when they are one and the same, one unit.
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
    """How every layer runs: its policy, the store of what it keeps, its tiles.

    One store serves all layers on the host, so that it sees in which order they keep. `parameters`: of this rank; the
    optimizer on the host needs memory for them.
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
    """Bytes of host memory for the activations of one of `local_ranks` ranks; None: no limit.

    memory.host_bytes counts for all ranks of a node and for all that lies there, the optimizer's part too. Without it a
    GPU's rank may use its share of what this machine has, since pinned memory cannot be swapped out; a rank on a CPU
    has no limit: its host memory is its device's, which is planned as one.
    """
    on_gpu = device.type == "cuda"
    node_bytes = memory.host_bytes
    if node_bytes is None and on_gpu:
        node_bytes, _ = host_memory()
    if node_bytes is None:
        return None
    taken = state_bytes(memory, parameters) if on_gpu and memory.optimizer_store == "host" else 0
    return max(0, node_bytes // local_ranks - taken)


def compile_layers(model: LlamaModel, device: torch.device) -> None:
    """Compiles the two halves of every layer by themselves; attention between them, whose messages cannot be traced,
    is left as it is.

    On a CPU every process compiles into a temporary folder of its own, unless TORCHINDUCTOR_CACHE_DIR names one.
    Raises ConfigError where the C++ compiler that the CPU code needs is missing.
    """
    compilers = (os.environ.get("CXX"), "g++", "clang++")
    if device.type == "cpu" and not any(name and shutil.which(name) for name in compilers):
        raise ConfigError(
            "train.compile=true needs a C++ compiler on a CPU, and neither g++ nor clang++ was found; "
            "install g++, name another compiler in the variable CXX, or set train.compile=false"
        )
    if device.type == "cpu":
        _use_own_cache()
    for layer in model.layers:
        for half in ("project", "finish"):
            setattr(layer, half, torch.compile(getattr(layer, half)))


def _use_own_cache() -> None:
    """Keeps torch's compiler from its shared folder: whoever is killed while a linker writes there leaves half a
    library, which torch (2.13) loads in every later run of that user: `ImportError: ...so: file too short`.

    A GPU's kernels are moved there whole, so those stay shared. Torch itself puts the name of the shared folder,
    TMP/torchinductor_USER, into the environment when it first looks for it, and children inherit that.
    """
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given is None or Path(given).name.startswith("torchinductor_"):
        folder = tempfile.mkdtemp(prefix="burst-compiled-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
