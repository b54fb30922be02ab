"""Whether two series of steps differ by more than chance. Pure; numpy.

Steps that follow one another are alike (a clock that throttles, a neighbour on the network), so their number alone says
too much about how sure one can be. The circular block bootstrap draws whole stretches of steps instead of single ones,
here of the square root of their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_DRAWS = 4000
_MOST_STEPS = 5000  # the last ones of a longer series
LEAST_STEPS = 10


@dataclass(frozen=True)
class Estimate:
    """Of a difference b - a of two centres: its 95% interval, and how often chance alone gives one as large."""

    low: float
    high: float
    p: float


def compare_steps(a: Sequence[float], b: Sequence[float]) -> Estimate | None:
    """Medians of two independent series of steps; None when one is too short to tell."""
    if min(len(a), len(b)) < LEAST_STEPS:
        return None
    generator = np.random.default_rng(0)
    first, second = (np.asarray(side[-_MOST_STEPS:], dtype=np.float64) for side in (a, b))
    drawn = [np.median(_resample(side, generator), axis=1) for side in (first, second)]
    return _estimate(float(np.median(second) - np.median(first)), drawn[1] - drawn[0])


def compare_paired(a: Sequence[float], b: Sequence[float]) -> Estimate | None:
    """The mean of b - a at the same steps; None when there are too few."""
    if len(a) < LEAST_STEPS:
        return None
    gaps = np.asarray(b[-_MOST_STEPS:], dtype=np.float64) - np.asarray(a[-_MOST_STEPS:], dtype=np.float64)
    return _estimate(float(gaps.mean()), _resample(gaps, np.random.default_rng(0)).mean(axis=1))


def _resample(values: Array, generator: np.random.Generator) -> Array:
    """Series as long as `values`, made of blocks of it that wrap around; shape (draws, n)."""
    n, length = len(values), round(math.sqrt(len(values)))
    starts = generator.integers(0, n, (_DRAWS, -(-n // length)))
    places = (starts[:, :, None] + np.arange(length)).reshape(_DRAWS, -1)[:, :n] % n
    found: Any = values[places]
    return np.asarray(found, dtype=np.float64)


def _estimate(difference: float, drawn: Array) -> Estimate:
    """Interval: percentiles of what was drawn. p: how often the drawn ones lie as far from their own centre."""
    low, high = np.quantile(drawn, (0.025, 0.975))
    far = np.abs(drawn - difference) >= abs(difference) * (1 - 1e-12)
    return Estimate(float(low), float(high), float((1 + far.sum()) / (1 + len(drawn))))
