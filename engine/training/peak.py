"""Peak FLOP/s of this rank's device: configured, else published, else (on a CPU) measured.

A CPU's peak is measured once per machine, number of threads, dtype and torch version, by one process at a time, and
cached with its conditions in CACHE/peaks. So the MFU of two runs does not differ because of other load at their start.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from pathlib import Path

import torch

from engine.config.settings import Dtype, TrainConfig
from engine.predict.machine import Peak, published_peak
from engine.runs.files import cache_folder, utc_now

_SIZES = (512, 1024, 2048)
_MEASURE_S = 0.1  # per size
_GAIN = 1.03  # stop at the size that is faster than the one before by less than this factor


def measure_cpu_peak(dtype: Dtype) -> Peak:
    """Measure the best matmul rate of this process with its threads; takes up to a second.

    For bfloat16 it is the float32 rate if that is higher: a CPU without bfloat16 units computes faster in float32.
    """
    dtypes: tuple[Dtype, ...] = ("bfloat16", "float32") if dtype == "bfloat16" else ("float32",)
    best, measured = max((_best_rate(torch.bfloat16 if name == "bfloat16" else torch.float32), name) for name in dtypes)
    conditions = f"{torch.get_num_threads()} threads, {utc_now()[:16]}, load {os.getloadavg()[0]:.1f}"
    return Peak(best, f"measured: best {measured} matmul of {platform.node()}, {conditions}")


def _best_rate(dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest matmul of two [size, size] matrices over growing sizes."""
    best = 0.0
    for size in _SIZES:
        left, right, out = (torch.ones(size, size, dtype=dtype) for _ in range(3))
        torch.mm(left, right, out=out)
        times: list[float] = []
        while sum(times) < _MEASURE_S or len(times) < 2:
            start = time.perf_counter()
            torch.mm(left, right, out=out)
            times.append(time.perf_counter() - start)
        before, rate = best, 2 * size**3 / min(times)
        best = max(before, rate)
        if min(times) > _MEASURE_S or (before and rate < _GAIN * before):
            break  # a larger product would only take longer
    return best


def machine_cpu_peak(dtype: Dtype, folder: Path) -> Peak:
    """Return this machine's peak from the cache in `folder`, measuring it first if needed, one process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{platform.node()}-{torch.get_num_threads()}-{dtype}-{torch.__version__}.json"
    with (folder / name).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        try:
            cached = json.load(file)
            return Peak(float(cached["flops_per_s"]), str(cached["source"]))
        except (ValueError, KeyError, TypeError):  # a new file, or one truncated while it was written
            peak = measure_cpu_peak(dtype)
            file.seek(0)
            file.truncate()
            json.dump({"flops_per_s": peak.flops_per_s, "source": peak.source}, file)
            return peak


def find_peak(train: TrainConfig, device: torch.device) -> Peak:
    """Return the peak of `device`: the configured one, else the published one, else on a CPU the measured one."""
    if train.peak_flops_per_device is not None:
        return Peak(train.peak_flops_per_device, "config: train.peak_flops_per_device")
    if device.type != "cuda":
        return machine_cpu_peak(train.compute_dtype, cache_folder() / "peaks")
    name = torch.cuda.get_device_name(device)
    known = published_peak(name, train.compute_dtype)
    return known or Peak(None, f"unknown device {name!r}: set train.peak_flops_per_device to its dense FLOP/s")


def above_peak_warning(figure: str, flops_per_s: float, peak: Peak) -> str | None:
    """Return a warning if a rate per device exceeds the peak, so that a count, a clock or the peak must be wrong."""
    if peak.flops_per_s is None or flops_per_s <= peak.flops_per_s:
        return None
    return (
        f"{figure} is {flops_per_s / 1e12:.3g} TFLOP/s per device, above the peak of {peak.flops_per_s / 1e12:.3g} "
        f"({peak.source}): do not trust it; check the timing, or set train.peak_flops_per_device"
    )
