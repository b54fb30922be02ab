"""Visibility between the blocks of a layout under a mask, in rank-local rows: bands, and the rows that are needed.

Blocks are segments (arithmetic progressions of positions); a mask is a table of rectangles with bands. All segments
that overlap in a rectangle are found together, for one block against all or for all pairs: to plan its part a rank
must know how far every block moves, hence the visibility of every pair of ranks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.planning.visibility.layout import Layout, split_for_heads
from engine.planning.visibility.mask import UNBOUNDED, Band, Mask, listed, normalise

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Operand = Literal["kv", "q"]

NOWHERE = 1 << 40  # larger than any row
LARGEST_BATCH = 1 << 15  # pairs of segments processed together, so that their columns stay in cache


class RowRanges(NamedTuple):
    """Ranges [start, stop) of rows, one per entry of two arrays of any shape.

    An empty range starts at NOWHERE and stops at 0, so that minimum and maximum give the hull.
    """

    start: Integers
    stop: Integers

    @property
    def exists(self) -> Flags:
        """Which ranges have rows."""
        return self.start < self.stop

    def where(self, chosen: Flags) -> RowRanges:
        """The chosen ranges; the others are empty."""
        return RowRanges(np.where(chosen, self.start, NOWHERE), np.where(chosen, self.stop, 0))

    def hull(self, axis: int) -> RowRanges:
        """Return the hull of all ranges along an axis."""
        return RowRanges(self.start.min(axis), self.stop.max(axis))

    def up_to_here(self, axis: int) -> RowRanges:
        """Return for every range the hull of it and all before it along an axis."""
        return RowRanges(np.minimum.accumulate(self.start, axis), np.maximum.accumulate(self.stop, axis))

    def from_here_on(self, axis: int) -> RowRanges:
        """Return for every range the hull of it and all after it along an axis."""
        flipped = RowRanges(np.flip(self.start, axis), np.flip(self.stop, axis)).up_to_here(axis)
        return RowRanges(np.flip(flipped.start, axis), np.flip(flipped.stop, axis))


class Visibility:
    """Bands between the blocks of any two ranks under one mask and layout, in rank-local rows."""

    def __init__(self, mask: Mask, layout: Layout) -> None:
        self.mask = mask
        self.layout = layout
        self._segments = _Segments.of(layout)
        self._bands: dict[tuple[Operand, int], dict[int, tuple[Band, ...]]] = {}
        self._needed: dict[tuple[object, ...], RowRanges] = {}
        self._of_chunks: dict[int, Visibility] = {}

    def of_chunks(self, chunks: int) -> Visibility:
        """Return the visibility between chunks of the blocks; chunk c of rank r is block r * chunks + c."""
        if chunks == 1:
            return self
        if chunks not in self._of_chunks:
            segments = tuple(itertools.chain(*split_for_heads(self.layout, chunks)))
            self._of_chunks[chunks] = Visibility(self.mask, Layout(segments))
        return self._of_chunks[chunks]

    def bands(self, q_rank: int, kv_rank: int, *, of: Operand = "q") -> tuple[Band, ...]:
        """Return the bands between queries of `q_rank` and keys of `kv_rank`; they cover each visible pair once.

        of   compute and cache the bands of all keys for these queries ("q"), or of all queries for these keys ("kv")
        """
        rank, other = (q_rank, kv_rank) if of == "q" else (kv_rank, q_rank)
        if (of, rank) not in self._bands:
            by_rank = self._bands_of(of, rank)
            self._bands[of, rank] = {peer: tuple(_joined(bands)) for peer, bands in by_rank.items()}
        return self._bands[of, rank].get(other, ())

    def needed(self, operand: Operand, *, blocks: Collection[int], readers: Collection[int]) -> RowRanges:
        """Return the rows [block, rank] of each block that each rank needs: the hull of the bands between them.

        Args:
            operand: Rows of the blocks as keys and values ("kv") or as queries ("q").
            blocks: Blocks for which the rows of all ranks are computed.
            readers: Ranks for which the rows of all blocks are computed. All other entries are empty.
        """
        key = operand, frozenset(blocks), frozenset(readers)
        if key not in self._needed:
            self._needed[key] = self._rows_needed(operand, blocks, readers)
        return self._needed[key]

    def _rows_needed(self, operand: Operand, blocks: Collection[int], readers: Collection[int]) -> RowRanges:
        size = self.layout.size
        table = RowRanges(np.full(size * size, NOWHERE), np.zeros(size * size, dtype=np.int64))
        for local, others in ((blocks, range(size)), (set(range(size)) - set(blocks), readers)):
            for bands in self._shared(operand, local, others):
                start, stop = (bands.k_start, bands.k_stop) if operand == "kv" else (bands.q_start, bands.q_stop)
                block, reader = (bands.k_rank, bands.q_rank) if operand == "kv" else (bands.q_rank, bands.k_rank)
                pair = block * size + reader  # a flat index: ufunc.at is fifty times slower with two
                np.minimum.at(table.start, pair, start)
                np.maximum.at(table.stop, pair, stop)
        return RowRanges(table.start.reshape(size, size), table.stop.reshape(size, size))

    def _bands_of(self, of: Operand, rank: int) -> dict[int, list[Band]]:
        batches = zip(*self._shared(of, (rank,), range(self.layout.size)), strict=True)
        columns = [np.concatenate(column) for column in batches]
        if not columns:
            return {}
        bands, squares = self._diagonal_squares(rank, _Bands(*columns))
        found = defaultdict(list, {rank: squares})
        others = bands.k_rank if of == "q" else bands.q_rank
        for other, *rows in zip(others.tolist(), *(column.tolist() for column in bands[3:]), strict=True):
            found[other] += normalise(Band(*rows))
        return found

    def _diagonal_squares(self, rank: int, bands: _Bands) -> tuple[_Bands, list[Band]]:
        """Replace the bands within a rank's rows of a causal document by one causal band per document.

        That is valid for any segments, since a rank's rows ascend in position. Returns the remaining and the new bands.
        """
        mask, local = self.mask, self._segments.of_ranks((rank,))
        if not mask.causal or mask.blocks is not None:
            return bands, []
        starts = np.array(mask.documents or (0,), dtype=np.int64)
        stops = np.append(starts[1:], mask.seq_len)
        rules = mask.rectangles[bands.rectangle]
        document = np.searchsorted(starts, rules[:, 0], "right") - 1
        whole = (bands.q_rank == bands.k_rank) & (rules[:, 5] == UNBOUNDED)
        if mask.window is not None:
            whole &= stops[document] - starts[document] <= mask.window
        which = np.unique(document[whole])
        # Rows after the mask's query_stop see nothing, and no earlier row sees them.
        ends = stops[which] if mask.query_stop is None else np.minimum(stops[which], mask.query_stop)
        pairs = zip(local.rows_before(starts[which]).tolist(), local.rows_before(ends).tolist(), strict=True)
        squares = [Band(a, b, a, b, low=0 if b - a > 1 else -UNBOUNDED) for a, b in pairs if a < b]
        return bands.taken(np.flatnonzero(~whole)), squares

    def _shared(self, of: Operand, local: Collection[int], others: Collection[int]) -> Iterator[_Bands]:
        """Yield bands between the queries (of="q") or keys of ranks `local` and the other operand of `others`."""
        ours, theirs = self._segments.of_ranks(local), self._segments.of_ranks(others)
        columns = self.mask.rectangles.T
        bounds, others_bounds = (columns[:2], columns[2:4]) if of == "q" else (columns[2:4], columns[:2])
        rule, met = listed(*ours.meeting(*bounds))
        ours = ours.taken(met).between(*bounds[:, rule])
        start, stop, low, high = (column[rule] for column in (*others_bounds, *columns[4:]))
        # A segment sees, or is seen from, only positions within the band around its ends.
        before, behind = (-high, -low) if of == "q" else (low, high)
        start = np.maximum(start, ours.start + before)
        stop = np.minimum(stop, ours.start + ours.stride * (ours.length - 1) + behind + 1)
        first, count = theirs.meeting(start, stop)
        batch = np.where(count > 0, np.cumsum(count) // LARGEST_BATCH, -1)
        for number in range(int(batch.max(initial=-1)) + 1):
            part = np.flatnonzero(batch == number)
            which, met = listed(first[part], count[part])
            entry = part[which]
            pair = ours.taken(entry), theirs.taken(met).between(start[entry], stop[entry])
            yield _bands_between(*(pair if of == "q" else pair[::-1]), rule[entry], low[entry], high[entry])


class _Bands(NamedTuple):
    """Bands as columns: ranks, index of the mask's rectangle, rows of both blocks, and low <= i - j <= high."""

    q_rank: Integers
    k_rank: Integers
    rectangle: Integers
    q_start: Integers
    q_stop: Integers
    k_start: Integers
    k_stop: Integers
    low: Integers
    high: Integers

    def taken(self, index: Integers) -> _Bands:
        """Some of them."""
        return _Bands(*(column[index] for column in self))


