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
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.config.settings import LayoutName
from engine.planning.sequence.balance import balanced_ranges

if TYPE_CHECKING:
    from engine.planning.sequence.mask import Mask


@dataclass(frozen=True)
class Segment:
    """Positions start, start + stride, ... (`count` of them)."""

    start: int
    stride: int
    count: int

    @property
    def last(self) -> int:
        """Its last position."""
        return self.start + self.stride * (self.count - 1)

    def part(self, first: int, stop: int) -> Segment:
        """Rows [first, stop) of this segment."""
        return Segment(self.start + self.stride * first, self.stride, stop - first)


@dataclass(frozen=True)
class Layout:
    """Assignment of positions 0 .. seq_len-1 to `size` ranks; blocks may differ in length."""

    name: LayoutName
    seq_len: int
    segments: tuple[tuple[Segment, ...], ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.segments)

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """Number of tokens on every rank."""
        return tuple(sum(segment.count for segment in segments) for segments in self.segments)

    def rows(self, rank: int) -> int:
        """Number of tokens on `rank`."""
        return self.row_counts[rank]

    def rows_before(self, rank: int, position: int) -> int:
        """How many rows of `rank` lie before a position; they are its first rows, because rows ascend in position."""
        return int(np.searchsorted(self.positions(rank), position))

    def positions(self, rank: int) -> npt.NDArray[np.int64]:
        """Global positions [rows] of `rank`, in local order."""
        parts = [s.start + s.stride * np.arange(s.count, dtype=np.int64) for s in self.segments[rank]]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def build_layout(
    name: LayoutName, seq_len: int, size: int, *, masks: Sequence[Mask] = (), chunks: int = 1, split_at: int = 0
) -> Layout:
    """Layout of `seq_len` positions on `size` ranks; lengths that do not divide give unequal blocks.

    masks      one per layer, repetitions welcome: per_document takes their documents, balanced their visible pairs
    chunks     chunks per rank of chunk_cyclic: chunk i of rank p is the global sub-chunk i * size + p
    split_at   border between the two zigzags of split_zigzag: causal attention is balanced, and so is that of the
               queries before the border alone. 0 or seq_len: one zigzag
    """
    segments: Sequence[Sequence[Segment]]
    if name in ("contiguous", "chunk_cyclic"):
        segments = [
            [_chunk(index * size + rank, seq_len, chunks * size) for index in range(chunks)] for rank in range(size)
        ]
    elif name in ("zigzag", "split_zigzag"):
        segments = [
            [*_zigzag(rank, 0, split_at, size), *_zigzag(rank, split_at, seq_len, size)] for rank in range(size)
        ]
    elif name == "striped":
        segments = [[Segment(rank, size, max(0, (seq_len - rank + size - 1) // size))] for rank in range(size)]
    elif name == "per_document":
        segments = _per_document(seq_len, size, masks)
    else:
        ranges = balanced_ranges(masks, seq_len, size)
        segments = [[Segment(start, 1, stop - start) for start, stop in of_rank] for of_rank in ranges]
    return Layout(name, seq_len, tuple(_merged(of_rank) for of_rank in segments))


def piece_rows(total_rows: int, heads: int, chunks: int, head_rank: int, chunk: int) -> tuple[int, int]:
    """Rows [start, stop) of a ring rank that head rank `head_rank` holds of chunk `chunk` before the head exchange.

    total_rows=10, heads=2, chunks=2      head rank 0: [0, 2) [5, 7)      head rank 1: [2, 5) [7, 10)
    """
    first, stop = chunk * total_rows // chunks, (chunk + 1) * total_rows // chunks
    rows = stop - first
    return first + head_rank * rows // heads, first + (head_rank + 1) * rows // heads


def split_for_heads(layout: Layout, heads: int, chunks: int = 1) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
    """Segments [ring rank][head rank] that each rank holds outside attention, when `heads` ranks share a ring rank.

    Every ring rank's rows are cut into `chunks` pieces and each of these into `heads` pieces (`piece_rows`); a head
    rank holds its pieces of all chunks in order. The exchange of a chunk over the head ranks so yields consecutive
    rows of the ring rank's block.
    """
    return tuple(
        tuple(
            _merged(
                [
                    part
                    for chunk in range(chunks)
                    for part in _rows_of(segments, *piece_rows(layout.rows(rank), heads, chunks, head_rank, chunk))
                ]
            )
            for head_rank in range(heads)
        )
        for rank, segments in enumerate(layout.segments)
    )


def chunk_layout(layout: Layout, chunks: int) -> Layout:
    """Every chunk of every rank's rows as a block of its own: that of rank r and chunk c is number r * chunks + c."""
    segments = tuple(
        tuple(_rows_of(own, *piece_rows(layout.rows(rank), 1, chunks, 0, chunk)))
        for rank, own in enumerate(layout.segments)
        for chunk in range(chunks)
    )
    return Layout(layout.name, layout.seq_len, segments)


def _rows_of(segments: Sequence[Segment], first: int, stop: int) -> list[Segment]:
    """Rows [first, stop) of a list of segments."""
    parts = []
    for segment in segments:
        low, high = max(0, first), min(segment.count, stop)
        if low < high:
            parts.append(segment.part(low, high))
        first, stop = first - segment.count, stop - segment.count
    return parts


def _chunk(index: int, seq_len: int, chunks: int, first: int = 0) -> Segment:
    """Number `index` of the chunks of positions [first, first + seq_len)."""
    start, stop = index * seq_len // chunks, (index + 1) * seq_len // chunks
    return Segment(first + start, 1, stop - start)


def _zigzag(rank: int, first: int, stop: int, size: int) -> list[Segment]:
    """Chunk `rank` and its mirror image among the 2*size of positions [first, stop): every rank gets the same causal
    work.
    """
    return [_chunk(index, stop - first, 2 * size, first) for index in (rank, 2 * size - 1 - rank)]


def _per_document(seq_len: int, size: int, masks: Sequence[Mask]) -> list[list[Segment]]:
    """Every document in zigzag over all ranks; tokens left over go to the ranks that have fewest, so that blocks differ
    by at most one row. Padding counts as one more document.
    """
    starts = list(masks[0].documents or (0,)) if masks else [0]
    if masks and masks[0].seq_len < seq_len:
        starts.append(masks[0].seq_len)
    segments: list[list[Segment]] = [[] for _ in range(size)]
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
            segments[rank].append(Segment(edges[chunk], 1, edges[chunk + 1] - edges[chunk]))
        rows += counts[:size] + counts[: size - 1 : -1]
    return segments


def _merged(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The same positions with empty segments dropped and neighbours joined."""
    merged: list[Segment] = []
    for segment in segments:
        if segment.count == 0:
            continue
        last = merged[-1] if merged else None
        if last and last.stride == segment.stride and last.start + last.stride * last.count == segment.start:
            merged[-1] = Segment(last.start, last.stride, last.count + segment.count)
        else:
            merged.append(segment)
    return tuple(merged)
