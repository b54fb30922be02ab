"""Numbers on the command lines of benchmarks."""

from __future__ import annotations

import argparse


def at_least_1(text: str) -> int:
    """A count of ranks, repeats and the like."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)
