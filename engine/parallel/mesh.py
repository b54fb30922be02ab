"""The one object that owns the meshes: degrees checked against the world size, every axis named with its purpose.

world_size=8, dp_replicate_size=1, dp_shard_size=2, cp_size=2, tp_size=2
dp_shard 0: ranks 0 1 2 3 share sequence 0        dp_shard 1: ranks 4 5 6 7 share sequence 1
cp groups:  0 2 | 1 3 | 4 6 | 5 7                 tp groups:  0 1 | 2 3 | 4 5 | 6 7

dp_replicate   whole copies of the sharded model (HSDP); gradients are all-reduced between them
dp_shard       different sequences; parameters are sharded over dp_shard x cp together
cp             parts of the same sequence; its ranks are as near to one another as tp lets them be
tp             slices of every matrix, and parts of a cp rank's rows between layers; innermost, always inside a node
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine.attention.topology import Topology
from engine.config import ParallelConfig
from engine.config_cluster import ClusterConfig
from engine.errors import ConfigError
from engine.parallel.shard import RowPart

# Before training begins rank 0 may tokenise the whole corpus while the others wait for it.
START_TIMEOUT = timedelta(minutes=60)
STEP_TIMEOUT_S = 600.0  # in training: no rank is so far ahead of another


@dataclass(frozen=True)
class Degrees:
    """Size of every axis; their product is the world size."""

    dp_replicate_size: int
    dp_shard_size: int
    cp_size: int
    tp_size: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_replicate_size * self.dp_shard_size * self.cp_size * self.tp_size

    @property
    def sequence_ranks(self) -> int:
        """Consecutive ranks that work on the same sequence: cp x tp."""
        return self.cp_size * self.tp_size

    def cp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Every context-parallel group as global ranks, in order of their first rank: every tp_size-th rank."""
        return tuple(
            tuple(range(first + tp_rank, first + self.sequence_ranks, self.tp_size))
            for first in range(0, self.world_size, self.sequence_ranks)
            for tp_rank in range(self.tp_size)
        )


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
    device_mesh: DeviceMesh
    fsdp_mesh: DeviceMesh
    tp_mesh: DeviceMesh | None = None

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
        return self.rank // self.degrees.tp_size % self.degrees.cp_size

    @property
    def tp_size(self) -> int:
        """Ranks that hold slices of the same matrices and parts of the same rows."""
        return self.degrees.tp_size

    @property
    def tp_rank(self) -> int:
        """Place of this rank among those that slice its matrices."""
        return self.rank % self.degrees.tp_size

    @property
    def row_part(self) -> RowPart:
        """Which of its cp rank's rows this rank holds between layers, and has the labels of."""
        return RowPart(self.tp_rank, self.tp_size)

    @property
    def cp_topology(self) -> Topology:
        """Where the ranks of this rank's cp group lie: of a node's ranks every tp_size-th belongs to it."""
        nodes, local_ranks = self.topology.nodes, self.topology.local_ranks
        return Topology(nodes, local_ranks // self.tp_size).group(self.cp_size)

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
        return self.rank // self.degrees.sequence_ranks


def resolve_degrees(parallel: ParallelConfig, world_size: int) -> Degrees:
    """The size of every axis for `world_size` ranks; `cp_size` null takes the ranks that the other axes leave.

    Raises ConfigError with every problem.
    """
    sizes = {
        "dp_replicate_size": parallel.dp_replicate_size,
        "dp_shard_size": parallel.dp_shard_size,
        "cp_size": parallel.cp_size,
        "tp_size": parallel.tp_size,
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    problems = [f"parallel.{name}: got {size}; a degree must be at least 1" for name, size in given.items() if size < 1]
    if problems:
        raise ConfigError(problems)
    fixed = math.prod(given.values())
    product = " x ".join(f"{name} {size}" for name, size in given.items()) + f" = {fixed}"
    if parallel.cp_size is None and world_size % fixed:
        raise ConfigError(
            f"parallel: {product} does not divide {world_size} ranks; choose degrees that divide {world_size}, "
            "or change the number of ranks"
        )
    if parallel.cp_size is not None and fixed != world_size:
        raise ConfigError(
            f"parallel: {product}, but {world_size} ranks were started; start {fixed} ranks or leave "
            "parallel.cp_size=null"
        )
    return Degrees(**{**given, "cp_size": parallel.cp_size or world_size // fixed})


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


def choose_device(cluster: ClusterConfig, placement: Placement) -> torch.device:
    """The device of this rank: its GPU under NCCL, under gloo the CPU or a shared GPU.

    Raises ConfigError when GPUs are too few.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cluster.backend == "gloo" and cluster.ranks_share_device and gpus:
        return torch.device("cuda", placement.local_rank % gpus)
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
    alone = device.type == "cuda" and placement.local_world_size <= torch.cuda.device_count()
    backend = "cpu:gloo,cuda:nccl" if alone else "gloo"  # NCCL refuses ranks that share a GPU
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if placement.world_size > 1 or "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=START_TIMEOUT)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return True


def step_timeout(cluster: ClusterConfig) -> timedelta:
    """How long a rank in training waits for another: behind whoever watches for hangs, who can tell more about them."""
    return timedelta(seconds=max(STEP_TIMEOUT_S, 2 * (cluster.hang_timeout_s or 0.0)))


def limit_waits(mesh: Mesh, timeout: timedelta) -> None:
    """From now on collectives on the mesh's device fail after `timeout`: FSDP's, and those of the default group.

    DeviceMesh has no way to give its groups a timeout, and a mesh over all ranks takes the default group as its own.
    """
    meshes = [mesh.device_mesh, mesh.fsdp_mesh, *([] if mesh.tp_mesh is None else [mesh.tp_mesh])]
    groups = {group for one in meshes for group in one.get_all_groups()}
    for group in {*groups, dist.distributed_c10d._get_default_group()}:
        group._get_backend(mesh.device)._set_default_timeout(timeout)


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
    _check_tp_fits_a_node(degrees, topology)
    device = choose_device(cluster, placement)
    sizes = (degrees.dp_replicate_size, degrees.dp_shard_size, degrees.cp_size, degrees.tp_size)
    device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
    fsdp_mesh, tp_mesh = parameter_meshes(degrees, device)
    return Mesh(rank, degrees, device, topology, device_mesh, fsdp_mesh, tp_mesh)


def _check_tp_fits_a_node(degrees: Degrees, topology: Topology) -> None:
    """Raises ConfigError where a tensor-parallel group would span nodes: it talks four times per layer and pass."""
    if topology.local_ranks % degrees.tp_size == 0:
        return
    legal = ", ".join(str(n) for n in range(1, topology.local_ranks + 1) if topology.local_ranks % n == 0)
    raise ConfigError(
        f"parallel.tp_size: got {degrees.tp_size}, which does not divide the {topology.local_ranks} ranks of a node, "
        f"and tensor parallelism stays inside a node; legal values: {legal}"
    )


def parameter_meshes(degrees: Degrees, device: torch.device) -> tuple[DeviceMesh, DeviceMesh | None]:
    """(mesh that shards and replicates parameters, mesh that slices them), of one root: FSDP2 demands it."""
    axes = {"fsdp": degrees.dp_shard_size * degrees.cp_size}
    if degrees.dp_replicate_size > 1:
        axes = {"dp_replicate": degrees.dp_replicate_size, **axes}
    if degrees.tp_size == 1:
        return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)), None
    root = init_device_mesh(device.type, (*axes.values(), degrees.tp_size), mesh_dim_names=(*axes, "tp"))
    return root[tuple(axes)], root["tp"]


def _common_local_world_size(placement: Placement) -> int:
    """Ranks per node if it is the same on every node, else 0; every rank gets the same answer."""
    sizes: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, placement.local_world_size)
    return placement.local_world_size if len(set(sizes)) == 1 else 0
