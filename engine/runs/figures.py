"""Formats figures with the units of logs, screens and reports: 12.3K, 1.5 GiB, 0:42; a dash means unknown.

Standard library only: the log of a rank and the command line use the same.
"""

from __future__ import annotations

DASH = "–"
# Figures of an evaluation: key in metrics.jsonl -> name on screens and in logs.
EVALUATION_NAMES = {
    "validation_loss": "validation loss",
    "validation_bits_per_byte": "bits/byte",
    "needle_accuracy": "needles right",
    "needle_gain": "needle gain",
}


def count(value: float | None, digits: int = 3) -> str:
    """Format a number with a decimal prefix: 950, 12.3K, 4.56M, 1.2T."""
    if value is None:
        return DASH
    limit = 1000 - 10 ** (3 - digits) / 2  # rounded to this many digits it would be 1000
    prefixes = iter("KMGTP")
    prefix = ""
    while abs(value) >= limit and prefix != "P":
        value, prefix = value / 1000, next(prefixes)
    return f"{value:.{digits}g}{prefix}" if abs(value) < limit else f"{value:.0f}{prefix}"


def rate(value: float | None, unit: str) -> str:
    """Format a number with unit and decimal prefix: 61.4 GFLOP/s."""
    if value is None:
        return DASH
    text = count(value)
    number = text.rstrip("KMGTP")
    return f"{number} {text[len(number) :]}{unit}"


def binary_bytes(value: float | None) -> str:
    """Format bytes with a binary prefix: 512 B, 1.5 GiB."""
    if value is None:
        return DASH
    units = iter(("KiB", "MiB", "GiB", "TiB"))
    unit = "B"
    while abs(value) >= 1023.5 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 999.5 else f"{value:.3g} {unit}"


def percent(value: float | None) -> str:
    """Format a ratio in percent with three significant digits: 0.4567 -> 45.7%."""
    return DASH if value is None else f"{100 * value:.3g}%"


def plain(value: float | None, digits: int = 4) -> str:
    """Format a number with `digits` decimals."""
    return DASH if value is None else f"{value:.{digits}f}"


def seconds(value: float | None) -> str:
    """Format a short time: 250 ms, 1.25 s, 2,590 s."""
    if value is None:
        return DASH
    return f"{_short(1000 * value)} ms" if value < 0.9995 else f"{_short(value)} s"


def seconds_between(middle: float, low: float, high: float) -> str:
    """Format a short time and an interval around it in one unit: 250 ms (240…260)."""
    factor, unit = (1000, "ms") if middle < 0.9995 else (1, "s")
    return f"{_short(factor * middle)} {unit} ({_short(factor * low)}…{_short(factor * high)})"


def _short(value: float) -> str:
    """Format with three significant digits, or all before the decimal point: 0.25, 1,000."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def duration(value: float | None) -> str:
    """Format a long time: 0:42, 12:05, 3:04:05."""
    if value is None:
        return DASH
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count_of(word: str, number: int) -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {word}{'' if number == 1 else 's'}"
