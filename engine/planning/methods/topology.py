"""Where ranks lie: a rectangle of nodes x local ranks, node-contiguous."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """`nodes` machines with `local_ranks` ranks each; rank r lies on node r // local_ranks."""

    nodes: int
    local_ranks: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.local_ranks < 1:
            raise ConfigError(f"topology: got {self.nodes} nodes x {self.local_ranks} ranks; both must be at least 1")

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
