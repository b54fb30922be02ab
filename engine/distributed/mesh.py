"""The one object that owns the meshes of a run, and what a process must know to become one of its ranks."""

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
from engine.resolve.degrees import place_ranks

# Before training begins rank 0 may tokenise the whole corpus while the others wait for it.
START_TIMEOUT = timedelta(minutes=60)
STEP_TIMEOUT_S = 600.0  # in training: no rank is so far ahead of another


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
    """Where this process lies, as torchrun says in the environment; one process alone without torchrun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run and this rank's place on every axis; all ranks build the same one.

    `topology` covers all ranks; `fsdp_mesh` is the mesh over which parameters are sharded (and, with two dimensions,
    replicated over the first); `tp_mesh` the one over which matrices are sliced, None where each is whole.
    """

    rank: int
    degrees: Degrees
    device: torch.device
    topology: Topology
    fsdp_mesh: DeviceMesh
    tp_mesh: DeviceMesh | None = None

    @property
    def cp_rank(self) -> int:
        """Place of this rank among those that share its sequence."""
        return self.rank // self.degrees.tp_size % self.degrees.cp_size

    @property
    def tp_rank(self) -> int:
        """Place of this rank among those that slice its matrices."""
        return self.rank % self.degrees.tp_size

    @property
    def row_part(self) -> RowPart:
        """Which of its cp rank's rows this rank holds between layers, and has the labels of."""
        return RowPart(self.tp_rank, self.degrees.tp_size)

    @property
    def cp_topology(self) -> Topology:
        """Where the ranks of this rank's cp group lie."""
        return self.degrees.cp_topology(self.topology)

    @property
    def dp_size(self) -> int:
        """Groups that read different sequences."""
        return self.degrees.dp_replicate_size * self.degrees.dp_shard_size

    @property
    def dp_rank(self) -> int:
        """Which of the `dp_size` groups this rank belongs to."""
        return self.rank // self.degrees.sequence_ranks


def read_placement(environment: Mapping[str, str] = os.environ) -> Placement:
    """This process's place from torchrun's variables; rank 0 of 1 when there are none."""
    world_size = int(environment.get("WORLD_SIZE", "1"))
    return Placement(
        rank=int(environment.get("RANK", "0")),
        world_size=world_size,
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", str(world_size))),
    )


def check_world(cluster: ClusterConfig, placement: Placement) -> None:
    """Raises ConfigError where the ranks that were started are not those of the configuration."""
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
    """The device of this rank: its GPU under NCCL, under gloo the CPU or a shared GPU. `gpus`: null: that torch sees.

    Raises ConfigError when GPUs are too few.
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
    """Whether this call started the default process group (then the caller must destroy it).

    Ranks meet where torchrun says, or at `store`; without either a group of one rank is made, so that one code path
    serves every world size.
    """
    if dist.is_initialized():
        return False
    alone = device.type == "cuda" and placement.local_world_size <= torch.cuda.device_count()
    backend = "cpu:gloo,cuda:nccl" if alone else "gloo"  # NCCL refuses ranks that share a GPU
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if store is None and placement.world_size == 1 and "MASTER_ADDR" not in os.environ:
        store = HashStore()
    place: dict[str, Any] = {}
    if store is not None:
        place = {"store": store, "rank": placement.rank, "world_size": placement.world_size}
    dist.init_process_group(backend, timeout=timeout, **place)
    return True


def step_timeout(cluster: ClusterConfig) -> timedelta:
    """How long a rank in training waits for another: behind whoever watches for hangs, who can tell more about them."""
    return timedelta(seconds=max(STEP_TIMEOUT_S, 2 * (cluster.hang_timeout_s or 0.0)))


def limit_waits(mesh: Mesh, timeout: timedelta) -> None:
    """From now on collectives on the mesh's device fail after `timeout`: FSDP's, and those of the default group.

    DeviceMesh has no way to give its groups a timeout, and a mesh over all ranks takes the default group as its own.
    """
    meshes = [mesh.fsdp_mesh, *([] if mesh.tp_mesh is None else [mesh.tp_mesh])]
    groups = {group for one in meshes for group in one.get_all_groups()}
    for group in {*groups, dist.distributed_c10d._get_default_group()}:
        group._get_backend(mesh.device)._set_default_timeout(timeout)


def build_mesh(parallel: ParallelConfig, cluster: ClusterConfig) -> Mesh:
    """The mesh of ranks that no launch has resolved, on the started process group; called by all ranks.

    Raises ConfigError with all problems.
    """
    placement = read_placement()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    degrees, topology = place_ranks(parallel, world_size, cluster.topology_nodes or _count_nodes(placement))
    device = choose_device(cluster, placement)
    return open_mesh(rank, degrees, device, topology)


def open_mesh(rank: int, degrees: Degrees, device: torch.device, topology: Topology) -> Mesh:
    """The mesh of a rank that has its place; collective. FSDP2 demands that its two meshes are of one root."""
    axes = {"fsdp": degrees.dp_shard_size * degrees.cp_size}
    if degrees.dp_replicate_size > 1:
        axes = {"dp_replicate": degrees.dp_replicate_size, **axes}
    if degrees.tp_size == 1:
        fsdp_mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        return Mesh(rank, degrees, device, topology, fsdp_mesh)
    root = init_device_mesh(device.type, (*axes.values(), degrees.tp_size), mesh_dim_names=(*axes, "tp"))
    return Mesh(rank, degrees, device, topology, root[tuple(axes)], root["tp"])


def _count_nodes(placement: Placement) -> int:
    """Nodes of equally many ranks, else every rank is its own; every rank gets the same answer."""
    world_size = dist.get_world_size()
    same = len(set(gather_objects(placement.local_world_size))) == 1 and world_size % placement.local_world_size == 0
    return world_size // placement.local_world_size if same else world_size
