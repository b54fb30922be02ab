"""The one object that owns the meshes: degrees checked against the world size, every axis named with its purpose.

world_size=8, dp_replicate_size=1, dp_shard_size=2, cp_size=4
dp_shard 0: ranks 0 1 2 3 share sequence 0        dp_shard 1: ranks 4 5 6 7 share sequence 1

dp_replicate   whole copies of the sharded model (HSDP); gradients are all-reduced between them
dp_shard       different sequences; parameters are sharded over dp_shard x cp together
cp             parts of the same sequence; innermost, so its ranks are neighbours and fill a node first
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine.attention.topology import Topology
from engine.config import ClusterConfig, ParallelConfig
from engine.errors import ConfigError

# Rank 0 may tokenise the whole corpus while the others wait for it.
GROUP_TIMEOUT = timedelta(minutes=60)


@dataclass(frozen=True)
class Degrees:
    """Size of every axis; their product is the world size."""

    dp_replicate_size: int
    dp_shard_size: int
    cp_size: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_replicate_size * self.dp_shard_size * self.cp_size

    def cp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Every context-parallel group as global ranks, in order of their first rank."""
        return tuple(tuple(range(first, first + self.cp_size)) for first in range(0, self.world_size, self.cp_size))


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
    replicated over the first).
    """

    rank: int
    degrees: Degrees
    device: torch.device
    topology: Topology
    device_mesh: DeviceMesh
    fsdp_mesh: DeviceMesh

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.degrees.world_size

    @property
    def cp_size(self) -> int:
        """Ranks that share one sequence."""
        return self.degrees.cp_size

    @property
    def cp_rank(self) -> int:
        """Place of this rank among those that share its sequence."""
        return self.rank % self.degrees.cp_size

    @property
    def cp_groups(self) -> tuple[tuple[int, ...], ...]:
        """ALL context-parallel groups as global ranks, in the same order on every rank."""
        return self.degrees.cp_groups()

    @property
    def dp_size(self) -> int:
        """Groups that read different sequences."""
        return self.degrees.dp_replicate_size * self.degrees.dp_shard_size

    @property
    def dp_rank(self) -> int:
        """Which of the `dp_size` groups this rank belongs to."""
        return self.rank // self.degrees.cp_size


def resolve_degrees(parallel: ParallelConfig, world_size: int) -> Degrees:
    """The size of every axis for `world_size` ranks; `cp_size` null takes the ranks that data parallelism leaves.

    Raises ConfigError with every problem.
    """
    given = {
        "parallel.dp_replicate_size": parallel.dp_replicate_size,
        "parallel.dp_shard_size": parallel.dp_shard_size,
        "parallel.cp_size": 1 if parallel.cp_size is None else parallel.cp_size,
    }
    problems = [f"{name}: got {size}; a degree must be at least 1" for name, size in given.items() if size < 1]
    if problems:
        raise ConfigError(problems)
    data_ranks = parallel.dp_replicate_size * parallel.dp_shard_size
    if parallel.cp_size is None:
        if world_size % data_ranks:
            raise ConfigError(
                f"parallel: dp_replicate_size {parallel.dp_replicate_size} x dp_shard_size {parallel.dp_shard_size} "
                f"= {data_ranks} does not divide {world_size} ranks; choose degrees that divide {world_size}, "
                "or change the number of ranks"
            )
        return Degrees(parallel.dp_replicate_size, parallel.dp_shard_size, world_size // data_ranks)
    degrees = Degrees(parallel.dp_replicate_size, parallel.dp_shard_size, parallel.cp_size)
    if degrees.world_size != world_size:
        raise ConfigError(
            f"parallel: dp_replicate_size {degrees.dp_replicate_size} x dp_shard_size {degrees.dp_shard_size} "
            f"x cp_size {degrees.cp_size} = {degrees.world_size}, but {world_size} ranks were started; "
            f"start {degrees.world_size} ranks or leave parallel.cp_size=null"
        )
    return degrees


def resolve_topology(cluster: ClusterConfig, world_size: int, local_world_size: int) -> Topology:
    """Nodes x local ranks: as given by cluster.topology_nodes, else as the processes lie.

    `local_world_size` must be equal on all nodes; 0 says that it is not, and every rank is then its own node.
    """
    nodes = cluster.topology_nodes
    if nodes is None:
        if local_world_size < 1 or world_size % local_world_size:
            return Topology(world_size, 1)
        return Topology(world_size // local_world_size, local_world_size)
    if nodes < 1 or world_size % nodes:
        legal = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(
            f"cluster.topology_nodes: got {nodes}, which does not divide {world_size} ranks; legal values: {legal}"
        )
    return Topology(nodes, world_size // nodes)


def read_placement(environment: Mapping[str, str] = os.environ) -> Placement:
    """This process's place from torchrun's variables; rank 0 of 1 when there are none."""
    world_size = int(environment.get("WORLD_SIZE", "1"))
    return Placement(
        rank=int(environment.get("RANK", "0")),
        world_size=world_size,
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", str(world_size))),
    )


def choose_device(cluster: ClusterConfig, placement: Placement) -> torch.device:
    """The device of this rank: its GPU under NCCL, the CPU under gloo; raises ConfigError when GPUs are too few."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cluster.backend == "gloo" or (cluster.backend == "auto" and gpus == 0):
        return torch.device("cpu")
    if placement.local_world_size > gpus:
        raise ConfigError(
            f"cluster: {placement.local_world_size} ranks on this node, but {gpus} GPUs are visible; "
            f"set cluster.ranks_per_node={gpus or 1}, or cluster.backend=gloo to train on the CPU"
        )
    return torch.device("cuda", placement.local_rank)


def start_process_group(device: torch.device, placement: Placement) -> bool:
    """Whether this call started the default process group (then the caller must destroy it).

    Without torchrun a group of one rank is made, so that one code path serves every world size.
    """
    if dist.is_initialized():
        return False
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if placement.world_size > 1 or "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=GROUP_TIMEOUT)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return True


def build_mesh(parallel: ParallelConfig, cluster: ClusterConfig) -> Mesh:
    """The mesh of this run on the started process group; called by all ranks. Raises ConfigError with all problems."""
    placement = read_placement()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    problems: list[str] = []
    try:
        degrees = resolve_degrees(parallel, world_size)
    except ConfigError as error:
        problems.extend(error.problems)
    try:
        topology = resolve_topology(cluster, world_size, _common_local_world_size(placement))
    except ConfigError as error:
        problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    device = choose_device(cluster, placement)
    sizes = (degrees.dp_replicate_size, degrees.dp_shard_size, degrees.cp_size)
    device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
    shard_size = degrees.dp_shard_size * degrees.cp_size
    if degrees.dp_replicate_size == 1:
        fsdp_mesh = init_device_mesh(device.type, (shard_size,), mesh_dim_names=("fsdp",))
    else:
        hsdp_sizes = (degrees.dp_replicate_size, shard_size)
        fsdp_mesh = init_device_mesh(device.type, hsdp_sizes, mesh_dim_names=("dp_replicate", "fsdp"))
    return Mesh(rank, degrees, device, topology, device_mesh, fsdp_mesh)


def _common_local_world_size(placement: Placement) -> int:
    """Ranks per node if it is the same on every node, else 0; every rank gets the same answer."""
    sizes: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, placement.local_world_size)
    return placement.local_world_size if len(set(sizes)) == 1 else 0
