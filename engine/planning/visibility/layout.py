"""Layouts: which global positions every rank holds, as lists of arithmetic progressions.

    seq_len=8, size=2             rank 0            rank 1
    contiguous                    0 1 2 3           4 5 6 7
    zigzag                        0 1 | 6 7         2 3 | 4 5
    striped                       0 2 4 6           1 3 5 7
    chunk_cyclic, 2 chunks        0 1 | 4 5         2 3 | 6 7
    per_document, starts 0 and 4  0 3 | 4 7         1 2 | 5 6
    balanced                      whatever gives equal tokens and equal work under the masks
    split_zigzag, split at 4      0 3 | 4 7         1 2 | 5 6

Plain integers: a layout is made and tested without torch or a process group. Tokens, labels and positions must all be
permuted by the same layout, labels after they were shifted.
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
    """Assignment of positions 0 .. seq_len-1 to `size` ranks; blocks may differ in length.

    All segments have the same step.
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
        """How many rows of `rank` lie before a position; they are its first rows, because rows ascend in position."""
        return sum(len(range(s.start, min(s.stop, position), s.step)) for s in self.segments[rank])

    def positions(self, rank: int) -> npt.NDArray[np.int64]:
        """Global positions [rows] of `rank`, in local order."""
        return np.concatenate([np.arange(0), *(np.arange(s.start, s.stop, s.step) for s in self.segments[rank])])


def build_layout(
    name: LayoutName, seq_len: int, size: int, *, masks: Sequence[Mask] = (), chunks: int = 1, split_at: int = 0
) -> Layout:
    """Layout of `seq_len` positions on `size` ranks; lengths that do not divide give unequal blocks.

    masks      one per layer, repetitions welcome: per_document takes their documents, balanced their visible pairs
    chunks     chunks per rank of chunk_cyclic: chunk i of rank p is the global sub-chunk i * size + p
    split_at   border between the two zigzags of split_zigzag: causal attention is balanced, and so is that of the
               queries before the border alone. 0 or seq_len: one zigzag
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
    """Rows [start, stop) of a ring rank that head rank `head_rank` holds of chunk `chunk` before the head exchange.

    total_rows=10, heads=2, chunks=2      head rank 0: [0, 2) [5, 7)      head rank 1: [2, 5) [7, 10)
    """
    first, stop = chunk * total_rows // chunks, (chunk + 1) * total_rows // chunks
    rows = stop - first
    return first + head_rank * rows // heads, first + (head_rank + 1) * rows // heads


def split_for_heads(layout: Layout, heads: int, chunks: int = 1) -> tuple[tuple[tuple[range, ...], ...], ...]:
    """Segments [ring rank][head rank] that each rank holds outside attention, when `heads` ranks share a ring rank.

    Every ring rank's rows are cut into `chunks` pieces and each of these into `heads` pieces (`shard_rows`); a head
    rank holds its pieces of all chunks in order. The exchange of a chunk over the head ranks so yields consecutive
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
    """Rows [first, stop) of a list of segments."""
    parts = []
    for segment in segments:
        parts.append(segment[max(0, first) : max(0, stop)])
        first, stop = first - len(segment), stop - len(segment)
    return parts


def _chunk(index: int, seq_len: int, chunks: int, first: int = 0) -> range:
    """Number `index` of the chunks of positions [first, first + seq_len)."""
    return range(first + index * seq_len // chunks, first + (index + 1) * seq_len // chunks)


def _zigzag(rank: int, first: int, stop: int, size: int) -> list[range]:
    """Chunk `rank` and its mirror image among the 2*size of positions [first, stop): every rank gets the same causal
    work.
    """
    return [_chunk(index, stop - first, 2 * size, first) for index in (rank, 2 * size - 1 - rank)]


def _per_document(seq_len: int, size: int, masks: Sequence[Mask]) -> list[list[range]]:
    """Every document in zigzag over all ranks; tokens left over go to the ranks that have fewest, so that blocks differ
    by at most one row. Padding counts as one more document.
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
        # the second half first: where only few ranks get a token, they get it in the mirrored chunk
        counts[2 * size - 1 - fewest_first[: min(extra, size)]] += 1
        counts[fewest_first[: max(0, extra - size)]] += 1
        edges = (start + np.concatenate([[0], np.cumsum(counts)])).tolist()
        for chunk in np.flatnonzero(counts).tolist():
            rank = min(chunk, 2 * size - 1 - chunk)
            segments[rank].append(range(edges[chunk], edges[chunk + 1]))
        rows += counts[:size] + counts[: size - 1 : -1]
    return segments


def _merged(segments: Sequence[range]) -> tuple[range, ...]:
    """The same positions with empty segments dropped and neighbours joined."""
    merged: list[range] = []
    for segment in filter(len, segments):
        if merged and merged[-1][-1] + segment.step == segment.start:
            merged[-1] = range(merged[-1].start, segment.stop, segment.step)
        else:
            merged.append(segment)
    return tuple(merged)
