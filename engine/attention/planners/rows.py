"""Which rows of a block other ranks need, and how to halve a block's own work. Plain integers and numpy.

A rank that plans for itself alone must know how far every block travels, hence what every pair of ranks shares: whole
columns of that table are computed at once here, where bands pair by pair would take seconds for hundreds of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.attention.allocate import Rows
from engine.attention.layout import Layout, Segment
from engine.attention.mask import Band, Visibility, normalise
from engine.errors import PlanError

Integers = npt.NDArray[np.int64]
Operand = Literal["kv", "q"]


def hull(rows: Iterable[Rows | None]) -> Rows | None:
    """Smallest range that contains all; None when there is nothing to contain."""
    total: Rows | None = None
    for item in rows:
        total = item.hull(total) if item else total
    return total


def needed_of(bands: Iterable[Band], operand: Operand) -> Rows | None:
    """Rows of one operand that the bands touch, as one range."""
    if operand == "kv":
        return hull(Rows(band.k_start, band.k_stop) for band in bands)
    return hull(Rows(band.q_start, band.q_stop) for band in bands)


def bands_between(visibility: Visibility, q_rank: int, kv_rank: int, planned: Collection[int]) -> tuple[Band, ...]:
    """As `visibility.bands`, which works out all that a rank's queries see; if not planned for, one pair."""
    if q_rank in planned:
        return visibility.bands(q_rank, kv_rank)
    layout = visibility.layout
    pair = tuple(layout.segments[rank] for rank in dict.fromkeys((q_rank, kv_rank)))
    return Visibility(visibility.mask, Layout(layout.name, layout.seq_len, pair)).bands(0, len(pair) - 1)


