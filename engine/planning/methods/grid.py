"""Places in a group that divides both heads and sequence: head parallel x inner ring x outer ring.

    head_parallel_size=2, inner=2, outer=2      ranks 0 1 2 3 4 5 6 7, as (outer, inner, head)
    head_first       000 001 010 011 100 101 110 111     those that share heads are neighbours
    context_first    000 010 100 110 001 011 101 111     those of a ring are neighbours
    interleaved      000 010 001 011 100 110 101 111     inner ring, then heads, then outer ring

Sources: Gu et al. 2024 (LoongTrain: head-first and context-first placement).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config.settings import Placement
from engine.planning.methods.presets import AttentionMethod
from engine.planning.sequence.layout import Layout, build_layout, split_for_heads
from engine.planning.sequence.mask import Mask


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


@dataclass(frozen=True)
class Blocks:
    """Who holds what: `home` rows of every rank between the layers, `ring` rows of every ring member inside attention.

    With head parallelism a ring member's block is the concatenation of its head group's pieces.
    """

    grid: Grid
    home: Layout
    ring: Layout

    def recomputed_rows(self, before: int, rank: int) -> int:
        """How many first rows of the ring block that `rank` works on lie before a position: rows ascend.

        before=8, zigzag on 2 ranks     rank 0: 0 1 2 3 | 12 13 14 15     rank 1: 4 5 6 7 | 8 9 10 11
        recomputed                              0 1 2 3                           4 5 6 7
        """
        return self.ring.rows_before(self.grid.place(rank)[0], before)


def divide_sequence(method: AttentionMethod, seq_len: int, masks: Sequence[Mask] = ()) -> Blocks:
    """Rows of every rank and ring member under the method's layout; `masks` are those that the layout must balance."""
    grid = Grid(method.head_parallel_size, method.ring_inner_size, method.ring_outer_size, method.placement)
    chunks = chunk_count(method, seq_len)
    cyclic = chunks if method.layout == "chunk_cyclic" else 1
    split_at = min(method.split_at, seq_len) if method.layout == "split_zigzag" else 0
    ring = build_layout(method.layout, seq_len, grid.ring_size, masks=masks, chunks=cyclic, split_at=split_at)
    if grid.heads == 1:
        return Blocks(grid, ring, ring)
    pieces = split_for_heads(ring, grid.heads, chunks)
    segments = tuple(pieces[index][head] for index, head in map(grid.place, range(grid.size)))
    return Blocks(grid, Layout(ring.name, seq_len, segments), ring)


def chunk_count(method: AttentionMethod, seq_len: int) -> int:
    """Chunks of every rank's rows, equally many on all ranks; 1 without a chunk pipeline."""
    if method.chunk_tokens is None:
        return 1
    rows = -(-seq_len // method.cp_size)
    return -(-rows // method.chunk_tokens)
