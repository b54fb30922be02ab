"""Offload on this machine: the host link, what of it hides behind compute, and AdamW's update on the CPU.

`bench_offload(device)` gives rows of plain values; a case that fails is a row with its error. On a CPU everything runs
at a tiny size and copies hide behind nothing: that shows that the code works, not how fast it is.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.turns import measure_in_turn
from engine.activations.store import ActivationStore, DeviceStore, HostStore, SavedTensors, host_store
from engine.attention.stream_times import Times
from engine.attention.streams import CudaStreams, NoStreams
from engine.bench.measure import synchronize
from engine.bench.spec import Rounds
from engine.config.settings import OptimizerConfig
from engine.device.host_memory import host_empty
from engine.kernels.attention import select_kernel
from engine.optim.adamw import build_optimizer, square_sum
from engine.planning.program.ops import Channel
from engine.planning.visibility.mask import Band

Row = dict[str, Any]
ADAM_BYTES = 28  # per parameter: weight, two moments read and written, gradient read; fp32


@dataclass(frozen=True)
class OffloadSizes:
    """What is measured with.

    copy_bytes        of one copy over the host link
    matmul_size       n of an n x n matrix product, repeated `matmuls` times
    attention_rows    of one causal tile, 8 query heads and 8 kv heads of 128
    layers            that a step of the store keeps, `layer_bytes` each
    adam_parameters   that are updated on the CPU, by each of `threads` threads
    """

    copy_bytes: int
    matmul_size: int
    matmuls: int
    attention_rows: int
    layers: int
    layer_bytes: int
    adam_parameters: int
    threads: tuple[int, ...]
    rounds: Rounds


def default_sizes(device: torch.device) -> OffloadSizes:
    """For a GPU about 20 seconds, 4 GiB of host memory and less than 8 GiB of its own; on a CPU a second."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = tuple(sorted({1, *(count for count in (2, 4, 8, 16, 32) if count < cores), cores}))
    if device.type == "cuda":
        return OffloadSizes(1 << 30, 8192, 20, 16384, 12, 1 << 28, 1 << 27, threads, Rounds(repeats=5, warmup=2))
    return OffloadSizes(1 << 20, 128, 2, 128, 3, 1 << 16, 1 << 18, threads, Rounds(repeats=3, warmup=1))


def bench_offload(device: torch.device, sizes: OffloadSizes | None = None) -> list[Row]:
    """Rows with a `case` each: copy, overlap, store, adam, norm, clip."""
    chosen = sizes or default_sizes(device)
    rows: list[Row] = []
    for case in (bench_copies, bench_overlap, bench_store, bench_adam):
        try:
            rows += case(device, chosen)
        except Exception as error:  # of a library or a driver: the other cases are wanted all the same
            rows.append({"case": case.__name__.removeprefix("bench_"), "error": f"{type(error).__name__}: {error}"})
        gc.collect()
    return rows


