"""What every benchmark shares: the machine it ran on, repeats in turn, medians with spread, peak bytes, results files.

Run benchmarks from the root of the repository: `python -m benchmarks.bench_NAME --json benchmarks/results/NAME.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.memory_tracker import LiveTensorTracker

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, fastest and slowest of `repeats`."""

    median_s: float
    min_s: float
    max_s: float
    repeats: int


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each variant")
    parser.add_argument("--warmup", type=int, default=1, help="calls of each variant before that")
    parser.add_argument("--threads", type=int, default=None, help="threads of torch; default: as torch chooses")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the results here")
    return parser


def prepare(args: argparse.Namespace) -> tuple[torch.device, dict[str, Any]]:
    """(device, environment), with threads set and the environment printed."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    facts = environment(device)
    for name, value in facts.items():
        print(f"{name:>12}: {value}")
    return device, facts


def environment(device: torch.device) -> dict[str, Any]:
    """Facts without which a figure means nothing."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.orig_argv[1:]),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def cpu_name() -> str:
    """The processor's name, and the instruction set that torch uses on it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({torch.backends.cpu.get_cpu_capability()})"


def measure_in_turn(
    variants: Mapping[str, Callable[[], object]], device: torch.device, *, repeats: int, warmup: int
) -> dict[str, Timing]:
    """Timings by name. Variants take turns in every round, so that a machine's drift meets all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_index in range(warmup + repeats):
        for name, call in variants.items():
            elapsed = _timed(call, device)
            if round_index >= warmup:
                seconds[name].append(elapsed)
    return {
        name: Timing(statistics.median(values), min(values), max(values), len(values))
        for name, values in seconds.items()
    }


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


def write_results(path: Path | None, facts: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes {environment, results} as JSON if there is a path; Timings become objects."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"environment": dict(facts), "results": rows}
    path.write_text(json.dumps(document, indent=2, default=asdict) + "\n")
    print(f"written: {path}")


def _timed(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
