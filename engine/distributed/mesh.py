"""The device meshes of a run, and how a process becomes one of its ranks: placement, device, process group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError
from engine.config.settings import ParallelConfig
from engine.distributed.collectives import gather_objects
from engine.planning.topology import Degrees, Topology
from engine.resolve.degrees import resolve_topology

# Before training one rank of a node may tokenise the whole corpus while the others wait in a collective.
START_TIMEOUT = timedelta(minutes=60)
STEP_TIMEOUT_S = 600.0  # of a collective in training


@dataclass(frozen=True)
class RowPart:
    """Part `index` of `count` equal, consecutive parts of a sequence's rows."""

    index: int = 0
    count: int = 1

    def of(self, rows: int) -> slice:
        """The rows of this part of `rows` in all; raises ValueError unless they divide evenly."""
        if rows % self.count:
            raise ValueError(f"{rows} rows cannot be divided among {self.count} ranks; pad them to a multiple")
        size = rows // self.count
        return slice(self.index * size, (self.index + 1) * size)


WHOLE = RowPart()


@dataclass(frozen=True)
class Placement:
    """Rank and local rank of this process, from torchrun's environment; rank 0 of 1 without torchrun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run and the coordinates of this rank.

    Ranks are numbered with tp fastest, then cp, then dp_shard, then dp_replicate.

    Attributes:
        rank: Global rank.
        degrees: Sizes of all axes.
        device: This rank's device.
        topology: Nodes and ranks per node, of all ranks.
        fsdp_mesh: Parameters are sharded over its last dimension, dp_shard x cp; a first dimension holds replicas.
        tp_mesh: Matrices are sliced over it; None without tensor parallelism.
    """

    rank: int
    degrees: Degrees
    device: torch.device
    topology: Topology
    fsdp_mesh: DeviceMesh
    tp_mesh: DeviceMesh | None = None

    @property
    def cp_rank(self) -> int:
        """Index of this rank in its cp group, the ranks that share its sequences."""
        return self.rank // self.degrees.tp_size % self.degrees.cp_size

    @property
    def tp_rank(self) -> int:
        """Index of this rank in its tp group, the ranks that share its matrices."""
        return self.rank % self.degrees.tp_size

    @property
    def row_part(self) -> RowPart:
        """The part of the cp rank's rows that this rank holds between layers, and whose labels it has."""
        return RowPart(self.tp_rank, self.degrees.tp_size)

    @property
    def cp_topology(self) -> Topology:
        """Nodes and ranks per node of this rank's cp group."""
        return self.degrees.cp_topology(self.topology)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel groups, which read different sequences."""
        return self.degrees.dp_replicate_size * self.degrees.dp_shard_size

    @property
    def dp_rank(self) -> int:
        """Index of this rank's data-parallel group, 0 .. dp_size - 1."""
        return self.rank // self.degrees.sequence_ranks


def read_placement(environment: Mapping[str, str] = os.environ) -> Placement:
    """Read this process's placement from torchrun's variables; rank 0 of 1 if there are none."""
    world_size = int(environment.get("WORLD_SIZE", "1"))
    return Placement(
        rank=int(environment.get("RANK", "0")),
        world_size=world_size,
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", str(world_size))),
    )


def check_world(cluster: ClusterConfig, placement: Placement) -> None:
    """Raise ConfigError if the ranks that were started are not those of the configuration."""
    problems = []
    started = f"{placement.world_size} ranks were started, {placement.local_world_size} of them on this node"
    if cluster.world_size is not None and cluster.world_size != placement.world_size:
        nodes = f"cluster.num_nodes {cluster.num_nodes or 1} x cluster.ranks_per_node {cluster.ranks_per_node}"
        problems.append(
            f"{nodes} = {cluster.world_size} ranks, but {started}; start as many as the configuration says, "
            "or change it"
        )
    elif cluster.ranks_per_node not in (None, placement.local_world_size):
        problems.append(
            f"cluster.ranks_per_node: got {cluster.ranks_per_node}, but {started}; "
            f"start torchrun with --nproc-per-node {cluster.ranks_per_node}, or change the setting"
        )
    if problems:
        raise ConfigError(problems)


