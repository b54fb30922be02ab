"""Timing in turn: medians with spread, the slowest rank's time, peak bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from engine.bench.spec import Rounds
from engine.memory.tracker import LiveTensorTracker

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


def measure_in_turn(
    variants: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: Rounds,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Timings of calls on this process alone, by name."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for counts, name in turns(list(variants), rounds):
        synchronize(device)
        start = clock()
        variants[name]()
        synchronize(device)
        if counts:
            seconds[name].append(clock() - start)
    return {name: summarise(values) for name, values in seconds.items()}


def slowest_rank(values: Sequence[float]) -> list[float]:
    """The greatest of each value over all ranks; collective."""
    greatest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
    return [float(value) for value in greatest]


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Most bytes of tensors alive at once during `call`, beyond those alive before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    tracker = LiveTensorTracker()
    with tracker:
        call()
    return tracker.peak_bytes - tracker.live_bytes
