"""Ranks on nodes and their groups, as plain integers. No torch, since configurations are checked with it.

world_size=8, dp_replicate_size=1, dp_shard_size=2, cp_size=2, tp_size=2
dp_shard 0: ranks 0 1 2 3 share sequence 0        dp_shard 1: ranks 4 5 6 7 share sequence 1
cp groups:  0 2 | 1 3 | 4 6 | 5 7                 tp groups:  0 1 | 2 3 | 4 5 | 6 7

dp_replicate   whole copies of the sharded model (HSDP); gradients are all-reduced between them
dp_shard       different sequences; parameters are sharded over dp_shard x cp together
cp             parts of the same sequence; its ranks are as near to one another as tp lets them be
tp             slices of every matrix, and parts of a cp rank's rows between layers; innermost, always inside a node

The ranks of a cp group divide its heads and its sequence: head parallel x inner ring x outer ring.

head_parallel_size=2, inner=2, outer=2      ranks 0 1 2 3 4 5 6 7, as (outer, inner, head)
head_first       000 001 010 011 100 101 110 111     those that share heads are neighbours
context_first    000 010 100 110 001 011 101 111     those of a ring are neighbours
interleaved      000 010 001 011 100 110 101 111     inner ring, then heads, then outer ring

Sources: Gu et al. 2024 (LoongTrain: head-first and context-first placement).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.config.errors import ConfigError
from engine.config.settings import (
    ModelConfig,
    ParallelConfig,
    Placement,
    RunConfig,
)


@dataclass(frozen=True)
class Topology:
    """`nodes` machines with `local_ranks` ranks each; rank r is on node r // local_ranks."""

    nodes: int
    local_ranks: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.local_ranks

    def node_of(self, rank: int) -> int:
        """Return the node of `rank`."""
        return rank // self.local_ranks

    def same_node(self, first: int, second: int) -> bool:
        """Return whether both ranks are on the same node."""
        return self.node_of(first) == self.node_of(second)

    def group(self, size: int) -> Topology:
        """Return the topology of `size` consecutive ranks that start at a node's first rank or are within a node."""
        if size <= self.local_ranks:
            return Topology(1, size)
        if size % self.local_ranks:
            return Topology(size, 1)
        return Topology(size // self.local_ranks, self.local_ranks)


@dataclass(frozen=True)
class Grid:
    """Ranks that share a sequence: `heads` divide the heads, around rings of `inner` ranks of which there are `outer`.

    Ring index = outer_index * inner + inner_index.
    """

    heads: int
    inner: int
    outer: int
    placement: Placement = "head_first"

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.heads * self.ring_size

    @property
    def ring_size(self) -> int:
        """Ranks of one ring."""
        return self.inner * self.outer

    def rank(self, ring_index: int, head: int) -> int:
        """Return the rank at a ring rank and head."""
        if self.placement == "head_first":
            return ring_index * self.heads + head
        if self.placement == "context_first":
            return head * self.ring_size + ring_index
        outer, inner = divmod(ring_index, self.inner)
        return (outer * self.heads + head) * self.inner + inner

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return ring rank and head of a rank."""
        if self.placement == "head_first":
            return divmod(rank, self.heads)
        if self.placement == "context_first":
            head, ring_index = divmod(rank, self.ring_size)
            return ring_index, head
        rest, inner = divmod(rank, self.inner)
        outer, head = divmod(rest, self.heads)
        return outer * self.inner + inner, head

    def ring(self, head: int) -> tuple[int, ...]:
        """Return the ranks of one ring, in ring order."""
        return tuple(self.rank(index, head) for index in range(self.ring_size))

    def head_group(self, ring_index: int) -> tuple[int, ...]:
        """Return the ranks that hold the shards of one ring rank's block, in order of their shards."""
        return tuple(self.rank(ring_index, head) for head in range(self.heads))

    def __str__(self) -> str:
        return f"{self.heads} x {self.inner} x {self.outer}"


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
        """Return every cp group as global ranks, in order of their first rank; members are tp_size apart."""
        return tuple(
            tuple(range(first + tp_rank, first + self.sequence_ranks, self.tp_size))
            for first in range(0, self.world_size, self.sequence_ranks)
            for tp_rank in range(self.tp_size)
        )

    def cp_topology(self, topology: Topology) -> Topology:
        """Return the topology of a cp group of a run, which has every tp_size-th rank of a node."""
        return Topology(topology.nodes, topology.local_ranks // self.tp_size).group(self.cp_size)


def known_cp_size(parallel: ParallelConfig, world_size: int | None) -> int | None:
    """Return the ranks that share one sequence; None if the number of ranks is unknown or the degrees do not fit."""
    others = parallel.dp_replicate_size * parallel.dp_shard_size * parallel.tp_size
    if world_size is None or others < 1:
        return parallel.cp_size
    cp_size = world_size // others if parallel.cp_size is None else parallel.cp_size
    return cp_size if cp_size * others == world_size else None


def resolve_degrees(parallel: ParallelConfig, world_size: int) -> Degrees:
    """Return the size of every axis; `cp_size` null takes all ranks that the others leave. Raises ConfigError."""
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


def place_ranks(parallel: ParallelConfig, world_size: int, nodes: int) -> tuple[Degrees, Topology]:
    """Return the degrees and the topology of a run. Raises ConfigError with every problem."""
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
    if topology.local_ranks % degrees.tp_size:  # it talks four times per layer and pass
        raise ConfigError(
            f"parallel.tp_size: got {degrees.tp_size}, which does not divide the {topology.local_ranks} ranks of a "
            f"node, and tensor parallelism stays inside a node; legal values: {legal_sizes(topology.local_ranks)}"
        )
    return degrees, topology


def tensor_parallel_problems(model: ModelConfig, tp_size: int) -> list[str]:
    """Yield one sentence per size of the model that `tp_size` does not divide."""
    sizes = {name: getattr(model, name) for name in ("num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size")}
    legal = legal_sizes(math.gcd(*sizes.values()))
    return [
        f"parallel.tp_size: got {tp_size}, which does not divide model.{name}={size}; legal values for this model: "
        f"{legal}" + (f" (or pad to model.vocab_size={-(-size // tp_size) * tp_size})" if name == "vocab_size" else "")
        for name, size in sizes.items()
        if size % tp_size
    ]


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def legal_sizes(number: int) -> str:
    """Describe the divisors of a number."""
    return ", ".join(map(str, divisors(number)))


def sequence_topology(config: RunConfig, world: Topology) -> Topology:
    """Return the topology of the ranks of one sequence. Raises ConfigError if there is none."""
    degrees, topology = place_ranks(config.parallel, world.size, world.nodes)
    return degrees.cp_topology(topology)


def length_multiple(cp_size: int, tp_size: int = 1) -> int:
    """Return the tokens that must divide a length, so that each rank gets two equal chunks that tp ranks divide."""
    return math.lcm(2 * cp_size if cp_size > 1 else 1, cp_size * tp_size)


def padded_length(seq_len: int, cp_size: int, tp_size: int = 1) -> int:
    """Return seq_len rounded up so that every rank gets two equal chunks that its tp ranks can divide."""
    multiple = length_multiple(cp_size, tp_size)
    return -(-seq_len // multiple) * multiple
