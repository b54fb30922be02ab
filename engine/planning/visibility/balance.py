"""A layout solved from masks: equal tokens on every rank, and nearly equal visible pairs.

The sequence is cut into 2 * size * k chunks of equal length, the cost of a chunk is the number of visible pairs of its
queries, and every rank gets 2 * k chunks. Assignments of few fragments are tried first, because they give larger tiles
and fewer messages: a window keeps its contiguous blocks and plain causality its zigzag. Pure and deterministic: all
ranks solve alone and agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from engine.planning.visibility.mask import Mask

Costs = npt.NDArray[np.int64]  # visible pairs per chunk
Assignment = npt.NDArray[np.int64]  # [size, chunks per rank]: chunk numbers

TOLERANCE = 0.05  # pairs that the busiest rank may have above an equal share
FINEST_CUT = 32  # k of the finest cut tried


def balanced_ranges(masks: Sequence[Mask], seq_len: int, size: int) -> list[list[range]]:
    """Ascending ranges of positions for every rank; token counts differ by at most one chunk.

    masks    one per layer, repetitions welcome (pairs are summed over the layers)
    """
    finest = 1
    # all 2 * k chunks of a rank may be one token longer than another's: together no more than one chunk
    while finest < FINEST_CUT and 4 * size * (2 * finest) ** 2 <= seq_len:
        finest *= 2
    total = 2 * size * finest
    edges = np.arange(total + 1, dtype=np.int64) * seq_len // total
    assignment = _solve(np.diff(_pairs_before(masks, edges)), size)
    edges = edges[:: total // assignment.size]
    return [[range(int(edges[c]), int(edges[c + 1])) for c in row] for row in np.sort(assignment, axis=1).tolist()]


def _solve(costs: Costs, size: int) -> Assignment:
    """The first assignment within tolerance; else the most level of all."""
    best, least = np.zeros((0, 0), dtype=np.int64), np.inf
    for chunk_costs, assignment in _candidates(costs, size):
        excess = imbalance(chunk_costs, assignment)
        if excess <= TOLERANCE:
            return assignment
        if excess < least:
            best, least = assignment, excess
    return best


def imbalance(costs: Costs, assignment: Assignment) -> float:
    """How far the busiest rank lies above an equal share, as a fraction of it; nobody waits for an idle rank."""
    loads = costs[assignment].sum(axis=1)
    mean = float(loads.sum()) / len(loads)
    return float(loads.max()) / mean - 1 if mean else 0.0


def _pairs_before(masks: Sequence[Mask], edges: Costs) -> Costs:
    total = np.zeros(len(edges), dtype=np.int64)
    for mask, layers in Counter(masks).items():
        total += layers * mask.pairs_before(edges)
    return total


def _candidates(costs: Costs, size: int) -> Iterator[tuple[Costs, Assignment]]:
    """Cuts (as costs of their chunks) with assignments: one, then two, then many fragments per rank."""
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
    """Longest processing time first, with equal counts: each group of `size` chunks of similar cost is dealt out, the
    dearest to the rank that has least (Graham 1969, in rounds).
    """
    dearest_first = np.argsort(-costs, kind="stable").reshape(-1, size)
    loads = np.zeros(size, dtype=np.int64)
    assignment = np.empty((size, len(dearest_first)), dtype=np.int64)
    for turn, group in enumerate(dearest_first):
        least_first = np.argsort(loads, kind="stable")
        assignment[least_first, turn] = group
        loads[least_first] += costs[group]
    return assignment[np.argsort(assignment.min(axis=1), kind="stable")]


def _swapped(costs: Costs, assignment: Assignment, limit: int) -> Assignment:
    """At most `limit` exchanges of one chunk between the busiest and the idlest rank, each the most levelling one."""
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
