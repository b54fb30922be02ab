"""Calls on this process alone, in turn: their seconds, and their peak bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from engine.bench.measure import Timing, summarise, synchronize, turns
from engine.bench.spec import Rounds
from engine.device.live_tensors import LiveTensorTracker


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
