"""Solves a layout from masks: equal tokens on every rank and nearly equal visible pairs.

The sequence is split into 2 * size * k chunks of equal length; the cost of a chunk is the number of visible pairs of
its queries, and every rank gets 2 * k chunks. Assignments with few fragments are tried first, because they give larger
tiles and fewer messages: a window gets contiguous blocks, a plain causal mask a zigzag. Pure and deterministic, so all
ranks find the same layout without communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from engine.planning.visibility.mask import Mask

Costs = npt.NDArray[np.int64]  # visible pairs per chunk
Assignment = npt.NDArray[np.int64]  # [size, chunks per rank]: chunk numbers

TOLERANCE = 0.05  # excess of the busiest rank over the mean, as a fraction of the mean
FINEST_CUT = 32  # largest k


def balanced_ranges(masks: Sequence[Mask], seq_len: int, size: int) -> list[list[range]]:
    """Return ascending ranges of positions for every rank; token counts differ by at most one chunk.

    Args:
        masks: One per layer; pairs are summed over layers.
        seq_len: Positions.
        size: Ranks.
    """
    finest = 1
    # Each of the 2 * k chunks of a rank may be one token longer than another's; together at most one chunk.
    while finest < FINEST_CUT and 4 * size * (2 * finest) ** 2 <= seq_len:
        finest *= 2
    total = 2 * size * finest
    edges = np.arange(total + 1, dtype=np.int64) * seq_len // total
    assignment = _solve(np.diff(_pairs_before(masks, edges)), size)
    edges = edges[:: total // assignment.size]
    return [[range(int(edges[c]), int(edges[c + 1])) for c in row] for row in np.sort(assignment, axis=1).tolist()]


def _solve(costs: Costs, size: int) -> Assignment:
    """Return the first assignment within tolerance, else the most balanced one."""
    best, least = np.zeros((0, 0), dtype=np.int64), np.inf
    for chunk_costs, assignment in _candidates(costs, size):
        excess = imbalance(chunk_costs, assignment)
        if excess <= TOLERANCE:
            return assignment
        if excess < least:
            best, least = assignment, excess
    return best


def imbalance(costs: Costs, assignment: Assignment) -> float:
    """Return the excess of the busiest rank over the mean as a fraction of the mean; idle ranks delay no other."""
    loads = costs[assignment].sum(axis=1)
    mean = float(loads.sum()) / len(loads)
    return float(loads.max()) / mean - 1 if mean else 0.0


def _pairs_before(masks: Sequence[Mask], edges: Costs) -> Costs:
    total = np.zeros(len(edges), dtype=np.int64)
    for mask, layers in Counter(masks).items():
        total += layers * mask.pairs_before(edges)
    return total


def _candidates(costs: Costs, size: int) -> Iterator[tuple[Costs, Assignment]]:
    """Yield costs of chunks with an assignment: one, then two, then many fragments per rank."""
    chunks = [2 * size << power for power in range((len(costs) // (2 * size)).bit_length())]
    cuts = [costs.reshape(count, -1).sum(axis=1) for count in chunks]
    halves = np.arange(2 * size, dtype=np.int64)
    yield cuts[0], halves.reshape(size, 2)  # contiguous
    yield cuts[0], np.stack([halves[:size], halves[: size - 1 : -1]], axis=1)  # zigzag
    for cut in cuts:
        contiguous = np.arange(len(cut), dtype=np.int64).reshape(size, -1)
        yield cut, _swapped(cut, contiguous, size)
        yield cut, _swapped(cut, _largest_first(cut, size), 4 * size)


def _largest_first(costs: Costs, size: int) -> Assignment:
    """Assign chunks by longest processing time first (Graham 1969), in rounds so that counts are equal.

    In each round the `size` next most expensive chunks are assigned, the most expensive to the least loaded rank.
    """
    most_expensive_first = np.argsort(-costs, kind="stable").reshape(-1, size)
    loads = np.zeros(size, dtype=np.int64)
    assignment = np.empty((size, len(most_expensive_first)), dtype=np.int64)
    for index, group in enumerate(most_expensive_first):
        least_first = np.argsort(loads, kind="stable")
        assignment[least_first, index] = group
        loads[least_first] += costs[group]
    return assignment[np.argsort(assignment.min(axis=1), kind="stable")]


def _swapped(costs: Costs, assignment: Assignment, limit: int) -> Assignment:
    """Improve an assignment by at most `limit` swaps of two chunks between the busiest and the least loaded rank."""
    assignment = assignment.copy()
    loads = costs[assignment].sum(axis=1)
    share = loads.sum() / len(loads)
    for _ in range(limit):
        busy, idle = int(loads.argmax()), int(loads.argmin())
        if loads[busy] <= share * (1 + TOLERANCE):
            break
        gap = loads[busy] - loads[idle]
        moved = costs[assignment[busy]][:, None] - costs[assignment[idle]][None, :]
        remaining = np.abs(gap - 2 * moved)
        best = int(remaining.argmin())
        if remaining.flat[best] >= gap:
            break
        i, j = divmod(best, assignment.shape[1])
        assignment[busy, i], assignment[idle, j] = assignment[idle, j], assignment[busy, i]
        loads[busy] -= moved[i, j]
        loads[idle] += moved[i, j]
    return assignment
