"""What is measured at every optimizer step, and the row of metrics.jsonl it becomes.

docs/training.md says what each figure of it is; engine/predict/flops.py, what conventions of FLOPs there are.
A figure that cannot be had is None, never 0.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.activations.store import HostStore
from engine.attention.library import ContextParallel
from engine.attention.stream_times import total
from engine.config.settings import ModelConfig
from engine.device.live_tensors import LiveTensorTracker
from engine.distributed.collectives import max_over_ranks
from engine.distributed.mesh import Mesh
from engine.distributed.waits import WaitClock, find_straggler
from engine.planning.methods.layers import AttendedPairs
from engine.predict.flops import Flops, mfu, step_flops
from engine.predict.machine import Peak
from engine.runs.oom import peak_resident_bytes
from engine.training.peak import above_peak_warning
from engine.training.train_step import StepResult


def peak_pinned_bytes() -> int | None:
    """Most pinned host memory of this process so far, or None where it has no GPU."""
    peak = torch.cuda.host_memory_stats().get("allocated_bytes.peak")
    return None if peak is None else int(peak)


class PeakMemory:
    """Peak memory of this process on `device`: the CUDA allocator's per step, or the resident set since the start; in
    the first `tracked_steps` steps of a CPU run also that of live tensors, and of those in host memory.

    Optimizer state is known from the end of the first step on, so one step alone shows less than the next ones.
    """

    def __init__(self, device: torch.device, tracked_steps: int = 0) -> None:
        self._gpu = device if device.type == "cuda" else None
        self._steps_left = 0 if self._gpu else tracked_steps
        self._tracker, self._tracked = LiveTensorTracker(), False

    def reset(self) -> None:
        """Begins a new peak, where that can be done."""
        if self._gpu is not None:
            torch.cuda.reset_peak_memory_stats(self._gpu)

    @contextlib.contextmanager
    def count_tensors(self) -> Iterator[None]:
        """Around one step; counts in its body, if it is one of the first."""
        self._tracked = self._steps_left > 0
        if not self._tracked:
            yield
            return
        self._steps_left -= 1
        self._tracker.reset_peak()
        with self._tracker:
            yield

    def read(self) -> dict[str, int | None]:
        """Peaks by their names in metrics.jsonl."""
        pinned, tracker = peak_pinned_bytes(), self._tracker if self._tracked else None
        return {
            "peak_memory_bytes": torch.cuda.max_memory_allocated(self._gpu) if self._gpu else peak_resident_bytes(),
            "peak_memory_reserved_bytes": torch.cuda.max_memory_reserved(self._gpu) if self._gpu else None,
            "peak_tensor_bytes": tracker.peak_bytes if tracker else None,
            "peak_host_bytes": tracker.peak_host_bytes if tracker else pinned,
        }


@dataclass(frozen=True)
class StepCost:
    """What one optimizer step holds, over all ranks, but for the pairs of its batch; and the peak of one device.

    recomputed_matrices   parameters that backward multiplies every token with again
    """

    model: ModelConfig
    seq_len: int
    sequences: int
    recomputed_matrices: int
    peak: Peak

    @property
    def tokens(self) -> int:
        """Text tokens."""
        return self.sequences * self.seq_len

    def flops(self, pairs: AttendedPairs) -> Flops:
        """Of a step whose sequences have these pairs, all layers together."""
        return step_flops(
            self.model,
            seq_len=self.seq_len,
            visible_pairs=pairs.visible,
            sequences=self.sequences,
            recomputed_matrices=self.recomputed_matrices,
            recomputed_pairs=pairs.again,
        )

    def rates(self, flops: Flops, seconds: float, devices: int) -> dict[str, float | None]:
        """Speed of a step that took `seconds` on `devices` devices; the keys of metrics.jsonl."""
        shares = {"mfu": flops.model, "mfu_full_attention": flops.model_full_attention, "hfu": flops.hardware}
        peak = self.peak.flops_per_s
        return {
            "tokens_per_s": self.tokens / seconds,
            "tokens_per_s_per_device": self.tokens / seconds / devices,
            "model_tflops_per_device": flops.model / seconds / devices / 1e12,
            **{
                name: peak and mfu(done, step_time_s=seconds, devices=devices, peak_flops_per_s=peak)
                for name, done in shares.items()
            },
        }


class StepMeter:
    """Measures one optimizer step between `start` and `finish`; all ranks must call both.

    tracked_steps   so many first steps of a CPU run count their tensors (see `PeakMemory`)
    waits           knows what this rank waits for; None where that is not measured, alike on all ranks
    store           of the layers' activations; measured if it is a HostStore
    """

    def __init__(
        self,
        mesh: Mesh,
        attention: ContextParallel,
        cost: StepCost,
        *,
        tracked_steps: int = 0,
        waits: WaitClock | None = None,
        store: object = None,
    ) -> None:
        self._mesh, self._attention, self._cost, self._waits = mesh, attention, cost, waits
        self._offload = [attention.group.transport.copies, *([store.times] if isinstance(store, HostStore) else [])]
        self._messages = attention.group.transport.messages
        self._memory = PeakMemory(mesh.device, tracked_steps)
        self._started = 0.0
        self._batch_wait_s: float | None = None
        self._waited_before = 0.0

    def warning(self, row: dict[str, Any]) -> str | None:
        """A sentence when the step of a row is faster than the device can be: then no figure of it can be trusted."""
        peak = self._cost.peak
        return above_peak_warning("hardware FLOPs", (row["hfu"] or 0.0) * (peak.flops_per_s or 0.0), peak)

    def start(self) -> None:
        """The edge before a step."""
        self._attention.reset_traffic()
        self._memory.reset()
        self._synchronize()
        if self._waits is not None:
            self._waits.take()  # what validation waited is no part of a step
        for times in (*self._offload, self._messages):
            times.start()
        self._started, self._batch_wait_s = time.perf_counter(), None

    def have_batches(self) -> None:
        """The batches of the step are there."""
        self._batch_wait_s = time.perf_counter() - self._started

    def count_tensors(self) -> contextlib.AbstractContextManager[None]:
        """Between `start` and `finish`, around forward, loss, backward and optimizer."""
        return self._memory.count_tensors()

    def finish(self, step: int, result: StepResult, *, stop: bool = False) -> tuple[dict[str, Any], bool]:
        """(row of metrics.jsonl for step number `step` from 1, whether any rank was asked to stop)."""
        self._synchronize()
        own = {"step_time_s": time.perf_counter() - self._started, **self._of_this_rank(), "stop": float(stop)}
        largest, waits = self._reduce(own)
        stopping, seconds = largest.pop("stop"), largest.pop("step_time_s")
        assert seconds is not None
        row = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.learning_rate,
            "tokens": self._cost.tokens,
            "step_time_s": seconds,
            "visible_pairs": result.pairs.visible,
            "recomputed_pairs": result.pairs.again,
            **self._rates(result, seconds),
            **{
                name: int(value) if value is not None and name.endswith("bytes") else value
                for name, value in largest.items()
            },
            "straggler_rank": find_straggler(waits, seconds),
            "rank_wait_s_min": min(waits, default=None),
            "rank_wait_s_max": max(waits, default=None),
        }
        return row, bool(stopping)

    def _rates(self, result: StepResult, seconds: float) -> dict[str, float | None]:
        """Speed of the step; None throughout where it computed nothing, as no figure of speed can be had of that."""
        rates = self._cost.rates(self._cost.flops(result.pairs), seconds, self._mesh.degrees.world_size)
        return dict.fromkeys(rates) if result.loss is None else rates

    def _of_this_rank(self) -> dict[str, float | None]:
        """Figures of which the row holds the largest over ranks."""
        traffic, messages = self._attention.traffic(), self._messages.read()
        offload = total(times.read() for times in self._offload)
        return {
            "batch_wait_s": self._batch_wait_s,
            **self._memory.read(),
            "comm_intra_bytes": traffic.intra_bytes,
            "comm_inter_bytes": traffic.inter_bytes,
            "comm_exposed_s": messages.exposed_s if messages.transferred_bytes else None,
            "comm_exposed_share": messages.exposed_share(self._attention.idle_wire_s()),
            "offload_bytes": offload.transferred_bytes or None,
            "offload_copy_s": offload.transfer_s,
            "offload_exposed_s": offload.exposed_s,
        }

    def _reduce(self, own: dict[str, float | None]) -> tuple[dict[str, float | None], list[float]]:
        """(the largest of each of `own` over ranks, what every rank waited or nothing if unknown); one collective."""
        numbers = list(own.values())
        if self._waits is None:
            return dict(zip(own, max_over_ranks(numbers, self._mesh.device), strict=True)), []
        waited = self._waited_before + self._waits.take()
        numbers += [waited if rank == self._mesh.rank else None for rank in range(self._mesh.degrees.world_size)]
        with self._waits.waiting("all_reduce"):
            found = max_over_ranks(numbers, self._mesh.device)
        self._waited_before = self._waits.take()
        return dict(zip(own, found, strict=False)), [wait or 0.0 for wait in found[len(own) :]]

    def _synchronize(self) -> None:
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)


class StepProfiler:
    """Traces the steps of `profile` (null: none) and writes rank<NNNN>.json into `folder` when the last one ends."""

    def __init__(self, profile: str | None, folder: Path, rank: int) -> None:
        self._steps = range(0) if profile is None else range(*map(int, profile.split(":")))
        self._path = folder / f"rank{rank:04d}.json"
        self._profiler: torch.profiler.profile | None = None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around step number `step` (from 1)."""
        if step in self._steps and self._profiler is None:
            self._profiler = torch.profiler.profile(profile_memory=True, acc_events=True)  # torch 2.11 warns else
            self._profiler.start()
        with torch.profiler.record_function(f"step {step}"):
            yield
        if self._profiler is not None and step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Writes a trace that is still running, when training ended before its last step."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
        self._profiler = None
