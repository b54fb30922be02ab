"""Masks: which query attends to ("sees") which key, as bands over blocks of rows.

A band (low, high) expresses full, causal, windowed and offset causal visibility between two progressions of equal
stride, striped layouts included: query row i sees key row j iff low <= i - j <= high. Documents, sinks and block lists
become more tiles, never another kind of tile.

A mask is a set of disjoint rectangles of positions, each with one band over position differences, (q_low, q_high,
k_low, k_high, low, high): the query at position q in [q_low, q_high) sees the key at position k in [k_low, k_high) iff
low <= q - k <= high. They are one int64 table [n, 6], because a mask may have 10^5 of them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.config.errors import ConfigError

Table = npt.NDArray[np.int64]
UNBOUNDED = 1 << 40  # larger than any difference of positions


class BlockRectangle(NamedTuple):
    """Query blocks [q_first, q_stop), each of which sees all key blocks [k_first, k_stop)."""

    q_first: int
    q_stop: int
    k_first: int
    k_stop: int


@dataclass(frozen=True)
class BlockList:
    """Block-sparse visibility: query block a sees key block b iff a rectangle contains (a, b); `block_size` in tokens.

    Rectangles are disjoint; `from_pairs` and `from_runs` build few large ones.
    """

    block_size: int
    rectangles: tuple[BlockRectangle, ...]

    @classmethod
    def from_pairs(cls, block_size: int, pairs: Iterable[tuple[int, int]] | Table) -> BlockList:
        """Build a list of (query block, key block) pairs, or [n, 2], in any order, duplicates allowed."""
        listed = pairs if isinstance(pairs, np.ndarray) else np.array(list(pairs), dtype=np.int64)
        table = np.unique(listed.reshape(-1, 2), axis=0)
        if not len(table):
            return cls(block_size, ())
        starts = np.ones(len(table), dtype=np.bool_)
        starts[1:] = (np.diff(table[:, 0]) != 0) | (np.diff(table[:, 1]) != 1)
        first = np.flatnonzero(starts)
        last = np.append(first[1:], len(table)) - 1
        return cls.from_runs(block_size, table[first, 0], table[first, 1], table[last, 1] + 1)

    @classmethod
    def from_runs(cls, block_size: int, rows: Table, first: Table, stop: Table) -> BlockList:
        """Build a list in which query block rows[i] sees key blocks [first[i], stop[i]).

        Runs of a row must neither touch nor overlap. Equal runs in consecutive rows become one rectangle.
        """
        order = np.lexsort((rows, stop, first))
        rows, first, stop = rows[order], first[order], stop[order]
        starts = np.ones(len(rows), dtype=np.bool_)
        starts[1:] = (np.diff(first) != 0) | (np.diff(stop) != 0) | (np.diff(rows) != 1)
        top = np.flatnonzero(starts)
        bottom = np.append(top[1:], len(rows))[: len(top)] - 1
        table = np.stack([rows[top], rows[bottom] + 1, first[top], stop[top]], axis=1)
        return cls(block_size, tuple(BlockRectangle(*row) for row in sorted(table.tolist())))


def build_rectangles(mask: Mask) -> Table:
    """Return all rectangles of a mask, [n, 6] int64 sorted by q_low."""
    tables = _document_rectangles(mask)
    if mask.blocks is not None:
        tables = [_within_blocks(table, mask.blocks) for table in tables]
    table: Table = np.concatenate(tables)
    if mask.query_stop is not None:
        table[:, 1] = np.minimum(table[:, 1], mask.query_stop)
    table = _trimmed(table)
    order = np.argsort(table[:, 0], kind="stable")
    result: Table = table[order]
    return result


def _document_rectangles(mask: Mask) -> list[Table]:
    """Return tables of rectangles of whole documents, sinks and windows; in each, ranges are ascending and disjoint."""
    starts = np.array(mask.documents or (0,), dtype=np.int64)
    stops = np.append(starts[1:], mask.seq_len)
    causal_low = 0 if mask.causal else -UNBOUNDED
    if mask.window is None:
        return [_table(starts, stops, starts, stops, causal_low, UNBOUNDED)]
    short = stops - starts <= mask.window
    tables = [_table(starts[short], stops[short], starts[short], stops[short], causal_low, UNBOUNDED)]
    starts, stops = starts[~short], stops[~short]
    first_windowed = np.minimum(starts + mask.sink, stops)
    window_low = 0 if mask.causal else 1 - mask.window
    sinks = _table(starts, stops, starts, first_windowed, causal_low, UNBOUNDED)
    windows = _table(starts, stops, first_windowed, stops, window_low, mask.window - 1)
    return [*tables, sinks, windows]


def _table(q_low: Table, q_high: Table, k_low: Table, k_high: Table, low: int, high: int) -> Table:
    bounds = [np.full(len(q_low), low, dtype=np.int64), np.full(len(q_low), high, dtype=np.int64)]
    return np.stack([q_low, q_high, k_low, k_high, *bounds], axis=1)


def _within_blocks(table: Table, blocks: BlockList) -> Table:
    """Return the intersection of every rectangle with every block rectangle that it overlaps."""
    rectangles = np.array(blocks.rectangles, dtype=np.int64).reshape(-1, 4) * blocks.block_size
    q_low, q_high, k_low, k_high = rectangles.T
    after_queries = np.searchsorted(table[:, 1], q_low, "right"), np.searchsorted(table[:, 0], q_high, "left")
    after_keys = np.searchsorted(table[:, 3], k_low, "right"), np.searchsorted(table[:, 2], k_high, "left")
    first, stop = np.maximum(after_queries[0], after_keys[0]), np.minimum(after_queries[1], after_keys[1])
    counts = np.maximum(0, stop - first)
    rectangle, met = listed(first, counts)
    cut: Table = table[met]
    cut[:, [0, 2]] = np.maximum(cut[:, [0, 2]], rectangles[rectangle][:, [0, 2]])
    cut[:, [1, 3]] = np.minimum(cut[:, [1, 3]], rectangles[rectangle][:, [1, 3]])
    return cut


def listed(first: Table, count: Table) -> tuple[Table, Table]:
    """Return arrays of i and n for every n in first[i] .. first[i] + count[i] - 1."""
    which = np.repeat(np.arange(len(count)), count)
    return which, np.arange(len(which)) - (np.cumsum(count) - count - first)[which]


def _trimmed(table: Table) -> Table:
    """Return the same visibility with ranges trimmed to visible queries and keys, without empty rectangles."""
    q_low, q_high, k_low, k_high, low, high = table.T
    q_first, q_stop = np.maximum(q_low, k_low + low), np.minimum(q_high, k_high + high)
    k_first, k_stop = np.maximum(k_low, q_first - high), np.minimum(k_high, q_stop - low)
    sees = (q_low < q_high) & (k_low < k_high) & (q_first < q_stop)
    trimmed: Table = np.stack([q_first, q_stop, k_first, k_stop, low, high], axis=1)[sees]
    return trimmed


def pairs_before(table: Table, positions: Table) -> Table:
    """Return for each position the number of visible pairs whose query is before it, [len(positions)] int64.

    A query at q in a trimmed rectangle sees min(k_high, q - low + 1) - max(k_low, q - high) keys, which is linear in q
    between four break points. So the sum over all rectangles and queries is a few cumulative sums.
    """
    q_low, q_high, k_low, k_high, low, high = table.T
    grows_until = np.clip(k_high + low - 1, q_low, q_high)
    shrinks_from = np.clip(k_low + high, q_low, q_high)
    one, zero = np.ones_like(q_low), np.zeros_like(q_low)
    begin = np.concatenate([q_low, grows_until, q_low, shrinks_from])
    end = np.concatenate([grows_until, q_high, shrinks_from, q_high])
    constant = np.concatenate([1 - low, k_high, -k_low, high])
    slope = np.concatenate([one, zero, zero, -one])
    at = np.concatenate([begin, end])
    order = np.argsort(at, kind="stable")
    at = at[order]
    constant = np.cumsum(np.concatenate([constant, -constant])[order])
    slope = np.cumsum(np.concatenate([slope, -slope])[order])
    if not len(at):
        return np.zeros(len(positions), dtype=np.int64)

    def summed(c: Table, s: Table, start: Table, stop: Table) -> Table:
        area: Table = c * (stop - start) + s * ((stop * (stop - 1) - start * (start - 1)) // 2)
        return area

    total = np.concatenate([[0], np.cumsum(summed(constant[:-1], slope[:-1], at[:-1], at[1:]))])
    index = np.searchsorted(at, positions, "right") - 1
    inside = np.maximum(index, 0)
    partial = summed(constant[inside], slope[inside], at[inside], positions)
    result: Table = np.where(index < 0, 0, total[inside] + partial)
    return result


class Band(NamedTuple):
    """Query rows [q_start, q_stop) against key rows [k_start, k_stop): row i sees key j iff low <= i - j <= high.

    i and j are counted from the two starts. Without bounds every query sees every key. `normalise` returns three kinds:
    full, causal (square), and a general band.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    low: int = -UNBOUNDED
    high: int = UNBOUNDED

    @property
    def num_queries(self) -> int:
        """Number of query rows."""
        return self.q_stop - self.q_start

    @property
    def num_keys(self) -> int:
        """Number of key rows."""
        return self.k_stop - self.k_start

    def from_0(self) -> Band:
        """Return the same band with both starts at 0."""
        return Band(0, self.num_queries, 0, self.num_keys, self.low, self.high)

    @property
    def queries(self) -> slice:
        """Slice of the query rows."""
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        """Slice of the key rows."""
        return slice(self.k_start, self.k_stop)

    @property
    def hides_later(self) -> bool:
        """Whether some query does not see a key that is too late."""
        return self.low > 1 - self.num_keys

    @property
    def hides_earlier(self) -> bool:
        """Whether some query does not see a key that is too far back."""
        return self.high < self.num_queries - 1

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return not (self.hides_later or self.hides_earlier)

    @property
    def is_causal(self) -> bool:
        """Whether row i sees exactly keys 0 .. i, with more than one key."""
        return self.low == 0 and self.hides_later and not self.hides_earlier

    @property
    def kind(self) -> Literal["full", "causal", "band"]:
        """Name of its kind."""
        return "full" if self.is_full else "causal" if self.is_causal else "band"

    def area(self) -> int:
        """Number of visible pairs."""
        return max(0, self._pairs_from(self.low) - self._pairs_from(self.high + 1))

    def of_rows(self, start: int, stop: int) -> Band | None:
        """Return the band of query rows [start, stop), trimmed to visible rows and keys; None if none is visible."""
        first_row = max(0, self.low, start - self.q_start)
        last_row = min(self.num_queries, self.high + self.num_keys, stop - self.q_start)
        first_key, last_key = max(0, first_row - self.high), min(self.num_keys, last_row - self.low)
        if first_row >= last_row or first_key >= last_key or self.low > self.high:
            return None
        rows, keys = (
            (self.q_start + first_row, self.q_start + last_row),
            (self.k_start + first_key, self.k_start + last_key),
        )
        shift = first_key - first_row
        return Band(*rows, *keys, self.low + shift, self.high + shift)

    def _pairs_from(self, difference: int) -> int:
        """Count pairs with i - j >= difference: row i has clamp(i - difference + 1, 0, num_keys) of them."""
        return self._clamped_sum(self.num_queries - difference) - self._clamped_sum(-difference)

    def _clamped_sum(self, last: int) -> int:
        """Return the sum of clamp(v, 0, num_keys) over all integers v <= last."""
        inside = max(0, min(last, self.num_keys))
        return inside * (inside + 1) // 2 + max(0, last - self.num_keys) * self.num_keys


