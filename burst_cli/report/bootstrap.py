"""Whether two series of steps, or two sets of runs, differ by more than chance. Pure; numpy.

Steps that follow one another are alike (a clock that throttles, a neighbour on the network), so their number alone says
too much about how sure one can be. The circular block bootstrap draws whole stretches of steps instead of single ones,
here of the square root of their number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_DRAWS = 4000
_MOST_STEPS = 5000  # the last ones of a longer series
_MOST_PERMUTATIONS = 20_000
LEAST_STEPS = 10


@dataclass(frozen=True)
class Estimate:
    """Of a difference b - a of two centres: its 95% interval, and how often chance alone gives one as large."""

    low: float
    high: float
    p: float
    method: str


def compare_steps(a: Sequence[float], b: Sequence[float]) -> Estimate | None:
    """Medians of two independent series of steps; None when one is too short to tell."""
    if min(len(a), len(b)) < LEAST_STEPS:
        return None
    generator = np.random.default_rng(0)
    first, second = (np.asarray(side[-_MOST_STEPS:], dtype=np.float64) for side in (a, b))
    drawn = [np.median(_resample(side, generator), axis=1) for side in (first, second)]
    lengths = f"{_block_length(first)} and {_block_length(second)}"
    words = f"circular block bootstrap of medians, blocks of {lengths} steps, {_DRAWS} draws"
    return _estimate(float(np.median(second) - np.median(first)), drawn[1] - drawn[0], words)


def compare_paired(a: Sequence[float], b: Sequence[float]) -> Estimate | None:
    """The mean of b - a at the same steps; None when there are too few."""
    if len(a) < LEAST_STEPS:
        return None
    gaps = np.asarray(b[-_MOST_STEPS:], dtype=np.float64) - np.asarray(a[-_MOST_STEPS:], dtype=np.float64)
    drawn, length = _resample(gaps, np.random.default_rng(0)).mean(axis=1), _block_length(gaps)
    words = f"circular block bootstrap of the mean difference per step, blocks of {length} steps, {_DRAWS} draws"
    return _estimate(float(gaps.mean()), drawn, words)


def compare_runs(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Means of one figure per run; the unit is the run, so it holds for further runs too."""
    generator = np.random.default_rng(0)
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    p, exact = _permutation_p(first, second, generator)
    drawn = [side[generator.integers(0, len(side), (_DRAWS, len(side)))].mean(axis=1) for side in (first, second)]
    low, high = np.quantile(drawn[1] - drawn[0], (0.025, 0.975))
    kind = "all" if exact else f"{_MOST_PERMUTATIONS}"
    words = f"permutation test over {len(a)} and {len(b)} runs ({kind} permutations), interval by bootstrap over runs"
    return Estimate(float(low), float(high), p, words)


def smallest_p(a: int, b: int) -> float:
    """The least that a permutation test of so many runs can say; with equal sides each split has its mirror image."""
    return (2 if a == b else 1) / math.comb(a + b, a)


def _permutation_p(a: Array, b: Array, generator: np.random.Generator) -> tuple[float, bool]:
    pooled = np.concatenate([a, b])
    observed = abs(b.mean() - a.mean()) * (1 - 1e-12)
    exact = math.comb(len(pooled), len(a)) <= _MOST_PERMUTATIONS
    if exact:
        chosen = np.array(list(itertools.combinations(range(len(pooled)), len(a))))
    else:
        ranks = generator.random((_MOST_PERMUTATIONS, len(pooled)))
        chosen = np.argsort(ranks, axis=1)[:, : len(a)]
    sums = pooled[chosen].sum(axis=1)
    gaps = np.abs((pooled.sum() - sums) / len(b) - sums / len(a))
    hits = int((gaps >= observed).sum())
    return (hits / len(chosen) if exact else (1 + hits) / (1 + len(chosen))), exact


def _block_length(values: Array) -> int:
    return round(math.sqrt(len(values)))


def _resample(values: Array, generator: np.random.Generator) -> Array:
    """Series as long as `values`, made of blocks of it that wrap around; shape (draws, n)."""
    n, length = len(values), _block_length(values)
    starts = generator.integers(0, n, (_DRAWS, -(-n // length)))
    places = (starts[:, :, None] + np.arange(length)).reshape(_DRAWS, -1)[:, :n] % n
    found: Any = values[places]
    return np.asarray(found, dtype=np.float64)


def _estimate(difference: float, drawn: Array, method: str) -> Estimate:
    """Interval: percentiles of what was drawn. p: how often the drawn ones lie as far from their own centre."""
    low, high = np.quantile(drawn, (0.025, 0.975))
    far = np.abs(drawn - difference) >= abs(difference) * (1 - 1e-12)
    return Estimate(float(low), float(high), float((1 + far.sum()) / (1 + len(drawn))), method)
