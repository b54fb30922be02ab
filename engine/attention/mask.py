"""Masks: which query may see which key, as bands over blocks of rows.

One band (low, high) covers full, causal, windowed and offset causal visibility between two progressions of equal
stride, striped layouts included: query row i sees key row j iff low <= i - j <= high. Documents, sinks and block lists
are more tiles, never another kind of tile.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from engine.attention.layout import Layout, Segment
from engine.attention.pieces import (
    UNBOUNDED,
    BandRule,
    BlockList,
    Piece,
    PieceIndex,
    build_pieces,
    pairs_before,
    with_queries_before,
)
from engine.errors import ConfigError, PlanError

__all__ = ["Band", "BlockList", "Mask", "Visibility", "normalise", "row_strips"]


@dataclass(frozen=True)
class Band:
    """Rows [q_start, q_stop) against keys [k_start, k_stop); low <= i - j <= high in rows counted from the two starts.

    None means unbounded. Three kinds leave `normalise`: full (None, None), causal (0, None) which is square, and a
    general band.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    low: int | None = None
    high: int | None = None

    @property
    def num_queries(self) -> int:
        """Query rows."""
        return self.q_stop - self.q_start

    @property
    def num_keys(self) -> int:
        """Key rows."""
        return self.k_stop - self.k_start

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self.low is None and self.high is None

    @property
    def is_causal(self) -> bool:
        """Whether row i sees exactly keys 0..i."""
        return self.low == 0 and self.high is None

    def area(self) -> int:
        """Number of visible pairs."""
        above_low = self.num_queries * self.num_keys if self.low is None else self._pairs_from(self.low)
        return above_low - (0 if self.high is None else self._pairs_from(self.high + 1))

    def _pairs_from(self, difference: int) -> int:
        """Pairs with i - j >= difference: row i has clamp(i - difference + 1, 0, num_keys) of them."""
        return self._clamped_sum(self.num_queries - difference) - self._clamped_sum(-difference)

    def _clamped_sum(self, last: int) -> int:
        """Sum of clamp(v, 0, num_keys) over all integers v <= last."""
        inside = max(0, min(last, self.num_keys))
        return inside * (inside + 1) // 2 + max(0, last - self.num_keys) * self.num_keys


