"""Masks: which query may see which key, as bands over blocks of rows.

One band (low, high) covers full, causal, windowed and offset causal visibility between two progressions of equal
stride, striped layouts included: query row i sees key row j iff low <= i - j <= high. Documents and block lists are
more tiles, never another kind of tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.attention.layout import Layout, Segment
from engine.errors import ConfigError, PlanError


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
        if self.is_full:
            return self.num_queries * self.num_keys
        if self.is_causal:
            return self.num_queries * (self.num_queries + 1) // 2
        low = -self.num_keys if self.low is None else self.low
        high = self.num_queries if self.high is None else self.high
        total = 0
        for i in range(self.num_queries):
            total += max(0, min(self.num_keys, i - low + 1) - max(0, i - high))
        return total

    def shifted(self, q_offset: int, k_offset: int) -> Band:
        """The same band counted from other row zero points."""
        return replace(
            self,
            q_start=self.q_start + q_offset,
            q_stop=self.q_stop + q_offset,
            k_start=self.k_start + k_offset,
            k_stop=self.k_stop + k_offset,
        )


@dataclass(frozen=True)
class BlockList:
    """Block-sparse visibility: query block a sees key block b iff (a, b) is listed; `block_size` in positions."""

    block_size: int
    pairs: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Mask:
    """Visibility between global positions; every condition given must hold.

    seq_len     real tokens; later positions are padding, seen by nobody and seeing nothing
    causal      a query sees keys at its own and earlier positions
    window      a query sees keys less than `window` positions away (backwards only if causal)
    documents   ascending start positions of packed documents, the first 0; no attention across them
    blocks      block-sparse list
    """

    seq_len: int
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()
    blocks: BlockList | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.seq_len < 1:
            problems.append(f"mask: seq_len is {self.seq_len}; at least 1 token is needed")
        if self.window is not None and self.window < 1:
            problems.append(f"mask: window is {self.window}; at least 1 (a token sees itself) is needed")
        starts = self.documents
        if starts and (starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts))):
            problems.append("mask: document starts must begin with 0 and ascend strictly; drop empty documents")
        if problems:
            raise ConfigError(problems)

    @property
    def is_plain_causal(self) -> bool:
        """Whether causality is the only condition."""
        return self.causal and self.window is None and not self.documents and self.blocks is None

    def visible(self, query: int, key: int) -> bool:
        """Whether the query at one position sees the key at another: the definition all else is tested against."""
        if max(query, key) >= self.seq_len or (self.causal and key > query):
            return False
        if self.window is not None and abs(query - key) >= self.window:
            return False
        if self.blocks is not None:
            size = self.blocks.block_size
            if (query // size, key // size) not in self.blocks.pairs:
                return False
        return not any(min(query, key) < start <= max(query, key) for start in self.documents)

    def bands(self, q: Segment, kv: Segment) -> list[Band]:
        """Normalised bands between two segments, in rows of the segments; empty when nothing is visible."""
        bands: list[Band] = []
        for q_low, q_high, k_low, k_high in self._rectangles(q, kv):
            q_rows, k_rows = q.rows_between(q_low, q_high), kv.rows_between(k_low, k_high)
            if q_rows[0] < q_rows[1] and k_rows[0] < k_rows[1]:
                bands += normalise(self._band(q, kv, q_rows, k_rows))
        return bands

    def _rectangles(self, q: Segment, kv: Segment) -> Iterator[tuple[int, int, int, int]]:
        """Ranges of positions (query low, high, key low, high) outside which documents or blocks hide everything."""
        for low, high in self._document_ranges():
            if self.blocks is None:
                yield low, high, low, high
                continue
            size = self.blocks.block_size
            for q_block, k_block in sorted(self.blocks.pairs):
                q_range = max(low, q_block * size), min(high, (q_block + 1) * size)
                k_range = max(low, k_block * size), min(high, (k_block + 1) * size)
                if q_range[0] < q_range[1] and k_range[0] < k_range[1]:
                    yield *q_range, *k_range

    def _document_ranges(self) -> Iterator[tuple[int, int]]:
        starts = self.documents or (0,)
        for low, high in zip(starts, (*starts[1:], self.seq_len), strict=True):
            if low < min(high, self.seq_len):
                yield low, min(high, self.seq_len)

    def _band(self, q: Segment, kv: Segment, q_rows: tuple[int, int], k_rows: tuple[int, int]) -> Band:
        stride = _common_stride(q, kv, q_rows, k_rows)
        base = (q.start + q.stride * q_rows[0]) - (kv.start + kv.stride * k_rows[0])
        low = 0 if self.causal else (None if self.window is None else 1 - self.window)
        high = None if self.window is None else self.window - 1
        return Band(
            *q_rows,
            *k_rows,
            low=None if low is None else -((base - low) // stride),
            high=None if high is None else (high - base) // stride,
        )


def _common_stride(q: Segment, kv: Segment, q_rows: tuple[int, int], k_rows: tuple[int, int]) -> int:
    if q_rows[1] - q_rows[0] == 1:
        return kv.stride
    if k_rows[1] - k_rows[0] == 1 or q.stride == kv.stride:
        return q.stride
    raise PlanError(
        f"mask: segments of strides {q.stride} and {kv.stride} have no common band; use one layout for both"
    )


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
    trimmed = replace(trimmed, low=low, high=high)
    if low is None or high is not None:
        return [trimmed]
    return _split_causal(trimmed, -low)


def _trim(band: Band) -> Band | None:
    """The band cut to rows and columns that see something; None when nothing does."""
    while True:
        rows, keys = band.num_queries, band.num_keys
        first_row = max(0, band.low) if band.low is not None else 0
        last_row = min(rows, band.high + keys) if band.high is not None else rows
        first_key = max(0, -band.high) if band.high is not None else 0
        last_key = min(keys, rows - band.low) if band.low is not None else keys
        if first_row >= last_row or first_key >= last_key:
            return None
        if (first_row, last_row, first_key, last_key) == (0, rows, 0, keys):
            return band
        shift = first_key - first_row
        band = Band(
            band.q_start + first_row,
            band.q_start + last_row,
            band.k_start + first_key,
            band.k_start + last_key,
            None if band.low is None else band.low + shift,
            None if band.high is None else band.high + shift,
        )


def _split_causal(band: Band, prefix: int) -> list[Band]:
    """Row i sees keys 0 .. i + prefix: a full prefix, a causal square, and full rows below the square."""
    bands = []
    if prefix:
        bands.append(replace(band, k_stop=band.k_start + prefix, low=None))
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
        self._cache: dict[tuple[int, int], tuple[Band, ...]] = {}

    def bands(self, q_rank: int, kv_rank: int) -> tuple[Band, ...]:
        """What queries of `q_rank` see of the keys of `kv_rank`: bands that cover every visible pair exactly once."""
        key = (q_rank, kv_rank)
        if key not in self._cache:
            self._cache[key] = self._compute(q_rank, kv_rank)
        return self._cache[key]

    def pairs(self, q_rank: int, kv_rank: int) -> int:
        """Visible pairs between two blocks."""
        return sum(band.area() for band in self.bands(q_rank, kv_rank))

    def _compute(self, q_rank: int, kv_rank: int) -> tuple[Band, ...]:
        layout = self.layout
        if q_rank == kv_rank and self.mask.is_plain_causal and self.mask.seq_len >= layout.seq_len:
            rows = layout.rows(q_rank)  # local order ascends in position, so the whole diagonal is one causal tile
            return (Band(0, rows, 0, rows, low=0),) if rows > 1 else (Band(0, rows, 0, rows),) * rows
        bands: list[Band] = []
        q_offset = 0
        for q in layout.segments[q_rank]:
            k_offset = 0
            for kv in layout.segments[kv_rank]:
                bands += [band.shifted(q_offset, k_offset) for band in self.mask.bands(q, kv)]
                k_offset += kv.count
            q_offset += q.count
        return tuple(_joined(bands))


def _joined(bands: list[Band]) -> list[Band]:
    """The same visibility in fewer bands: full ones that share an edge become one."""
    partial = [band for band in bands if not band.is_full]
    full = _glued(_glued([band for band in bands if band.is_full], "q", "k"), "k", "q")
    return sorted(full + partial, key=lambda band: (band.q_start, band.k_start))


def _glued(bands: list[Band], same: str, grows: str) -> list[Band]:
    """Full bands of the same range on axis `same` that follow each other on axis `grows` ("q", "k"), joined."""

    def place(band: Band) -> tuple[int, int, int]:
        return getattr(band, f"{same}_start"), getattr(band, f"{same}_stop"), getattr(band, f"{grows}_start")

    glued: list[Band] = []
    for band in sorted(bands, key=place):
        last = glued[-1] if glued else None
        if last and (*place(last)[:2], getattr(last, f"{grows}_stop")) == place(band):
            glued[-1] = replace(last, **{f"{grows}_stop": getattr(band, f"{grows}_stop")})
        else:
            glued.append(band)
    return glued
