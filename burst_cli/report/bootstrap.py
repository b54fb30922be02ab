"""Whether two series of steps, or two sets of runs, differ by more than chance. Pure; numpy.

Steps that follow one another are alike (a clock that throttles, a neighbour on the network), so their number alone says
too much about how sure one can be. The block bootstrap draws whole stretches of steps instead of single ones; how long
these are follows from the autocorrelation of the series (Politis and White 2004, as corrected in 2009, for the circular
block bootstrap).
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
_MOST_NUMBERS = 20_000_000  # drawn per side
_MOST_STEPS = 20_000
_MOST_PERMUTATIONS = 20_000
LEAST_STEPS = 10


@dataclass(frozen=True)
class Estimate:
    """The difference b - a of two centres. low, high: its 95% interval. p: of a difference this large by chance."""

    difference: float
    low: float
    high: float
    p: float
    method: str


def block_length(values: Array) -> int:
    """Steps per block for the circular block bootstrap of a mean, 1 for a series without autocorrelation."""
    n = len(values)
    centred = values - values.mean()
    variance = float(centred @ centred) / n
    if n < LEAST_STEPS or variance == 0.0:
        return 1
    most = min(n - 1, math.ceil(math.sqrt(n)) + max(5, math.ceil(math.log10(n))))
    covariance = np.array([float(centred[: n - lag] @ centred[lag:]) / n for lag in range(most + 1)])
    window = 2 * _last_correlated_lag(covariance / variance, n)
    lags = np.arange(1, min(window, most) + 1)
    if not len(lags):
        return 1
    taper = np.clip(2 * (1 - lags / window), 0, 1)
    long_run = covariance[0] + 2 * float(taper @ covariance[lags])
    slope = 2 * float((taper * lags) @ covariance[lags])
    if long_run <= 0:
        return 1
    length = (2 * slope**2 / (4 / 3 * long_run**2)) ** (1 / 3) * n ** (1 / 3)
    return max(1, min(round(float(length)), math.ceil(min(3 * math.sqrt(n), n / 3))))


def _last_correlated_lag(correlation: Array, n: int) -> int:
    """The lag after which several in a row are no greater than noise; 0 when the first ones already are."""
    bound = 2 * math.sqrt(math.log10(n) / n)
    run = max(5, math.ceil(math.sqrt(math.log10(n))))
    small = np.abs(correlation[1:]) < bound
    for lag in range(len(small)):
        if small[lag : lag + run].all():
            return lag
    return len(small)


def compare_steps(a: Sequence[float], b: Sequence[float]) -> Estimate | None:
    """Medians of two independent series of steps; None when one is too short to tell."""
    if min(len(a), len(b)) < LEAST_STEPS:
        return None
    generator = np.random.default_rng(0)
    first, second = (np.asarray(side[-_MOST_STEPS:], dtype=np.float64) for side in (a, b))
    lengths = block_length(first), block_length(second)
    draws = _draws(max(len(first), len(second)))
    drawn = [
        np.median(_resample(side, length, draws, generator), axis=1)
        for side, length in zip((first, second), lengths, strict=True)
    ]
    difference = float(np.median(second) - np.median(first))
    words = f"circular block bootstrap of medians, blocks of {lengths[0]} and {lengths[1]} steps, {draws} draws"
    return _estimate(difference, drawn[1] - drawn[0], words)


def compare_paired(a: Sequence[float], b: Sequence[float]) -> Estimate | None:
    """The mean of b - a at the same steps; None when there are too few."""
    if len(a) < LEAST_STEPS:
        return None
    gaps = np.asarray(b[-_MOST_STEPS:], dtype=np.float64) - np.asarray(a[-_MOST_STEPS:], dtype=np.float64)
    length, draws = block_length(gaps), _draws(len(gaps))
    drawn = _resample(gaps, length, draws, np.random.default_rng(0)).mean(axis=1)
    words = f"circular block bootstrap of the mean difference per step, blocks of {length} steps, {draws} draws"
    return _estimate(float(gaps.mean()), drawn, words)


def compare_runs(a: Sequence[float], b: Sequence[float]) -> Estimate | None:
    """Means of one figure per run; the unit is the run, so it holds for further runs too. None below two a side."""
    if min(len(a), len(b)) < 2:
        return None
    generator = np.random.default_rng(0)
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    difference = float(second.mean() - first.mean())
    p, exact = _permutation_p(first, second, generator)
    drawn = [side[generator.integers(0, len(side), (_DRAWS, len(side)))].mean(axis=1) for side in (first, second)]
    low, high = np.quantile(drawn[1] - drawn[0], (0.025, 0.975))
    kind = "all" if exact else f"{_MOST_PERMUTATIONS}"
    words = f"permutation test over {len(a)} and {len(b)} runs ({kind} permutations), interval by bootstrap over runs"
    return Estimate(difference, float(low), float(high), p, words)


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


def _resample(values: Array, length: int, draws: int, generator: np.random.Generator) -> Array:
    """`draws` series as long as `values`, made of blocks of it that wrap around; shape (draws, n)."""
    n = len(values)
    starts = generator.integers(0, n, (draws, -(-n // length)))
    places = (starts[:, :, None] + np.arange(length)).reshape(draws, -1)[:, :n] % n
    found: Any = values[places]
    return np.asarray(found, dtype=np.float64)


def _estimate(difference: float, drawn: Array, method: str) -> Estimate:
    """Interval: percentiles of what was drawn. p: how often the drawn ones lie as far from their own centre."""
    low, high = np.quantile(drawn, (0.025, 0.975))
    far = np.abs(drawn - difference) >= abs(difference) * (1 - 1e-12)
    return Estimate(difference, float(low), float(high), float((1 + far.sum()) / (1 + len(drawn))), method)


def _draws(n: int) -> int:
    return max(500, min(_DRAWS, _MOST_NUMBERS // n))
