"""Which rows every rank holds under a method's layout, between the layers and inside attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config.settings import RunConfig
from engine.planning.methods.layers import LayerAttention
from engine.planning.methods.presets import AttentionMethod
from engine.planning.program.buffers import Rows
from engine.planning.topology import Grid, padded_length
from engine.planning.visibility.layout import Layout, build_layout, shard_rows, split_for_heads
from engine.planning.visibility.mask import Mask


@dataclass(frozen=True)
class Blocks:
    """The rows of every rank between the layers and of every ring member inside attention.

    With head parallelism the block of a ring member is the concatenation of the shards of its head group.

    rank_layout   rows of every rank, between the layers
    ring          rows of every ring member, inside attention
    chunks        number of chunks of every rank's rows, the same on all ranks; 1 without a chunk pipeline
    """

    grid: Grid
    rank_layout: Layout
    ring: Layout
    chunks: int = 1

    def shard(self, member: int, chunk: int, head: int = 0, heads: int = 1) -> Rows:
        """Return the rows of a chunk of a ring member's block; of its `heads` shards that of index `head`."""
        return Rows(*shard_rows(self.ring.row_counts[member], heads, self.chunks, head, chunk))

    def recomputed_rows(self, before: int, rank: int) -> int:
        """Return how many first rows of the ring block of `rank` are before a position: rows ascend by position.

        before=8, zigzag on 2 ranks     rank 0: 0 1 2 3 | 12 13 14 15     rank 1: 4 5 6 7 | 8 9 10 11
        recomputed                              0 1 2 3                           4 5 6 7
        """
        return self.ring.rows_before(self.grid.coordinates(rank)[0], before)

    def ring_rows_from(self, cut: int) -> list[int]:
        """Return for every ring member how many rows of its block are at position `cut` or after it."""
        ring = self.ring
        return [rows - ring.rows_before(member, cut) for member, rows in enumerate(ring.row_counts)]


def divide_sequence(method: AttentionMethod, seq_len: int, masks: Sequence[Mask] = ()) -> Blocks:
    """Return rows of all ranks and ring members under the method's layout; `masks`: masks that the layout balances."""
    grid = method.grid
    chunks = 1 if method.chunk_tokens is None else -(-seq_len // (grid.size * method.chunk_tokens))
    cyclic = chunks if method.layout == "chunk_cyclic" else 1
    ring = build_layout(method.layout, seq_len, grid.ring_size, masks=masks, chunks=cyclic, split_at=method.split_at)
    if grid.heads == 1:
        return Blocks(grid, ring, ring, chunks)
    pieces = split_for_heads(ring, grid.heads, chunks)
    segments = tuple(pieces[index][head] for index, head in map(grid.coordinates, range(grid.size)))
    return Blocks(grid, Layout(segments), ring, chunks)


def divide_run(config: RunConfig, method: AttentionMethod, layers: Sequence[LayerAttention]) -> Blocks:
    """Return `divide_sequence` for a run whose layers repeat these masks."""
    padded = padded_length(config.train.seq_len, method.cp_size, config.parallel.tp_size)
    return divide_sequence(method, padded, [layer.mask for layer in layers])
