"""Seconds of a call on a device: CUDA events, on a CPU the clock; medians of calls after some that do not count."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch

from engine.bench.measure import Timing, summarise, synchronize

LEAST_REPEATS = 3
LEAST_REPEATS_OF_LONG = 2  # of calls that take half of `enough_s` and more
LAUNCH_CYCLES = 1_000_000  # half a millisecond, which a call of few kernels takes the host
WARM_S = 0.05  # an idle GPU needs so long to reach its clock


def time_call(
    call: Callable[[], object], device: torch.device, *, enough_s: float = 0.3, most_repeats: int = 50
) -> Timing:
    """Timing of `call`, repeated until `enough_s` are measured, at least three times (two if it is long).

    The first call, which may compile or choose algorithms, never counts, nor do those that warm the device. The device
    is waited for before the first and after the last repeat only, and sleeps while the host starts the first calls, so
    that the time of launches hides behind the calls before.
    """
    call()
    synchronize(device)
    run = _on_cuda if device.type == "cuda" else _on_cpu
    first = run(call, 1)
    if device.type == "cuda" and first[0] < WARM_S:
        first = run(call, max(1, int(WARM_S / max(first[0], 1e-5))))[-1:]
    least = LEAST_REPEATS if first[0] < enough_s / 2 else LEAST_REPEATS_OF_LONG
    repeats = max(least, min(most_repeats, int(enough_s / max(first[0], 1e-6))))
    return summarise(first + run(call, repeats - 1))


def _on_cuda(call: Callable[[], object], repeats: int) -> list[float]:
    edges = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda._sleep(repeats * LAUNCH_CYCLES)  # type: ignore[no-untyped-call]
    edges[0].record()
    for edge in edges[1:]:
        call()
        edge.record()
    edges[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(edges)]


def _on_cpu(call: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def measured_matmul_flops(device: torch.device, size: int) -> float:
    """FLOP/s of a product of two [size, size] bf16 matrices of random numbers: what GEMM rooflines are taken from."""
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / time_call(lambda: torch.mm(left, right, out=out), device).median_s
