"""Measures every optimizer step and builds its row of metrics.jsonl.

docs/training.md defines each figure, engine/predict/flops.py the conventions for FLOPs. A figure that is not
available is None, never 0.
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

ROUTER_FIGURES = ("auxiliary_loss", "expert_load_max", "idle_experts")  # null without experts


def peak_pinned_bytes() -> int | None:
    """Return the peak of pinned host memory of this process so far, in bytes; None without a GPU."""
    peak = torch.cuda.host_memory_stats().get("allocated_bytes.peak")
    return None if peak is None else int(peak)


class PeakMemory:
    """Peak memory of this process: per step of the CUDA allocator, or on a CPU the resident set since the start.

    Args:
        device: Of the rank.
        tracked_steps: In this many first steps of a CPU run live tensors are counted as well. The first step alone
            shows less than later ones, since optimizer states exist only at its end.
    """

    def __init__(self, device: torch.device, tracked_steps: int = 0) -> None:
        self._gpu = device if device.type == "cuda" else None
        self._steps_left = 0 if self._gpu else tracked_steps
        self._tracker, self._tracked = LiveTensorTracker(), False

    def reset(self) -> None:
        """Start a new peak; no effect on a CPU, where the resident set's peak cannot be reset."""
        if self._gpu is not None:
            torch.cuda.reset_peak_memory_stats(self._gpu)

    @contextlib.contextmanager
    def count_tensors(self) -> Iterator[None]:
        """Count live tensors inside the body, one step, if it is one of the first."""
        self._tracked = self._steps_left > 0
        if not self._tracked:
            yield
            return
        self._steps_left -= 1
        self._tracker.reset_peak()
        with self._tracker:
            yield

    def read(self) -> dict[str, int | None]:
        """Return the peaks in bytes, by their names in metrics.jsonl."""
        pinned, tracker = peak_pinned_bytes(), self._tracker if self._tracked else None
        return {
            "peak_memory_bytes": torch.cuda.max_memory_allocated(self._gpu) if self._gpu else peak_resident_bytes(),
            "peak_memory_reserved_bytes": torch.cuda.max_memory_reserved(self._gpu) if self._gpu else None,
            "peak_tensor_bytes": tracker.peak_bytes if tracker else None,
            "peak_host_bytes": tracker.peak_host_bytes if tracker else pinned,
        }


@dataclass(frozen=True)
class StepCost:
    """The size of one optimizer step over all ranks, without the pairs of its batch.

    Attributes:
        model: Shape.
        seq_len: Tokens per sequence.
        sequences: Sequences of all ranks and micro-steps.
        recomputed_matrices: Parameters whose matmuls with every token are recomputed in backward.
        peak: Of one device.
    """

    model: ModelConfig
    seq_len: int
    sequences: int
    recomputed_matrices: int
    peak: Peak

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.sequences * self.seq_len

    def flops(self, pairs: AttendedPairs) -> Flops:
        """Return the FLOPs of a step whose sequences have these pairs, summed over layers."""
        return step_flops(
            self.model,
            seq_len=self.seq_len,
            visible_pairs=pairs.visible,
            sequences=self.sequences,
            recomputed_matrices=self.recomputed_matrices,
            recomputed_pairs=pairs.again,
        )

    def rates(self, flops: Flops, seconds: float, devices: int) -> dict[str, float | None]:
        """Return the rates of a step that took `seconds` on `devices` devices, by their names in metrics.jsonl."""
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
    """Measures one optimizer step between `start` and `finish`, which are collective over all ranks.

    Args:
        mesh: Ranks.
        attention: Counts the bytes of its messages.
        cost: Size of a step.
        tracked_steps: See `PeakMemory`.
        waits: Counts what this rank waits for; None, on all ranks, if that is not measured.
        store: Of the layers' activations; measured if it is a HostStore.
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
        """Return a warning if the step of `row` is faster than the device's peak, so its figures cannot be trusted."""
        peak = self._cost.peak
        return above_peak_warning("hardware FLOPs", (row["hfu"] or 0.0) * (peak.flops_per_s or 0.0), peak)

    def start(self) -> None:
        """Start measuring a step."""
        self._attention.reset_traffic()
        self._memory.reset()
        self._synchronize()
        if self._waits is not None:
            self._waits.take()  # drop the waits of a validation before the step
        for times in (*self._offload, self._messages):
            times.start()
        self._started, self._batch_wait_s = time.perf_counter(), None

    def have_batches(self) -> None:
        """Record how long the step waited for its batches."""
        self._batch_wait_s = time.perf_counter() - self._started

    def count_tensors(self) -> contextlib.AbstractContextManager[None]:
        """Count live tensors inside the body: forward, loss, backward and optimizer."""
        return self._memory.count_tensors()

    def finish(self, step: int, result: StepResult, *, stop: bool = False) -> tuple[dict[str, Any], bool]:
        """Return the step's row of metrics.jsonl, and whether any rank was asked to stop.

        Args:
            step: From 1.
            result: Of the step.
            stop: Whether this rank was asked to stop.
        """
        self._synchronize()
        local = {"step_time_s": time.perf_counter() - self._started, **self._of_this_rank(), "stop": float(stop)}
        largest, waits = self._reduce(local)
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
            **{name: result.routers.get(name) for name in ROUTER_FIGURES},
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
        """Return the rates of the step; all None if it computed nothing (no labels)."""
        rates = self._cost.rates(self._cost.flops(result.pairs), seconds, self._mesh.degrees.world_size)
        return dict.fromkeys(rates) if result.loss is None else rates

    def _of_this_rank(self) -> dict[str, float | None]:
        """Return this rank's figures; the row has their maximum over ranks."""
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

    def _reduce(self, local: dict[str, float | None]) -> tuple[dict[str, float | None], list[float]]:
        """Return the maximum of each figure over ranks and every rank's wait, empty if unknown; one collective."""
        numbers = list(local.values())
        if self._waits is None:
            return dict(zip(local, max_over_ranks(numbers, self._mesh.device), strict=True)), []
        waited = self._waited_before + self._waits.take()
        numbers += [waited if rank == self._mesh.rank else None for rank in range(self._mesh.degrees.world_size)]
        with self._waits.waiting("all_reduce"):
            largest = max_over_ranks(numbers, self._mesh.device)
        self._waited_before = self._waits.take()  # the wait in this very collective counts for the next step
        return dict(zip(local, largest, strict=False)), [wait or 0.0 for wait in largest[len(local) :]]

    def _synchronize(self) -> None:
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)


class StepProfiler:
    """Traces the steps START:STOP of `profile` (None: no step) into `folder`/rank<NNNN>.json."""

    def __init__(self, profile: str | None, folder: Path, rank: int) -> None:
        self._steps = range(0) if profile is None else range(*map(int, profile.split(":")))
        self._path = folder / f"rank{rank:04d}.json"
        self._profiler: torch.profiler.profile | None = None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace the body, step `step` (from 1), if it is one of the steps to trace."""
        if step in self._steps and self._profiler is None:
            self._profiler = torch.profiler.profile(profile_memory=True, acc_events=True)  # torch 2.11 warns else
            self._profiler.start()
        with torch.profiler.record_function(f"step {step}"):
            yield
        if self._profiler is not None and step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Write the trace if it is still running."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
        self._profiler = None
