"""Measures calls on all ranks: rendezvous, interleaved rounds, and the times of the slowest rank.

Also collects the facts that every figure is recorded with: machine, load, versions.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from engine.bench.spec import RESULT_FILE, Rounds, read_cell
from engine.distributed.mesh import choose_device, read_placement, start_process_group
from engine.runs.record import cpu_name, output_of, version_of

_TIMEOUT = datetime.timedelta(minutes=10)
_WINDOWS = 3  # measured windows per median
_LONG_WINDOWS = 10  # a call of this many windows is measured once, and no larger size is measured

Item = TypeVar("Item")
Series = list[tuple[float, float]]  # (size, seconds) or (size, rate), sizes ascending


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, fastest and slowest of `repeats`."""

    median_s: float
    min_s: float
    max_s: float
    repeats: int


def summarise(seconds: Sequence[float]) -> Timing:
    """Return the Timing of at least one measured call."""
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def turns(items: Sequence[Item], rounds: Rounds) -> Iterator[tuple[bool, Item]]:
    """Yield (whether it counts, item) for every call; each round starts with another item."""
    for number in range(rounds.warmup + rounds.repeats):
        first = number % max(1, len(items))
        for item in (*items[first:], *items[:first]):
            yield number >= rounds.warmup, item


def slowest_rank(values: Sequence[float]) -> list[float]:
    """Return the maximum of each value over all ranks. Collective."""
    greatest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
    return [float(value) for value in greatest]


def synchronize(device: torch.device) -> None:
    """Synchronize the device; no effect on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Stopwatch:
    """Seconds of a call that all ranks make at the same time, the median of a few windows in which it is repeated."""

    device: torch.device
    window_s: float

    def is_long(self, seconds: float) -> bool:
        """Return whether no larger size is measured after a call of `seconds`."""
        return seconds > _LONG_WINDOWS * self.window_s

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the time of the slowest rank. Collective."""
        return max(self.by_rank(call))

    def by_rank(self, call: Callable[[], object]) -> list[float]:
        """Return the times of all ranks. Collective."""
        self._window(call, 1)  # the first call opens connections and selects kernels
        once = self._window(call, 1)
        if self.is_long(max(once)):
            return once
        repeats = max(1, int(self.window_s / max(once)))
        windows = [self._window(call, repeats) for _ in range(_WINDOWS)]
        return [statistics.median(of_rank) for of_rank in zip(*windows, strict=True)]

    def by_size(
        self,
        sizes: Sequence[int],
        prepare: Callable[[int], Callable[[], object]],
        figure: Callable[[int, float], float] = lambda size, seconds: seconds,
    ) -> Series:
        """Return (size, figure) for every size, up to the first whose call is long. Collective."""
        found: Series = []
        for size in sizes:
            seconds = self.seconds(prepare(size))
            found.append((float(size), figure(size, seconds)))
            if self.is_long(seconds):
                break
        return found

    def _window(self, call: Callable[[], object], repeats: int) -> list[float]:
        seconds = [0.0] * dist.get_world_size()
        dist.barrier()
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronize(self.device)
        seconds[dist.get_rank()] = (time.perf_counter() - start) / repeats
        return slowest_rank(seconds)


def run_rank(kind: type[Item], argv: Sequence[str], measure: Callable[[Item, torch.device], dict[str, Any]]) -> int:
    """Run one rank: join the rendezvous in the folder of `argv`, measure; rank 0 writes the result to the folder."""
    (folder,) = map(Path, argv)
    cell: Any = read_cell(kind, folder)
    torch.set_num_threads(cell.setup.threads)
    placement = read_placement()
    device = choose_device(cell.setup.cluster, placement)
    store = FileStore(str(folder / "store"), placement.world_size)
    start_process_group(device, placement, store=store, timeout=_TIMEOUT)
    found = measure(cell, device)
    if placement.rank == 0:
        (folder / RESULT_FILE).write_text(json.dumps(found))
    dist.barrier()  # rank 0 hosts the store that the watchdogs of other ranks read until they exit
    dist.destroy_process_group()
    return 0


def exchange(sent: Tensor, after: int, before: int) -> Callable[..., None]:
    """Return a call that sends to one rank and receives as much from another; its argument runs concurrently."""
    received = torch.empty_like(sent)

    def run(meanwhile: Callable[[], None] = lambda: None) -> None:
        pair = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
        works = dist.batch_isend_irecv(pair)
        meanwhile()
        for work in works:
            work.wait()

    return run


def environment(device: torch.device) -> dict[str, Any]:
    """Return date, device, cores, threads, load, platform and versions as plain values.

    For a GPU also its driver, clocks and libraries.
    """
    cpu = f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **(gpu_facts(device) if device.type == "cuda" else {}),
    }


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """Return what torch and nvidia-smi report about the GPU, and versions of the kernel libraries."""
    properties = torch.cuda.get_device_properties(device)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    # Indexes of nvidia-smi ignore CUDA_VISIBLE_DEVICES, so devices are identified by UUID.
    query, uuid = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu", properties.uuid
    return {
        "gpu": str(properties),
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "triton": version_of("triton"),
        "flash_attn": version_of("flash-attn"),
        "nvidia_smi": output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv", f"--id=GPU-{uuid}"),
    }