@dataclass(frozen=True)
class Mask:
    """Visibility between global positions; all given conditions must hold.

    Attributes:
        seq_len: Real tokens; later positions are padding, which sees nothing and is not seen.
        causal: A query sees keys at its own and earlier positions only.
        window: A query sees keys less than `window` positions away (backwards only if causal).
        documents: Ascending start positions of packed documents, the first 0; no attention across them.
        blocks: Block-sparse list.
        sink: The first `sink` keys of every document are exempt from the window (Xiao et al. 2023, StreamingLLM).
        query_stop: Queries from this position on see nothing; None: no limit. Set by `queries_before`.
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

    @property
    def hides_all(self) -> bool:
        """Whether no query sees a key, which is how layers without attention are planned."""
        return self.query_stop == 0

    @cached_property
    def rectangles(self) -> npt.NDArray[np.int64]:
        """Every rectangle of the mask, [n, 6]."""
        return build_rectangles(self)

    def queries_before(self, position: int) -> Mask:
        """Return the mask restricted to queries before `position`; other queries see nothing, all keys are unchanged.

        This is the mask of attention that is recomputed for the first part of a sequence.
        """
        return replace(self, query_stop=position if self.query_stop is None else min(position, self.query_stop))

    def all_queries(self) -> Mask:
        """The mask that `queries_before` restricted."""
        return self if self.query_stop is None else replace(self, query_stop=None)

    def pairs_before(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the visible pairs whose query is before each of `positions` [n], [n] int64, exact at any length."""
        return pairs_before(self.rectangles, positions)


