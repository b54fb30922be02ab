"""Layouts: which global positions every rank holds, as lists of arithmetic progressions.

    seq_len=8, size=2      rank 0            rank 1
    contiguous             0 1 2 3           4 5 6 7
    zigzag                 0 1 | 6 7         2 3 | 4 5
    striped                0 2 4 6           1 3 5 7

Plain integers: a layout is made and tested without torch or a process group. Tokens, labels and positions must all be
permuted by the same layout, labels after they were shifted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from engine.config import LayoutName
from engine.errors import ConfigError


@dataclass(frozen=True)
class Segment:
    """Positions start, start + stride, ... (`count` of them)."""

    start: int
    stride: int
    count: int

    def rows_between(self, low: int, high: int) -> tuple[int, int]:
        """Rows [first, last) of this segment whose positions lie in [low, high)."""
        first = max(0, -((self.start - low) // self.stride))
        last = min(self.count, -((self.start - high) // self.stride))
        return first, max(first, last)


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

    def positions(self, rank: int) -> npt.NDArray[np.int64]:
        """Global positions [rows] of `rank`, in local order."""
        parts = [s.start + s.stride * np.arange(s.count, dtype=np.int64) for s in self.segments[rank]]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def build_layout(name: LayoutName, seq_len: int, size: int) -> Layout:
    """Layout of `seq_len` positions on `size` ranks; lengths that do not divide give unequal blocks."""
    if seq_len < 1 or size < 1:
        raise ConfigError(f"layout {name}: got seq_len={seq_len} on {size} ranks; both must be at least 1")
    builders = {"contiguous": _contiguous, "zigzag": _zigzag, "striped": _striped}
    if name not in builders:
        raise ConfigError(f"layout: got {name!r}; legal are {', '.join(builders)}")
    segments = tuple(_merged(builders[name](rank, seq_len, size)) for rank in range(size))
    return Layout(name, seq_len, segments)


def _chunk(index: int, seq_len: int, chunks: int) -> Segment:
    start, stop = index * seq_len // chunks, (index + 1) * seq_len // chunks
    return Segment(start, 1, stop - start)


def _contiguous(rank: int, seq_len: int, size: int) -> list[Segment]:
    return [_chunk(rank, seq_len, size)]


def _zigzag(rank: int, seq_len: int, size: int) -> list[Segment]:
    """Chunk `rank` and its mirror image among 2*size chunks: every rank gets the same causal work."""
    return [_chunk(rank, seq_len, 2 * size), _chunk(2 * size - 1 - rank, seq_len, 2 * size)]


def _striped(rank: int, seq_len: int, size: int) -> list[Segment]:
    return [Segment(rank, size, max(0, (seq_len - rank + size - 1) // size))]


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
