"""Where ranks lie, and which of them work together, as plain integers. No torch: configuration is checked by it.

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

from engine.config.settings import Placement


@dataclass(frozen=True)
class Topology:
    """`nodes` machines with `local_ranks` ranks each; rank r lies on node r // local_ranks."""

    nodes: int
    local_ranks: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.local_ranks

    def node_of(self, rank: int) -> int:
        """Node on which `rank` lies."""
        return rank // self.local_ranks

    def same_node(self, first: int, second: int) -> bool:
        """Whether a message between the two ranks stays inside a node."""
        return self.node_of(first) == self.node_of(second)

    def group(self, size: int) -> Topology:
        """Topology of a group of `size` consecutive ranks that starts at a node's first rank or fits into a node."""
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
        """The rank at a place."""
        if self.placement == "head_first":
            return ring_index * self.heads + head
        if self.placement == "context_first":
            return head * self.ring_size + ring_index
        outer, inner = divmod(ring_index, self.inner)
        return (outer * self.heads + head) * self.inner + inner

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(ring rank, head) of a rank."""
        if self.placement == "head_first":
            return divmod(rank, self.heads)
        if self.placement == "context_first":
            head, ring_index = divmod(rank, self.ring_size)
            return ring_index, head
        rest, inner = divmod(rank, self.inner)
        outer, head = divmod(rest, self.heads)
        return outer * self.inner + inner, head

    def ring(self, head: int) -> tuple[int, ...]:
        """Ranks of one ring, in ring order."""
        return tuple(self.rank(index, head) for index in range(self.ring_size))

    def head_group(self, ring_index: int) -> tuple[int, ...]:
        """Ranks that hold the shards of one ring rank's block, in order of their shards."""
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
        """Every context-parallel group as global ranks, in order of their first rank: every tp_size-th rank."""
        return tuple(
            tuple(range(first + tp_rank, first + self.sequence_ranks, self.tp_size))
            for first in range(0, self.world_size, self.sequence_ranks)
            for tp_rank in range(self.tp_size)
        )

    def cp_topology(self, topology: Topology) -> Topology:
        """Where the ranks of a cp group of a run lie: of a node's ranks every tp_size-th belongs to it."""
        return sequence_group(topology, self.cp_size, self.tp_size)


def sequence_group(world: Topology, cp_size: int, tp_size: int = 1) -> Topology:
    """Where the ranks that share one sequence are, each with the same slice of every matrix."""
    return Topology(world.nodes, world.local_ranks // tp_size).group(cp_size)


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def length_multiple(cp_size: int, tp_size: int = 1) -> int:
    """Tokens of which a length must be a multiple, so that every rank gets two equal chunks that tp ranks divide."""
    return math.lcm(2 * cp_size if cp_size > 1 else 1, cp_size * tp_size)


def padded_length(seq_len: int, cp_size: int, tp_size: int = 1) -> int:
    """seq_len rounded up so that every rank gets two equal chunks, which its tp ranks can divide."""
    multiple = length_multiple(cp_size, tp_size)
    return -(-seq_len // multiple) * multiple
