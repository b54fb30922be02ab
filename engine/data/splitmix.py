"""What is drawn from a seed on every machine alike: numbers that no version of a library changes."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def splitmix64(value: int) -> int:
    """A 64-bit hash of an integer's lower 64 bits: the output of splitmix64 (Steele et al. 2014) in that state."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
