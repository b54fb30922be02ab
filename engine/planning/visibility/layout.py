"""Layouts: the global positions that each rank holds, as lists of arithmetic progressions.

    seq_len=8, size=2             rank 0            rank 1
    contiguous                    0 1 2 3           4 5 6 7
    zigzag                        0 1 | 6 7         2 3 | 4 5
    striped                       0 2 4 6           1 3 5 7
    chunk_cyclic, 2 chunks        0 1 | 4 5         2 3 | 6 7
    per_document, starts 0 and 4  0 3 | 4 7         1 2 | 5 6
    balanced                      solved for equal tokens and equal work under the masks (balance.py)
    split_zigzag, split at 4      0 3 | 4 7         1 2 | 5 6

Plain integers, without torch or a process group. Tokens, labels and positions must be permuted by the same layout, and
labels must be shifted before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from engine.config.settings import LayoutName
from engine.planning.visibility.balance import balanced_ranges
from engine.planning.visibility.mask import Mask


@dataclass(frozen=True)
class Layout:
    """Assignment of positions 0 .. seq_len - 1 to `size` ranks, whose blocks may differ in length.

    segments[rank] are the rank's positions in ascending order; all segments have the same step.
    """

    segments: tuple[tuple[range, ...], ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.segments)

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """Number of tokens on every rank."""
        return tuple(sum(map(len, of_rank)) for of_rank in self.segments)

    @property
    def seq_len(self) -> int:
        """Number of positions."""
        return sum(self.row_counts)

    def rows_before(self, rank: int, position: int) -> int:
        """Return the number of rows of `rank` before a position; they are its first rows, since rows ascend."""
        return sum(len(range(s.start, min(s.stop, position), s.step)) for s in self.segments[rank])

    def positions(self, rank: int) -> npt.NDArray[np.int64]:
        """Return the global positions of the rows of `rank`, [rows] int64."""
        return np.concatenate([np.arange(0), *(np.arange(s.start, s.stop, s.step) for s in self.segments[rank])])


def build_layout(
    name: LayoutName, seq_len: int, size: int, *, masks: Sequence[Mask] = (), chunks: int = 1, split_at: int = 0
) -> Layout:
    """Build a layout of `seq_len` positions on `size` ranks; if the length does not divide, blocks differ in length.

    Args:
        name: Of the layout.
        seq_len: Padded length.
        size: Ranks.
        masks: One per layer; per_document uses their documents, balanced their visible pairs.
        chunks: Chunks per rank of chunk_cyclic: chunk i of rank p is the global chunk i * size + p.
        split_at: Border between the two zigzags of split_zigzag, so that causal attention is balanced over all queries
            and over those before the border. 0 or seq_len: one zigzag.
    """
    segments: Sequence[Sequence[range]]
    if name in ("contiguous", "chunk_cyclic"):
        segments = [
            [_chunk(index * size + rank, seq_len, chunks * size) for index in range(chunks)] for rank in range(size)
        ]
    elif name in ("zigzag", "split_zigzag"):
        segments = [
            [*_zigzag(rank, 0, split_at, size), *_zigzag(rank, split_at, seq_len, size)] for rank in range(size)
        ]
    elif name == "striped":
        segments = [[range(rank, seq_len, size)] for rank in range(size)]
    elif name == "per_document":
        segments = _per_document(seq_len, size, masks)
    else:
        segments = balanced_ranges(masks, seq_len, size)
    return Layout(tuple(_merged(of_rank) for of_rank in segments))


def shard_rows(total_rows: int, heads: int, chunks: int, head_rank: int, chunk: int) -> tuple[int, int]:
    """Return the rows [start, stop) of a ring rank's chunk that head rank `head_rank` holds before the head exchange.

    total_rows=10, heads=2, chunks=2      head rank 0: [0, 2) [5, 7)      head rank 1: [2, 5) [7, 10)
    """
    first, stop = chunk * total_rows // chunks, (chunk + 1) * total_rows // chunks
    rows = stop - first
    return first + head_rank * rows // heads, first + (head_rank + 1) * rows // heads


def split_for_heads(layout: Layout, heads: int, chunks: int = 1) -> tuple[tuple[tuple[range, ...], ...], ...]:
    """Return the segments [ring rank][head rank] that each rank holds outside attention, with `heads` head ranks.

    The rows of a ring rank are split into `chunks` chunks and each chunk into `heads` shards (`shard_rows`); a head
    rank holds its shards of all chunks in order. So the all-to-all of a chunk over the head ranks yields consecutive
    rows of the ring rank's block.
    """
    return tuple(
        tuple(
            _merged(
                [
                    part
                    for chunk in range(chunks)
                    for part in _rows_of(segments, *shard_rows(rows, heads, chunks, head_rank, chunk))
                ]
            )
            for head_rank in range(heads)
        )
        for rows, segments in zip(layout.row_counts, layout.segments, strict=True)
    )


def _rows_of(segments: Sequence[range], first: int, stop: int) -> list[range]:
    """Return rows [first, stop) of a list of segments."""
    parts = []
    for segment in segments:
        parts.append(segment[max(0, first) : max(0, stop)])
        first, stop = first - len(segment), stop - len(segment)
    return parts


def _chunk(index: int, seq_len: int, chunks: int, first: int = 0) -> range:
    """Return chunk `index` of `chunks` equal chunks of the positions [first, first + seq_len)."""
    return range(first + index * seq_len // chunks, first + (index + 1) * seq_len // chunks)


def _zigzag(rank: int, first: int, stop: int, size: int) -> list[range]:
    """Return chunks `rank` and 2 * size - 1 - `rank` of 2 * size: all ranks have the same causal work."""
    return [_chunk(index, stop - first, 2 * size, first) for index in (rank, 2 * size - 1 - rank)]


def _per_document(seq_len: int, size: int, masks: Sequence[Mask]) -> list[list[range]]:
    """Shard every document in zigzag over all ranks; padding counts as a document.

    Remaining tokens go to the ranks with fewest rows, so that blocks differ by at most one row.
    """
    starts = list(masks[0].documents or (0,)) if masks else [0]
    if masks and masks[0].seq_len < seq_len:
        starts.append(masks[0].seq_len)
    segments: list[list[range]] = [[] for _ in range(size)]
    rows = np.zeros(size, dtype=np.int64)
    for start, stop in zip(starts, [*starts[1:], seq_len], strict=True):
        base, extra = divmod(stop - start, 2 * size)
        fewest_first = np.argsort(rows, kind="stable")
        counts = np.full(2 * size, base, dtype=np.int64)
        # The second half first: if only some ranks get a token, they get it in their mirrored chunk.
        counts[2 * size - 1 - fewest_first[: min(extra, size)]] += 1
        counts[fewest_first[: max(0, extra - size)]] += 1
        edges = (start + np.concatenate([[0], np.cumsum(counts)])).tolist()
        for chunk in np.flatnonzero(counts).tolist():
            rank = min(chunk, 2 * size - 1 - chunk)
            segments[rank].append(range(edges[chunk], edges[chunk + 1]))
        rows += counts[:size] + counts[: size - 1 : -1]
    return segments


def _merged(segments: Sequence[range]) -> tuple[range, ...]:
    """Return the same positions without empty segments and with adjacent segments joined."""
    merged: list[range] = []
    for segment in filter(len, segments):
        if merged and merged[-1][-1] + segment.step == segment.start:
            merged[-1] = range(merged[-1].start, segment.stop, segment.step)
        else:
            merged.append(segment)
    return tuple(merged)
