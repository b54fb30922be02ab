"""Which rows of a block other ranks need, and how to halve a block's own work. Plain integers and numpy.

A rank that plans for itself alone must know how far every block travels, hence what every pair of ranks shares: that
table is computed at once here, where bands pair by pair would take seconds for hundreds of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.attention.allocate import Rows
from engine.attention.layout import Layout
from engine.attention.mask import Band, Visibility, normalise
from engine.errors import PlanError

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Operand = Literal["kv", "q"]

NOWHERE = 1 << 40  # a row that no block has
LARGEST_BATCH = 1 << 20  # pairs of segments that are looked at together: some hundred MB


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


class RowTable(NamedTuple):
    """Ranges [start, stop) of rows, one per entry of two arrays of any shape; an empty one starts at NOWHERE and stops
    at 0, so that minimum and maximum are the hull.
    """

    start: Integers
    stop: Integers

    @property
    def exists(self) -> Flags:
        """Which ranges have rows."""
        return self.start < self.stop

    def rows(self, *index: int) -> Rows:
        """One of the ranges."""
        return Rows(int(self.start[index]), int(self.stop[index]))

    def where(self, chosen: Flags) -> RowTable:
        """The chosen ranges; the others are empty."""
        return RowTable(np.where(chosen, self.start, NOWHERE), np.where(chosen, self.stop, 0))

    def hull(self, axis: int) -> RowTable:
        """Hull of all ranges along an axis."""
        return RowTable(self.start.min(axis), self.stop.max(axis))

    def up_to_here(self, axis: int) -> RowTable:
        """For every range the hull of it and all before it along an axis."""
        return RowTable(np.minimum.accumulate(self.start, axis), np.maximum.accumulate(self.stop, axis))

    def from_here_on(self, axis: int) -> RowTable:
        """For every range the hull of it and all behind it along an axis."""
        turned = RowTable(np.flip(self.start, axis), np.flip(self.stop, axis)).up_to_here(axis)
        return RowTable(np.flip(turned.start, axis), np.flip(turned.stop, axis))


def needed_rows(
    visibility: Visibility,
    operand: Operand,
    *,
    blocks: Collection[int],
    readers: Collection[int],
    whole_blocks: bool = False,
) -> RowTable:
    """Rows [block, rank] that every rank needs of `blocks` and that `readers` need of every block, as keys ("kv") or as
    queries ("q"): the hull of the bands between them, or whole blocks if these are asked for. All else is empty.
    """
    layout = visibility.layout
    everybody, segments = range(layout.size), _Segments.of(layout)
    table = RowTable(np.full((layout.size,) * 2, NOWHERE), np.zeros((layout.size,) * 2, dtype=np.int64))
    for own, others in ((blocks, everybody), (set(everybody) - set(blocks), readers)):
        if whole_blocks:
            which, read = (np.array(list(ranks), dtype=np.int64) for ranks in (own, others))
            counts = np.array(layout.row_counts, dtype=np.int64)[which]
            pair = np.ix_(which[counts > 0], read)
            table.start[pair], table.stop[pair] = 0, counts[counts > 0][:, None]
            continue
        pair_of_segments = segments.of_ranks(own), segments.of_ranks(others)
        for ours, theirs, start, stop in _shared(*pair_of_segments, visibility.mask.pieces, operand):
            np.minimum.at(table.start, (ours.owner, theirs.owner), ours.offset + start)
            np.maximum.at(table.stop, (ours.owner, theirs.owner), ours.offset + stop)
    return table


class _Segments(NamedTuple):
    """Segments in ascending order of their first position, one array entry each."""

    start: Integers
    stride: Integers
    length: Integers
    owner: Integers  # rank
    offset: Integers  # row of the rank's block at which it begins

    @classmethod
    def of(cls, layout: Layout) -> _Segments:
        entries = [(s.start, s.stride, s.count) for own in layout.segments for s in own]
        start, stride, length = np.array(entries, dtype=np.int64).reshape(-1, 3).T
        owner = np.repeat(np.arange(layout.size), [len(own) for own in layout.segments])
        rows = np.array(layout.row_counts, dtype=np.int64)
        offset = np.cumsum(length) - length - (np.cumsum(rows) - rows)[owner]
        return cls(start, stride, length, owner, offset).taken(np.argsort(start, kind="stable"))

    def of_ranks(self, ranks: Collection[int]) -> _Segments:
        """Those of some ranks."""
        return self.taken(np.flatnonzero(np.isin(self.owner, list(ranks))))

    def taken(self, index: Integers) -> _Segments:
        """Some of the segments."""
        return _Segments(*(column[index] for column in self))

    def rows_between(self, low: Integers, high: Integers) -> tuple[Integers, Integers]:
        """As Segment.rows_between, entry by entry."""
        first = np.maximum(0, -((self.start - low) // self.stride))
        return first, np.minimum(self.length, -((self.start - high) // self.stride))

    def meeting(self, low: Integers, high: Integers) -> tuple[Integers, Integers]:
        """Of the segments that may share a position with each range: the first, and how many."""
        if bool((self.stride != 1).any()):
            return np.zeros(len(low), dtype=np.int64), np.full(len(low), len(self.start))
        first = np.maximum(0, np.searchsorted(self.start, low, side="right") - 1)
        return first, np.maximum(0, np.searchsorted(self.start, high, side="left") - first)


def _shared(
    own: _Segments, others: _Segments, pieces: Integers, operand: Operand
) -> Iterator[tuple[_Segments, _Segments, Integers, Integers]]:
    """(own, others, start, stop): rows [start, stop) of each own segment that the other one's owner needs of it."""
    keys_are_own = operand == "kv"
    bounds, (low, high) = ((2, 3), (0, 1)) if keys_are_own else ((0, 1), (2, 3))
    which, met = _listed(*own.meeting(*pieces[:, bounds].T))
    own, pieces = own.taken(met), pieces[which]
    # A segment sees, or is seen from, no further than the band reaches from its ends.
    before, behind = (pieces[:, 4], pieces[:, 5]) if keys_are_own else (-pieces[:, 5], -pieces[:, 4])
    pieces[:, low] = np.maximum(pieces[:, low], own.start + before)
    pieces[:, high] = np.minimum(pieces[:, high], own.start + own.stride * (own.length - 1) + behind + 1)
    first, count = others.meeting(pieces[:, low], pieces[:, high])
    batch = np.where(count > 0, np.cumsum(count) // LARGEST_BATCH, -1)
    for number in range(int(batch.max(initial=-1)) + 1):
        part = np.flatnonzero(batch == number)
        which, met = _listed(first[part], count[part])
        ours, theirs, rules = own.taken(part[which]), others.taken(met), pieces[part[which]]
        mine, other_rows = ours.rows_between(*rules[:, bounds].T), theirs.rows_between(rules[:, low], rules[:, high])
        shared = (mine[0] < mine[1]) & (other_rows[0] < other_rows[1])
        start, stop = _visible(rules[:, 4:], (ours, mine), (theirs, other_rows), keys_are_own=keys_are_own)
        seen = np.flatnonzero(shared & (start < stop))
        yield ours.taken(seen), theirs.taken(seen), (mine[0] + start)[seen], (mine[0] + stop)[seen]


def _listed(first: Integers, count: Integers) -> tuple[Integers, Integers]:
    """(i, n) for every n of first[i], first[i] + 1, ... (count[i] of them)."""
    which = np.repeat(np.arange(len(count)), count)
    return which, np.arange(len(which)) - (np.cumsum(count) - count - first)[which]


def _visible(
    limits: Integers,
    own: tuple[_Segments, tuple[Integers, Integers]],
    other: tuple[_Segments, tuple[Integers, Integers]],
    *,
    keys_are_own: bool,
) -> tuple[Integers, Integers]:
    """Of every pair of progressions, the own rows [start, stop) that share a visible pair with the other's.

    Between progressions of one stride a piece of the mask is a band low <= i - j <= high; what a band leaves of
    either side is a range.
    """
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
