"""Timing in turn: medians with spread, the slowest rank's time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from engine.bench.spec import Rounds

Item = TypeVar("Item")


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, fastest and slowest of `repeats`."""

    median_s: float
    min_s: float
    max_s: float
    repeats: int


def summarise(seconds: Sequence[float]) -> Timing:
    """The Timing of measured calls, at least one."""
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def turns(items: Sequence[Item], rounds: Rounds) -> Iterator[tuple[bool, Item]]:
    """(whether it counts, item) for every call; each round begins with another item, so none always comes first."""
    for number in range(rounds.warmup + rounds.repeats):
        first = number % max(1, len(items))
        for item in (*items[first:], *items[:first]):
            yield number >= rounds.warmup, item


def slowest_rank(values: Sequence[float]) -> list[float]:
    """The greatest of each value over all ranks; collective."""
    greatest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
    return [float(value) for value in greatest]


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
