"""Sizes of the parallel axes, and which ranks share a sequence. No torch."""

from __future__ import annotations

import math

from engine.config.errors import ConfigError, legal_sizes
from engine.config.settings import ModelConfig, ParallelConfig, RunConfig
from engine.planning.topology import Degrees, Topology


def known_cp_size(parallel: ParallelConfig, world_size: int | None) -> int | None:
    """Return the ranks per sequence; None if the world size is unknown or the degrees do not fit it."""
    others = parallel.dp_replicate_size * parallel.dp_shard_size * parallel.tp_size
    if world_size is None or others < 1:
        return parallel.cp_size
    cp_size = world_size // others if parallel.cp_size is None else parallel.cp_size
    return cp_size if cp_size * others == world_size else None


def resolve_degrees(parallel: ParallelConfig, world_size: int) -> Degrees:
    """Return the size of every axis; `cp_size` null becomes the remaining factor. Raises ConfigError."""
    cp_size = known_cp_size(parallel, world_size)
    if cp_size is not None:
        return Degrees(parallel.dp_replicate_size, parallel.dp_shard_size, cp_size, parallel.tp_size)
    sizes = {"dp_replicate_size": parallel.dp_replicate_size, "dp_shard_size": parallel.dp_shard_size}
    sizes |= {} if parallel.cp_size is None else {"cp_size": parallel.cp_size}
    sizes |= {} if parallel.tp_size == 1 else {"tp_size": parallel.tp_size}
    fixed = math.prod(sizes.values())
    product = " x ".join(f"{name} {size}" for name, size in sizes.items()) + f" = {fixed}"
    if parallel.cp_size is None:
        raise ConfigError(f"parallel: {product} does not divide the {world_size} ranks; choose degrees that do")
    raise ConfigError(
        f"parallel: {product}, but there are {world_size} ranks; take {fixed} ranks, leave parallel.cp_size=null, "
        "or change a degree"
    )


def resolve_topology(parallel: ParallelConfig, world_size: int, nodes: int) -> tuple[Degrees, Topology]:
    """Return the degrees of a run and the topology of its ranks. Raises ConfigError with every problem."""
    problems: list[str] = []
    if world_size % nodes:
        problems.append(
            f"cluster.topology_nodes: {nodes} nodes cannot share {world_size} ranks evenly; choose a divisor: "
            f"{legal_sizes(world_size)}"
        )
    try:
        degrees = resolve_degrees(parallel, world_size)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    topology = Topology(nodes, world_size // nodes)
    if topology.local_ranks % degrees.tp_size:  # it communicates four times per layer and pass
        raise ConfigError(
            f"parallel.tp_size: got {degrees.tp_size}, which does not divide the {topology.local_ranks} ranks of a "
            f"node, and tensor parallelism stays inside a node; legal values: {legal_sizes(topology.local_ranks)}"
        )
    return degrees, topology


def tensor_parallel_problems(model: ModelConfig, tp_size: int) -> list[str]:
    """Return one sentence per size of the model that `tp_size` ranks cannot slice evenly."""
    sizes = {name: getattr(model, name) for name in ("num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size")}
    legal = legal_sizes(math.gcd(*sizes.values()))
    return [
        f"parallel.tp_size: got {tp_size}, which does not divide model.{name}={size}; legal values for this model: "
        f"{legal}" + (f" (or pad to model.vocab_size={-(-size // tp_size) * tp_size})" if name == "vocab_size" else "")
        for name, size in sizes.items()
        if size % tp_size
    ]


def sequence_topology(config: RunConfig, world: Topology) -> Topology:
    """Return the topology of the ranks of one sequence. Raises ConfigError if the degrees do not fit."""
    degrees, topology = resolve_topology(config.parallel, world.size, world.nodes)
    return degrees.cp_topology(topology)


def world_topology(config: RunConfig) -> Topology:
    """Return the topology of all ranks of the run. Raises ConfigError while their number is unknown."""
    parallel, nodes = config.parallel, config.cluster.topology_groups
    cp_size = known_cp_size(parallel, config.cluster.world_size)
    if cp_size is None:
        raise ConfigError(
            "the number of ranks is unknown: cluster.ranks_per_node is null, which means one per GPU of the machine "
            "that trains; add --ranks N (and --nodes M), such as --ranks 16 --nodes 2"
        )
    world_size = cp_size * parallel.dp_replicate_size * parallel.dp_shard_size * parallel.tp_size
    if world_size % nodes:
        raise ConfigError(f"cluster.topology_nodes: {nodes} nodes cannot share {world_size} ranks evenly; see --nodes")
    return Topology(nodes, world_size // nodes)
