"""Figures as people read them: 12.3K tokens/s, 1.5 GiB, 0:42. What is not known is a dash."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

from cluster.remote_text import clean_text

DASH = "–"
K = TypeVar("K")
V = TypeVar("V")
_BARS = "▁▂▃▄▅▆▇█"


def count(value: float | None, digits: int = 3) -> str:
    """A number with a decimal prefix: 950, 12.3K, 4.56M, 1.2T."""
    if value is None:
        return DASH
    limit = 1000 - 10 ** (3 - digits) / 2  # rounded to so many digits it would be 1000
    prefixes = iter("KMGTP")
    prefix = ""
    while abs(value) >= limit and prefix != "P":
        value, prefix = value / 1000, next(prefixes)
    return f"{value:.{digits}g}{prefix}" if abs(value) < limit else f"{value:.0f}{prefix}"


def rate(value: float | None, unit: str) -> str:
    """A number of this unit with a decimal prefix: 61.4 GFLOP/s."""
    if value is None:
        return DASH
    text = count(value)
    number = text.rstrip("KMGTP")
    return f"{number} {text[len(number) :]}{unit}"


def binary_bytes(value: float | None) -> str:
    """Bytes with a binary prefix: 512 B, 1.5 GiB."""
    if value is None:
        return DASH
    units = iter(("KiB", "MiB", "GiB", "TiB"))
    unit = "B"
    while abs(value) >= 1023.5 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 999.5 else f"{value:.3g} {unit}"


def percent(value: float | None) -> str:
    """A ratio in percent with three significant digits: 0.4567 -> 45.7%."""
    return DASH if value is None else f"{100 * value:.3g}%"


def plain(value: float | None, digits: int = 4) -> str:
    """A number with `digits` digits behind the point."""
    return DASH if value is None else f"{value:.{digits}f}"


def seconds(value: float | None) -> str:
    """A short time: 250 ms, 1.25 s, 2,590 s."""
    if value is None:
        return DASH
    return f"{_short(1000 * value)} ms" if value < 0.9995 else f"{_short(value)} s"


def seconds_between(middle: float, low: float, high: float) -> str:
    """A short time and the interval around it, in one unit: 250 ms (240…260)."""
    factor, unit = (1000, "ms") if middle < 0.9995 else (1, "s")
    return f"{_short(factor * middle)} {unit} ({_short(factor * low)}…{_short(factor * high)})"


def _short(value: float) -> str:
    """With three digits, or all of those before the point: 0.25, 1,000."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def duration(value: float | None) -> str:
    """A long time: 0:42, 12:05, 3:04:05."""
    if value is None:
        return DASH
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as bars, low to high, at most `width` characters; each bar is the mean of its share of the values."""
    if not values:
        return ""
    size = min(width, len(values))
    edges = [index * len(values) // size for index in range(size + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def clean(text: str) -> str:
    """`text` without terminal escapes and control characters (output of ranks may hold any bytes)."""
    return clean_text(text.replace("\t", "    "))


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of every key, both in the order in which they come."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def count_of(word: str, number: int) -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def fold_numbers(numbers: Iterable[int]) -> str:
    """0,3-5 for 0 3 4 5."""
    from ClusterShell.RangeSet import RangeSet

    return str(RangeSet.fromlist(map(str, numbers)))


def fold_names(names: Sequence[str]) -> str:
    """tb[1-4] for tb1 tb2 tb3 tb4; names that are no node names are listed."""
    unique = list(dict.fromkeys(names))
    if len(unique) < 2:
        return "".join(unique)
    from cluster.ssh.hosts import fold_nodes

    try:
        return fold_nodes(unique)
    except Exception:  # the library has no common error for names that it does not understand
        return ",".join(unique)