class _Table(NamedTuple):
    """Segments of all ranks in ascending order of their first position, one array entry each."""

    start: Integers
    stride: Integers
    length: Integers
    owner: Integers  # rank

    def taken(self, index: Integers) -> _Table:
        """Some of the segments."""
        return _Table(*(column[index] for column in self))

    def rows_between(self, low: Integers, high: Integers) -> tuple[Integers, Integers]:
        """As Segment.rows_between, entry by entry."""
        first = np.maximum(0, -((self.start - low) // self.stride))
        return first, np.minimum(self.length, -((self.start - high) // self.stride))


class NeededRows:
    """Rows of a block that every rank needs, as keys ("kv") or as queries ("q"): the hull of the bands between them."""

    def __init__(self, visibility: Visibility, operand: Operand) -> None:
        self._visibility = visibility
        self._operand: Operand = operand
        layout = visibility.layout
        entries = sorted((s.start, s.stride, s.count, rank) for rank, own in enumerate(layout.segments) for s in own)
        self._segments = _Table(*np.array(entries, dtype=np.int64).reshape(-1, 4).T)
        self._is_dense = bool((self._segments.stride == 1).all())

    def of(self, home: int) -> list[Rows | None]:
        """By rank: what it needs of the block of `home`."""
        layout = self._visibility.layout
        first, last = np.full(layout.size, layout.seq_len), np.zeros(layout.size, dtype=np.int64)
        offset = 0
        for segment in layout.segments[home]:
            self._widen(segment, offset, first, last)
            offset += segment.count
        return [Rows(a, b) if a < b else None for a, b in zip(first.tolist(), last.tolist(), strict=True)]

    def _widen(self, own: Segment, offset: int, first: Integers, last: Integers) -> None:
        """Widen [first, last) of every rank by its needs of one segment of the block, which lies at row `offset`."""
        pieces = self._visibility.mask.pieces
        own_bounds, other_bounds = ((2, 3), (0, 1)) if self._operand == "kv" else ((0, 1), (2, 3))
        pieces = pieces[(pieces[:, own_bounds[0]] <= own.last) & (pieces[:, own_bounds[1]] > own.start)]
        which, met = self._met(pieces[:, other_bounds[0]], pieces[:, other_bounds[1]])
        pieces, others = pieces[which], self._segments.taken(met)
        ours = _Table(*(np.full(len(met), x) for x in (own.start, own.stride, own.count, 0)))
        mine = ours.rows_between(pieces[:, own_bounds[0]], pieces[:, own_bounds[1]])
        theirs = others.rows_between(pieces[:, other_bounds[0]], pieces[:, other_bounds[1]])
        shared = (mine[0] < mine[1]) & (theirs[0] < theirs[1])
        start, stop = self._visible(pieces[:, 4:], (ours, mine), (others, theirs))
        seen = np.flatnonzero(shared & (start < stop))
        begin = mine[0] + offset
        np.minimum.at(first, others.owner[seen], (start + begin)[seen])
        np.maximum.at(last, others.owner[seen], (stop + begin)[seen])

    def _met(self, low: Integers, high: Integers) -> tuple[Integers, Integers]:
        """(index of the range, index of the segment) of every pair that may share a position."""
        total = len(self._segments.start)
        if self._is_dense:
            begin = np.maximum(0, np.searchsorted(self._segments.start, low, side="right") - 1)
            end = np.searchsorted(self._segments.start, high, side="left")
        else:
            begin, end = np.zeros(len(low), dtype=np.int64), np.full(len(low), total)
        counts = np.maximum(0, end - begin)
        before = np.cumsum(counts) - counts
        which = np.repeat(np.arange(len(low)), counts)
        return which, np.arange(len(which)) - before[which] + begin[which]

    def _visible(
        self,
        limits: Integers,
        own: tuple[_Table, tuple[Integers, Integers]],
        other: tuple[_Table, tuple[Integers, Integers]],
    ) -> tuple[Integers, Integers]:
        """Of every pair of progressions, the own rows [start, stop) that share a visible pair with the other's.

        Between progressions of one stride a piece of the mask is a band low <= i - j <= high; what a band leaves of
        either side is a range.
        """
        keys_are_own = self._operand == "kv"
        (q, q_rows), (k, k_rows) = (other, own) if keys_are_own else (own, other)
        queries, keys = q_rows[1] - q_rows[0], k_rows[1] - k_rows[0]
        if bool(((queries > 1) & (keys > 1) & (q.stride != k.stride)).any()):
            raise PlanError("needed rows: segments of different strides have no common band; use one layout for both")
        stride = np.where(queries > 1, q.stride, k.stride)
        base = (q.start + q.stride * q_rows[0]) - (k.start + k.stride * k_rows[0])
        low, high = -((base - limits[:, 0]) // stride), (limits[:, 1] - base) // stride
        if keys_are_own:
            start, stop = np.maximum(0, -high), np.minimum(keys, queries - low)
        else:
            start, stop = np.maximum(0, low), np.minimum(queries, high + keys)
        return start, np.where(low <= high, stop, start)


def halves(bands: Sequence[Band]) -> tuple[list[Band], list[Band]]:
    """The same visibility as two lists with half of the pairs each, the first rows of the queries in the first."""
    if not bands:
        return [], []
    per_row = np.zeros(max(band.q_stop for band in bands), dtype=np.int64)
    for band in bands:
        row = np.arange(band.num_queries)
        stop = row + 1 - band.low if band.low is not None else band.num_keys
        start = row - band.high if band.high is not None else 0
        per_row[band.q_start : band.q_stop] += np.minimum(band.num_keys, stop) - np.maximum(0, start)
    pairs = np.cumsum(per_row)
    cut = int(np.searchsorted(pairs, pairs[-1] / 2)) + 1
    return [part for band in bands for part in _above(band, cut)], [
        part for band in bands for part in _below(band, cut)
    ]


def _above(band: Band, cut: int) -> list[Band]:
    stop = min(band.q_stop, cut)
    if stop <= band.q_start:
        return []
    return normalise(Band(band.q_start, stop, band.k_start, band.k_stop, band.low, band.high))


def _below(band: Band, cut: int) -> list[Band]:
    start = max(band.q_start, cut)
    if start >= band.q_stop:
        return []
    skipped = start - band.q_start
    low = None if band.low is None else band.low - skipped
    high = None if band.high is None else band.high - skipped
    return normalise(Band(start, band.q_stop, band.k_start, band.k_stop, low, high))
