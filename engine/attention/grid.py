"""Places in a group that divides both heads and sequence: head parallel x inner ring x outer ring.

    head_parallel_size=2, inner=2, outer=2      ranks 0 1 2 3 4 5 6 7, as (outer, inner, head)
    head_first       000 001 010 011 100 101 110 111     those that share heads are neighbours
    context_first    000 010 100 110 001 011 101 111     those of a ring are neighbours
    interleaved      000 010 001 011 100 110 101 111     inner ring, then heads, then outer ring

Sources: Gu et al. 2024 (LoongTrain: head-first and context-first placement).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import Placement


@dataclass(frozen=True)
class Grid:
    """P = heads * inner * outer ranks; ring index = outer_index * inner + inner_index."""

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

    def place(self, rank: int) -> tuple[int, int]:
        """(ring index, head) of a rank."""
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
        """Ranks that hold the pieces of one ring member's block, in order of their pieces."""
        return tuple(self.rank(ring_index, head) for head in range(self.heads))