class _Segments(NamedTuple):
    """Segments as columns, in ascending order of their first position."""

    stride: int  # of all
    start: Integers
    length: Integers
    owner: Integers  # rank
    offset: Integers  # first row in the rank's block

    @classmethod
    def of(cls, layout: Layout) -> _Segments:
        entries = [(s.start, len(s), s.step) for segments in layout.segments for s in segments]
        start, length, steps = np.array(entries, dtype=np.int64).reshape(-1, 3).T
        owner = np.repeat(np.arange(layout.size), [len(segments) for segments in layout.segments])
        rows = np.array(layout.row_counts, dtype=np.int64)
        offset = np.cumsum(length) - length - (np.cumsum(rows) - rows)[owner]
        return cls(int(steps.max(initial=1)), start, length, owner, offset).taken(np.argsort(start, kind="stable"))

    def of_ranks(self, ranks: Collection[int]) -> _Segments:
        """Those of some ranks."""
        return self.taken(np.flatnonzero(np.isin(self.owner, list(ranks))))

    def taken(self, index: Integers) -> _Segments:
        """Some of the segments."""
        return _Segments(self.stride, *(column[index] for column in self[1:]))

    def rows_before(self, positions: Integers) -> Integers:
        """Return the number of rows before each position, for segments of one rank."""
        which = np.maximum(0, np.searchsorted(self.start, positions) - 1)
        inside = -((self.start[which] - positions) // self.stride)
        before: Integers = self.offset[which] + np.clip(inside, 0, self.length[which])
        return before

    def between(self, low: Integers, high: Integers) -> _Segments:
        """Return the part of each segment at positions [low, high); its length may be negative."""
        first = np.maximum(0, -_divided(self.start - low, self.stride))
        length = np.minimum(self.length, -_divided(self.start - high, self.stride)) - first
        return _Segments(self.stride, self.start + self.stride * first, length, self.owner, self.offset + first)

    def meeting(self, low: Integers, high: Integers) -> tuple[Integers, Integers]:
        """Return for each range the first segment that may overlap it, and the number of such segments."""
        if self.stride != 1:
            return np.zeros(len(low), dtype=np.int64), np.full(len(low), len(self.start))
        first = np.maximum(0, np.searchsorted(self.start, low, side="right") - 1)
        return first, np.maximum(0, np.searchsorted(self.start, high, side="left") - first)


def _bands_between(q: _Segments, k: _Segments, rule: Integers, low: Integers, high: Integers) -> _Bands:
    """Return the band of each pair of segments in a rectangle, trimmed to visible rows; pairs without any are dropped.

    Between progressions of equal stride a band over positions is a band over rows.
    """
    base = q.start - k.start
    low, high = -_divided(base - low, q.stride), _divided(high - base, q.stride)
    first_row, last_row = np.maximum(0, low), np.minimum(q.length, high + k.length)
    first_key, last_key = np.maximum(0, first_row - high), np.minimum(k.length, last_row - low)
    sees = (first_row < last_row) & (first_key < last_key) & (low <= high)
    shift = first_key - first_row
    rows = (q.offset + first_row, q.offset + last_row, k.offset + first_key, k.offset + last_key)
    bands = _Bands(q.owner, k.owner, rule, *rows, low + shift, high + shift)
    return bands if sees.all() else bands.taken(np.flatnonzero(sees))


def _divided(positions: Integers, stride: int) -> Integers:
    """Return positions // stride, skipping the division for stride 1: it is ten times slower than a sum."""
    return positions if stride == 1 else positions // stride


def _joined(bands: list[Band]) -> list[Band]:
    """Return the same visibility in fewer bands: full ones that share an edge are joined."""
    full = _merged((b.q_start, b.q_stop, b.k_start, b.k_stop) for b in bands if b.is_full)  # side by side
    full = _merged((k, k_stop, q, q_stop) for q, q_stop, k, k_stop in full)  # one above the other
    whole = [Band(q, q_stop, k, k_stop) for k, k_stop, q, q_stop in full]
    return sorted([*whole, *(b for b in bands if not b.is_full)], key=lambda band: (band.q_start, band.k_start))


def _merged(boxes: Iterable[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Join boxes (a, a_stop, b, b_stop) with equal (a, a_stop) that are adjacent in b."""
    merged: list[tuple[int, int, int, int]] = []
    for box in sorted(boxes):
        if merged and merged[-1][:2] == box[:2] and merged[-1][3] == box[2]:
            merged[-1] = (*merged[-1][:3], box[3])
        else:
            merged.append(box)
    return merged


def ring_rank_pairs(mask: Mask, layout: Layout) -> tuple[int, ...]:
    """Visible pairs of the queries that every rank of the layout holds, exactly."""
    return tuple(sum(_segment_pairs(mask, segment) for segment in segments) for segments in layout.segments)


def _segment_pairs(mask: Mask, segment: range) -> int:
    if segment.step == 1:
        before, after = mask.pairs_before(np.array([segment.start, segment.stop]))
        return int(after - before)
    positions = np.arange(segment.start, segment.stop, segment.step)
    return int((mask.pairs_before(positions + 1) - mask.pairs_before(positions)).sum())