@dataclass(frozen=True)
class Mask:
    """Visibility between global positions; every condition given must hold.

    seq_len     real tokens; later positions are padding, seen by nobody and seeing nothing
    causal      a query sees keys at its own and earlier positions
    window      a query sees keys less than `window` positions away (backwards only if causal)
    documents   ascending start positions of packed documents, the first 0; no attention across them
    blocks      block-sparse list
    sink        the first `sink` keys of every document are exempt from the window (Xiao et al. 2023, StreamingLLM)
    query_stop  queries from this position on see nothing; None: all see. Made by `queries_before`
    """

    seq_len: int
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()
    blocks: BlockList | None = None
    sink: int = 0
    query_stop: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.seq_len < 1:
            problems.append(f"mask: seq_len is {self.seq_len}; at least 1 token is needed")
        if self.window is not None and self.window < 1:
            problems.append(f"mask: window is {self.window}; at least 1 (a token sees itself) is needed")
        if self.sink < 0 or (self.sink and self.window is None):
            problems.append(f"mask: sink is {self.sink}; it must be 0, or positive together with a window")
        if self.query_stop is not None and self.query_stop < 0:
            problems.append(f"mask: query_stop is {self.query_stop}; a position, 0 or later, is needed")
        starts = self.documents
        if starts and (starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts))):
            problems.append("mask: document starts must begin with 0 and ascend strictly; drop empty documents")
        elif starts and starts[-1] >= max(1, self.seq_len):
            problems.append(f"mask: a document starts at {starts[-1]}, past the last of {self.seq_len} tokens; drop it")
        if problems:
            raise ConfigError(problems)

    def visible(self, query: int, key: int) -> bool:
        """Whether the query at one position sees the key at another: the definition all else is tested against."""
        if max(query, key) >= self.seq_len or (self.causal and key > query):
            return False
        if self.query_stop is not None and query >= self.query_stop:
            return False
        starts = self.documents or (0,)
        document = bisect_right(starts, key)
        if document != bisect_right(starts, query):
            return False
        if self.window is not None and abs(query - key) >= self.window and key - starts[document - 1] >= self.sink:
            return False
        size = self.blocks.block_size if self.blocks else 1
        return self.blocks is None or (query // size, key // size) in self.blocks.pairs

    @cached_property
    def pieces(self) -> npt.NDArray[np.int64]:
        """Every piece of the mask, [n, 6]; see `engine.attention.pieces`."""
        starts = np.array(self.documents or (0,), dtype=np.int64)
        rule = BandRule(self.causal, self.window, self.sink)
        table = build_pieces(starts, self.seq_len, rule, self.blocks)
        return table if self.query_stop is None else with_queries_before(table, self.query_stop)

    @cached_property
    def piece_index(self) -> PieceIndex:
        """The pieces, ready to be asked for a range of queries."""
        return PieceIndex(self.pieces)

    def queries_before(self, position: int) -> Mask:
        """The same mask for queries at positions before this one only; the others see nothing, their keys stay.

        What attention that runs again for the first part of a sequence sees.
        """
        return replace(self, query_stop=position if self.query_stop is None else min(position, self.query_stop))

    def all_queries(self) -> Mask:
        """The mask that `queries_before` restricted."""
        return self if self.query_stop is None else replace(self, query_stop=None)

    def pairs_before(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Visible pairs [n] whose query lies before each of `positions` [n]; exact, at any length."""
        return pairs_before(self.pieces, positions)

    def num_pairs(self) -> int:
        """Visible pairs of the whole mask."""
        return int(self.pairs_before(np.array([self.seq_len], dtype=np.int64))[0])

    def bands(self, q: Segment, kv: Segment) -> list[Band]:
        """Normalised bands between two segments, in rows of the segments; empty when nothing is visible."""
        bands: list[Band] = []
        for piece in self.piece_index.within([(q.start, q.last + 1)])[0]:
            bands += piece_bands(piece, q, kv, (0, 0))
        return bands


def piece_bands(piece: Piece, q: Segment, kv: Segment, offsets: tuple[int, int]) -> list[Band]:
    """Normalised bands of one piece between two segments, in rows of the blocks in which these start at `offsets`."""
    q_rows, k_rows = q.rows_between(piece.q_low, piece.q_high), kv.rows_between(piece.k_low, piece.k_high)
    num_queries, num_keys = q_rows[1] - q_rows[0], k_rows[1] - k_rows[0]
    if num_queries == 0 or num_keys == 0:
        return []
    stride = q.stride if num_queries > 1 else kv.stride
    if num_queries > 1 and num_keys > 1 and q.stride != kv.stride:
        raise PlanError(
            f"mask: segments of strides {q.stride} and {kv.stride} have no common band; use one layout for both"
        )
    base = (q.start + q.stride * q_rows[0]) - (kv.start + kv.stride * k_rows[0])
    low = None if piece.low == -UNBOUNDED else -((base - piece.low) // stride)
    high = None if piece.high == UNBOUNDED else (piece.high - base) // stride
    q_start, k_start = q_rows[0] + offsets[0], k_rows[0] + offsets[1]
    return normalise(Band(q_start, q_start + num_queries, k_start, k_start + num_keys, low, high))


def normalise(band: Band) -> list[Band]:
    """The same visibility as bands without empty rows or columns; causal ones square and aligned at (0, 0).

    Rows that see nothing never reach a kernel (kernels disagree about their lse), and both the top-left and the
    bottom-right causal convention give the same result on a square.
    """
    trimmed = _trim(band)
    if trimmed is None:
        return []
    low, high = trimmed.low, trimmed.high
    low = None if low is not None and low <= 1 - trimmed.num_keys else low
    high = None if high is not None and high >= trimmed.num_queries - 1 else high
    if (low, high) != (trimmed.low, trimmed.high):
        trimmed = replace(trimmed, low=low, high=high)
    if low is None or high is not None:
        return [trimmed]
    return _split_causal(trimmed, -low)


def _trim(band: Band) -> Band | None:
    """The band cut to rows and columns that see something; None when nothing does."""
    rows, keys, low, high = band.num_queries, band.num_keys, band.low, band.high
    first_row = max(0, low) if low is not None else 0
    last_row = min(rows, high + keys) if high is not None else rows
    first_key = max(0, first_row - high) if high is not None else 0
    last_key = min(keys, last_row - low) if low is not None else keys
    if first_row >= last_row or first_key >= last_key or (low is not None and high is not None and low > high):
        return None
    if (first_row, last_row, first_key, last_key) == (0, rows, 0, keys):
        return band
    shift = first_key - first_row
    return Band(
        band.q_start + first_row,
        band.q_start + last_row,
        band.k_start + first_key,
        band.k_start + last_key,
        None if low is None else low + shift,
        None if high is None else high + shift,
    )


def row_strips(band: Band, rows: int) -> list[Band]:
    """The band in strips of at most `rows` queries, each with all keys that these see and no others.

    For kernels that compute a band as a rectangle with a bias: a window of w keys then costs rows + w - 1 keys per
    query instead of all, and every query's result is complete after its strip.
    """
    strips = []
    for start in range(0, band.num_queries, rows):
        strip = _trim(
            Band(
                band.q_start + start,
                min(band.q_start + start + rows, band.q_stop),
                band.k_start,
                band.k_stop,
                None if band.low is None else band.low - start,
                None if band.high is None else band.high - start,
            )
        )
        strips += [strip] if strip else []
    return strips


def _split_causal(band: Band, prefix: int) -> list[Band]:
    """Row i sees keys 0 .. i + prefix: a full prefix, a causal square, and full rows below the square."""
    bands = []
    if prefix:
        bands.append(Band(band.q_start, band.q_stop, band.k_start, band.k_start + prefix))
    size = band.num_keys - prefix
    corner = band.k_start + prefix
    bands.append(Band(band.q_start, band.q_start + size, corner, band.k_stop, low=0))
    if band.num_queries > size:
        bands.append(Band(band.q_start + size, band.q_stop, corner, band.k_stop))
    return bands


class Visibility:
    """Bands between the blocks of any two ranks under one mask and layout, in rank-local rows."""

    def __init__(self, mask: Mask, layout: Layout) -> None:
        self.mask = mask
        self.layout = layout
        self._keys = _KeyIndex(layout, range(layout.size))
        self._keys_of: dict[int, tuple[_KeyIndex, PieceIndex]] = {}  # with the pieces that have such keys
        self._rows: dict[int, dict[int, tuple[Band, ...]]] = {}

    def bands(self, q_rank: int, kv_rank: int) -> tuple[Band, ...]:
        """What queries of `q_rank` see of the keys of `kv_rank`: bands that cover every visible pair exactly once."""
        if q_rank not in self._rows:
            found = self._row(q_rank, self._keys, self.mask.piece_index)
            self._rows[q_rank] = {rank: tuple(_joined(bands)) for rank, bands in found.items()}
        return self._rows[q_rank].get(kv_rank, ())

    def bands_of_pair(self, q_rank: int, kv_rank: int) -> tuple[Band, ...]:
        """As `bands`, which works out all that a rank's queries see; cheaper where only one pair is asked for."""
        if kv_rank not in self._keys_of:
            keys = _KeyIndex(self.layout, (kv_rank,))
            self._keys_of[kv_rank] = keys, PieceIndex(keys.met_by(self.mask.pieces))
        return tuple(_joined(self._row(q_rank, *self._keys_of[kv_rank])[kv_rank]))

    def query_rows(self, rank: int) -> int:
        """How many first rows of a rank may ask: those before the mask's query_stop; all, if it has none."""
        stop = self.mask.query_stop
        return self.layout.rows(rank) if stop is None else self.layout.rows_before(rank, stop)

    def pairs(self, q_rank: int, kv_rank: int) -> int:
        """Visible pairs between two blocks."""
        return sum(band.area() for band in self.bands(q_rank, kv_rank))

    def _row(self, q_rank: int, keys: _KeyIndex, piece_index: PieceIndex) -> defaultdict[int, list[Band]]:
        """Bands of the queries of one rank, by the rank of the keys; costs as much as there are bands."""
        found: defaultdict[int, list[Band]] = defaultdict(list)
        whole: set[tuple[int, int]] = set()
        segments = self.layout.segments[q_rank]
        seen = piece_index.within([(q.start, q.last + 1) for q in segments])
        for (q_offset, q), pieces in zip(_with_offsets(segments), seen, strict=True):
            for piece in pieces:
                document = self._whole_document(piece) if keys.ascends.get(q_rank) else None
                if document:
                    whole.add(document)
                for rank, k_offset, kv in keys.within(piece.k_low, piece.k_high):
                    if rank != q_rank or document is None:
                        found[rank] += piece_bands(piece, q, kv, (q_offset, k_offset))
        found[q_rank] += [band for low, high in sorted(whole) for band in self._own_square(q_rank, low, high)]
        return found

    def _whole_document(self, piece: Piece) -> tuple[int, int] | None:
        """Positions of the document, if the piece (cut to some queries) belongs to a wholly causal one.

        A rank's own rows of such a document are one causal tile whatever its segments, since they ascend in position.
        """
        mask = self.mask
        if not mask.causal or mask.blocks is not None or piece.high != UNBOUNDED:
            return None
        starts = mask.documents or (0,)
        index = bisect_right(starts, piece.q_low)
        low, high = starts[index - 1], starts[index] if index < len(starts) else mask.seq_len
        return (low, high) if mask.window is None or high - low <= mask.window else None

    def _own_square(self, rank: int, low: int, high: int) -> list[Band]:
        if self.mask.query_stop is not None:  # its later rows ask nothing, and no earlier one sees them
            high = min(high, self.mask.query_stop)
        first, stop = (self._keys.rows_before(rank, position) for position in (low, high))
        return [Band(first, stop, first, stop, low=0 if stop - first > 1 else None)] if first < stop else []


def _with_offsets(segments: tuple[Segment, ...]) -> Iterator[tuple[int, Segment]]:
    """Segments with the local row at which each begins."""
    offset = 0
    for segment in segments:
        yield offset, segment
        offset += segment.count


class _KeyIndex:
    """Where keys of some ranks lie: the segments that meet a range of positions."""

    def __init__(self, layout: Layout, ranks: Collection[int]) -> None:
        self._segments = {rank: list(_with_offsets(layout.segments[rank])) for rank in ranks}
        entries = [(rank, offset, segment) for rank in ranks for offset, segment in self._segments[rank]]
        self._dense = sorted((e for e in entries if e[2].stride == 1), key=lambda e: e[2].start)
        self._starts = [segment.start for _, _, segment in self._dense]
        self._strided = [e for e in entries if e[2].stride != 1]
        self._first = {rank: [segment.start for segment in layout.segments[rank]] for rank in ranks}
        self.ascends = {
            rank: all(a.last < b.start for a, b in itertools.pairwise(layout.segments[rank])) for rank in ranks
        }

    def within(self, low: int, high: int) -> Iterator[tuple[int, int, Segment]]:
        """(rank, local row at which the segment begins, segment) for every segment that may meet [low, high)."""
        first = max(0, bisect_right(self._starts, low) - 1)
        yield from itertools.islice(self._dense, first, bisect_left(self._starts, high))
        yield from self._strided

    def met_by(self, pieces: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The pieces [n, 6] that may have some of the keys."""
        if self._strided:
            return pieces
        stops = [segment.last + 1 for _, _, segment in self._dense]
        first, last = np.searchsorted(stops, pieces[:, 2], "right"), np.searchsorted(self._starts, pieces[:, 3])
        return pieces[first < last]

    def rows_before(self, rank: int, position: int) -> int:
        """Local rows of a rank (whose rows ascend) that lie before a position."""
        index = bisect_left(self._first[rank], position) - 1
        if index < 0:
            return 0
        offset, segment = self._segments[rank][index]
        return offset + segment.rows_between(segment.start, position)[1]


def _joined(bands: list[Band]) -> list[Band]:
    """The same visibility in fewer bands: full ones that share an edge become one."""
    partial = [band for band in bands if not band.is_full]
    full = _stacked(_side_by_side([band for band in bands if band.is_full]))
    return sorted(full + partial, key=lambda band: (band.q_start, band.k_start))


def _side_by_side(bands: list[Band]) -> list[Band]:
    """Full bands of the same queries whose keys follow each other, joined."""
    joined: list[Band] = []
    for band in sorted(bands, key=lambda band: (band.q_start, band.q_stop, band.k_start)):
        last = joined[-1] if joined else None
        if last and (last.q_start, last.q_stop, last.k_stop) == (band.q_start, band.q_stop, band.k_start):
            joined[-1] = Band(last.q_start, last.q_stop, last.k_start, band.k_stop)
        else:
            joined.append(band)
    return joined


def _stacked(bands: list[Band]) -> list[Band]:
    """Full bands of the same keys whose queries follow each other, joined."""
    joined: list[Band] = []
    for band in sorted(bands, key=lambda band: (band.k_start, band.k_stop, band.q_start)):
        last = joined[-1] if joined else None
        if last and (last.k_start, last.k_stop, last.q_stop) == (band.k_start, band.k_stop, band.q_start):
            joined[-1] = Band(last.q_start, band.q_stop, last.k_start, last.k_stop)
        else:
            joined.append(band)
    return joined