def choose_device(cluster: ClusterConfig, placement: Placement, gpus: int | None = None) -> torch.device:
    """Return the device of this rank: its GPU with NCCL; with gloo the CPU or a shared GPU.

    Args:
        cluster: backend and ranks_share_device.
        placement: Local rank and ranks of this node.
        gpus: GPUs of this node; None: those that torch sees.

    Raises:
        ConfigError: There are fewer GPUs than ranks on this node.
    """
    if gpus is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cluster.backend == "gloo" and cluster.ranks_share_device and gpus:
        return torch.device("cuda", placement.local_rank % gpus)
    if cluster.backend == "gloo" or (cluster.backend == "auto" and gpus == 0):
        return torch.device("cpu")
    if not gpus:
        raise ConfigError(
            f"cluster.backend={cluster.backend}: torch {torch.__version__} sees no GPU on this node; look at "
            "`nvidia-smi`, CUDA_VISIBLE_DEVICES and whether torch is built for CUDA, or set "
            "cluster.backend=gloo to train on the CPU"
        )
    if placement.local_world_size > gpus:
        raise ConfigError(
            f"cluster: {placement.local_world_size} ranks on this node, but GPUs visible: {gpus}; "
            f"set cluster.ranks_per_node={gpus}, or cluster.backend=gloo to train on the CPU"
        )
    return torch.device("cuda", placement.local_rank)


def start_process_group(
    device: torch.device, placement: Placement, *, store: Store | None = None, timeout: timedelta = START_TIMEOUT
) -> bool:
    """Start the default process group unless there is one; return whether it did (then the caller must destroy it).

    Without torchrun and `store` it makes a group of one rank, so that one code path serves every world size.

    Args:
        device: This rank's device; sets the current CUDA device.
        placement: Rank and world size.
        store: Rendezvous; None: torchrun's.
        timeout: Of its collectives.
    """
    if dist.is_initialized():
        return False
    has_own_gpu = device.type == "cuda" and placement.local_world_size <= torch.cuda.device_count()
    backend = "cpu:gloo,cuda:nccl" if has_own_gpu else "gloo"  # NCCL refuses ranks that share a GPU
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if store is None and placement.world_size == 1 and "MASTER_ADDR" not in os.environ:
        store = HashStore()
    rendezvous: dict[str, Any] = {}
    if store is not None:
        rendezvous = {"store": store, "rank": placement.rank, "world_size": placement.world_size}
    dist.init_process_group(backend, timeout=timeout, **rendezvous)
    return True


def step_timeout(cluster: ClusterConfig) -> timedelta:
    """Return the timeout of collectives in training, at least twice the hang timeout.

    Hang detection reports more than a timed-out collective, so it must come first.
    """
    return timedelta(seconds=max(STEP_TIMEOUT_S, 2 * (cluster.hang_timeout_s or 0.0)))


def limit_waits(mesh: Mesh, timeout: timedelta) -> None:
    """Set the timeout of the default group and of the mesh's groups for collectives on the mesh's device.

    DeviceMesh has no argument for the timeout of its groups, and a mesh over all ranks uses the default group.
    """
    meshes = [mesh.fsdp_mesh, *([] if mesh.tp_mesh is None else [mesh.tp_mesh])]
    groups = {group for device_mesh in meshes for group in device_mesh.get_all_groups()}
    for group in {*groups, dist.distributed_c10d._get_default_group()}:
        group._get_backend(mesh.device)._set_default_timeout(timeout)


def build_mesh(parallel: ParallelConfig, cluster: ClusterConfig) -> Mesh:
    """Build the mesh of ranks that no launch has resolved, on the started process group. Collective.

    Raises ConfigError with all problems.
    """
    placement = read_placement()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    degrees, topology = resolve_topology(parallel, world_size, cluster.topology_nodes or _count_nodes(placement))
    device = choose_device(cluster, placement)
    return open_mesh(rank, degrees, device, topology)


def open_mesh(rank: int, degrees: Degrees, device: torch.device, topology: Topology) -> Mesh:
    """Build the mesh of `rank`. Collective over all ranks."""
    axes = {"fsdp": degrees.dp_shard_size * degrees.cp_size}
    if degrees.dp_replicate_size > 1:
        axes = {"dp_replicate": degrees.dp_replicate_size, **axes}
    if degrees.tp_size == 1:
        fsdp_mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        return Mesh(rank, degrees, device, topology, fsdp_mesh)
    # FSDP2 requires that the fsdp mesh and the mesh of DTensor parameters (tp) are slices of one root mesh.
    root = init_device_mesh(device.type, (*axes.values(), degrees.tp_size), mesh_dim_names=(*axes, "tp"))
    return Mesh(rank, degrees, device, topology, root[tuple(axes)], root["tp"])


def _count_nodes(placement: Placement) -> int:
    """Return the number of nodes if all have equally many ranks, else the world size. Collective."""
    world_size = dist.get_world_size()
    same = len(set(gather_objects(placement.local_world_size))) == 1 and world_size % placement.local_world_size == 0
    return world_size // placement.local_world_size if same else world_size