class Link:
    """One buffer on the device, one on the host, and streams for copies between them beside compute."""

    def __init__(self, device: torch.device, size_bytes: int, *, pinned: bool) -> None:
        self.size_bytes = size_bytes
        self.pinned = pinned
        self._streams: Any = CudaStreams(device) if device.type == "cuda" else NoStreams()
        self._device = [torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._host = [host_empty((size_bytes,), torch.uint8, pinned=pinned).zero_() for _ in range(2)]

    def to_host(self) -> None:
        """One copy, on its stream."""
        self._copy(Channel.TO_HOST, self._device[0], self._host[0])

    def to_device(self) -> None:
        """One copy, on its stream."""
        self._copy(Channel.TO_DEVICE, self._host[1], self._device[1])

    def both(self) -> None:
        """One copy in each direction at once."""
        self.to_host()
        self.to_device()

    def _copy(self, channel: Channel, source: Tensor, target: Tensor) -> None:
        self._streams.hold(channel, self._streams.record(None))
        with self._streams.under(channel):
            self._streams.copy(source, target)


def bench_copies(device: torch.device, sizes: OffloadSizes) -> list[Row]:
    """Bytes per second over the host link, each direction alone and both at once, from pinned and pageable memory."""
    rows = []
    for pinned in (True, False) if device.type == "cuda" else (False,):
        link = Link(device, sizes.copy_bytes, pinned=pinned)
        variants: dict[str, Callable[[], object]] = {
            "to_host": link.to_host,
            "to_device": link.to_device,
            "both": link.both,
        }
        for name, timing in measure_in_turn(variants, device, sizes.rounds).items():
            moved = link.size_bytes * (2 if name == "both" else 1)
            row = {"case": "copy", "direction": name, "pinned": pinned, "bytes": moved}
            rows.append(row | asdict(timing) | {"gb_per_s": moved / timing.median_s / 1e9})
    return rows


def bench_overlap(device: torch.device, sizes: OffloadSizes) -> list[Row]:
    """What of a copy in both directions hides behind matrix products, and behind attention.

    hidden: (work alone + copies alone - both together) / the shorter of the two; 1 is perfect, 0 is one after the other
    """
    link = Link(device, sizes.copy_bytes, pinned=device.type == "cuda")
    rows = []
    for name, work in (("matmul", matmul_work(device, sizes)), ("attention", attention_work(device, sizes))):

        def together(work: Callable[[], object] = work) -> None:
            link.both()
            work()

        found = measure_in_turn({"work": work, "copies": link.both, "together": together}, device, sizes.rounds)
        work_s, copies_s, both_s = (found[part].median_s for part in ("work", "copies", "together"))
        hidden = (work_s + copies_s - both_s) / min(work_s, copies_s)
        row = {"case": "overlap", "work": name, "bytes": 2 * link.size_bytes, "work_s": work_s, "copies_s": copies_s}
        rows.append(row | {"together_s": both_s, "hidden": hidden, "slowdown_of_work": max(work_s, both_s) / work_s})
    return rows


def matmul_work(device: torch.device, sizes: OffloadSizes) -> Callable[[], object]:
    """Matrix products in bfloat16."""
    n = sizes.matmul_size
    a, b, c = (torch.ones(n, n, dtype=torch.bfloat16, device=device) for _ in range(3))

    def work() -> None:
        for _ in range(sizes.matmuls):
            torch.mm(a, b, out=c)

    return work


def attention_work(device: torch.device, sizes: OffloadSizes) -> Callable[[], object]:
    """The forward pass of one causal tile with the kernel that a run would take."""
    kernel = select_kernel("auto", device, torch.bfloat16, 128).kernel
    q, k, v = (torch.randn(sizes.attention_rows, 8, 128, device=device).to(torch.bfloat16) for _ in range(3))
    rows = sizes.attention_rows
    return lambda: kernel.forward(q, k, v, Band(0, rows, 0, rows, low=0))


def bench_store(device: torch.device, sizes: OffloadSizes) -> list[Row]:
    """A step that keeps a tensor per layer, in the store of real runs, against the same step that leaves it there.

    The exposed seconds are measured as in training (`engine.attention.stream_times`); `idle_wire_s` are those of the
    same step without its products, in which nothing but the copies takes time.
    """
    work = matmul_work(device, sizes)
    host = host_store(device)

    def step(store: ActivationStore, work: Callable[[], object] = work) -> None:
        entries: list[SavedTensors] = []
        for layer in range(sizes.layers):
            work()
            entries.append(
                store.save([torch.full((sizes.layer_bytes,), layer % 256, dtype=torch.uint8, device=device)])
            )
        while entries:
            kept = entries.pop()
            tensors = kept.fetch()
            work()
            work()
            del tensors
            kept.release()

    def copies() -> None:
        step(host, lambda: None)
        host.wait_pending()

    variants = {"host": lambda: step(host), "device": lambda: step(DeviceStore()), "copies": copies}
    found = measure_in_turn(variants, device, sizes.rounds)
    times = _timed_step(host, lambda: step(host), device)
    row: Row = {"case": "store", "layers": sizes.layers, "layer_bytes": sizes.layer_bytes}
    row |= {"host_s": found["host"].median_s, "device_s": found["device"].median_s}
    row |= {"extra_s": found["host"].median_s - found["device"].median_s, "idle_wire_s": found["copies"].median_s}
    row |= {"offload_bytes": times.transferred_bytes, "offload_exposed_s": times.exposed_s}
    return [row | {"exposed_share": times.exposed_share(found["copies"].median_s)}]


def _timed_step(store: HostStore[Any], step: Callable[[], None], device: torch.device) -> Times:
    synchronize(device)
    store.times.start()
    step()
    store.wait_pending()
    synchronize(device)
    return store.times.read()


def bench_adam(device: torch.device, sizes: OffloadSizes) -> list[Row]:
    """AdamW's update of fp32 weights in host memory and the passes over gradients before it, by number of threads.

    Weights and gradients are pinned, as under memory.optimizer_store=host; with all threads also as they come.
    """
    pinned = device.type == "cuda"
    rows = [row for threads in sizes.threads for row in _update_rows(threads, sizes, pinned=pinned)]
    return rows + (_update_rows(sizes.threads[-1], sizes, pinned=False) if pinned else [])


def _update_rows(threads: int, sizes: OffloadSizes, *, pinned: bool) -> list[Row]:
    shape = (max(1, sizes.adam_parameters // 1024), 1024)
    weight = torch.nn.Parameter(host_empty(shape, torch.float32, pinned=pinned).fill_(1.0))
    gradient = weight.grad = host_empty(shape, torch.float32, pinned=pinned).fill_(1e-3)
    module = torch.nn.ParameterList([weight])
    passes: dict[str, tuple[int, Callable[[], object]]] = {
        "adam": (ADAM_BYTES, build_optimizer(module, OptimizerConfig()).step),
        "norm": (4, lambda: square_sum([gradient])),
        "clip": (8, lambda: torch.nn.utils.clip_grads_with_norm_([weight], 1.0, torch.tensor(1.0), foreach=True)),
    }
    with _threads(threads):
        timings = measure_in_turn({case: run for case, (_, run) in passes.items()}, torch.device("cpu"), sizes.rounds)
    rows = []
    for case, (per_parameter, _) in passes.items():
        moved = per_parameter * weight.numel()
        row = {"case": case, "pinned": pinned, "threads": threads, "parameters": weight.numel(), "bytes": moved}
        rows.append(row | asdict(timings[case]) | {"gb_per_s": moved / timings[case].median_s / 1e9})
    return rows


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