def normalise(band: Band) -> list[Band]:
    """The same visibility as bands without empty rows or columns; causal ones square and aligned at (0, 0).

    Rows that see nothing never reach a kernel (kernels disagree about their lse), and both the top-left and the
    bottom-right causal convention give the same result on a square.
    """
    trimmed = band.of_rows(band.q_start, band.q_stop)
    if trimmed is None:
        return []
    low = trimmed.low if trimmed.hides_later else -UNBOUNDED
    high = trimmed.high if trimmed.hides_earlier else UNBOUNDED
    if low == -UNBOUNDED or high < UNBOUNDED:
        return [Band(*trimmed[:4], low, high)]
    return _split_causal(trimmed, -low)


def row_strips(band: Band, rows: int) -> list[Band]:
    """A general band in strips of at most `rows` queries, each with all keys that these see and no others.

    For kernels that compute a band as a rectangle with a bias: a window of w keys then costs rows + w - 1 keys per
    query instead of all, and every query's result is complete after its strip. A full or a causal band, which needs no
    bias, stays whole.
    """
    if band.kind != "band":
        return [band]
    strips = (band.of_rows(start, start + rows) for start in range(band.q_start, band.q_stop, rows))
    return [strip for strip in strips if strip is not None]


def halves(bands: Sequence[Band]) -> tuple[list[Band], list[Band]]:
    """The same visibility as two lists with half of the pairs each, the first rows of the queries in the first."""
    rows = range(1 + max((band.q_stop for band in bands), default=0))

    def part(start: int, stop: int) -> list[Band]:
        return [band for whole in bands if (band := whole.of_rows(start, stop))]

    half = sum(band.area() for band in bands) / 2
    cut = bisect_left(rows, half, key=lambda row: sum(band.area() for band in part(0, row)))
    first, last = ([n for band in part(*ends) for n in normalise(band)] for ends in ((0, cut), (cut, rows.stop)))
    return first, last


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
