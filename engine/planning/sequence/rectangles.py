"""Where a mask lets queries see keys: disjoint rectangles of positions, each with one band over position differences.

Each is (q_low, q_high, k_low, k_high, low, high): the query at position q in [q_low, q_high) sees the key at
position k in [k_low, k_high) iff low <= q - k <= high. They are kept as one int64 table [n, 6] because a mask may
have 10^5 of them; all functions here are pure and vectorised over that table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from engine.planning.sequence.mask import Mask

Table = npt.NDArray[np.int64]

UNBOUNDED = 1 << 40  # a difference that no two positions have


class BlockRectangle(NamedTuple):
    """Query blocks [q_first, q_stop) that all see key blocks [k_first, k_stop)."""

    q_first: int
    q_stop: int
    k_first: int
    k_stop: int


@dataclass(frozen=True)
class BlockList:
    """Block-sparse visibility: query block a sees key block b iff a rectangle holds (a, b); blocks of `block_size`.

    Rectangles are disjoint; `from_pairs` and `from_runs` make few and large ones of any list.
    """

    block_size: int
    rectangles: tuple[BlockRectangle, ...]

    @classmethod
    def from_pairs(cls, block_size: int, pairs: Iterable[tuple[int, int]] | Table) -> BlockList:
        """The list of these (query block, key block) pairs, in any order, repetitions allowed; or an array [n, 2]."""
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
        """Query block rows[i] sees key blocks [first[i], stop[i]); runs of a row neither touch nor overlap.

        The same run in consecutive rows becomes one rectangle.
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
    """All rectangles [n, 6] of a mask, sorted by q_low."""
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
    """Tables whose query and key ranges are each ascending and disjoint: whole documents, sinks, windows."""
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
    """Every rectangle cut to every block rectangle that it meets."""
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
    """(i, n) for every n of first[i], first[i] + 1, ... (count[i] of them)."""
    which = np.repeat(np.arange(len(count)), count)
    return which, np.arange(len(which)) - (np.cumsum(count) - count - first)[which]


def _trimmed(table: Table) -> Table:
    """The same visibility with ranges cut to queries and keys that see something; rectangles without any dropped."""
    q_low, q_high, k_low, k_high, low, high = table.T
    q_first, q_stop = np.maximum(q_low, k_low + low), np.minimum(q_high, k_high + high)
    k_first, k_stop = np.maximum(k_low, q_first - high), np.minimum(k_high, q_stop - low)
    sees = (q_low < q_high) & (k_low < k_high) & (q_first < q_stop)
    kept: Table = np.stack([q_first, q_stop, k_first, k_stop, low, high], axis=1)[sees]
    return kept


def pairs_before(table: Table, positions: Table) -> Table:
    """Visible pairs [len(positions)] whose query lies before each position.

    The visible keys of a query at q in a trimmed rectangle are min(k_high, q - low + 1) - max(k_low, q - high): linear
    in q between four break points, so that the sum over any number of them and queries is a few cumulative sums.
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
