"""Records a run: metrics.jsonl, events.jsonl, progress lines, TensorBoard. Only rank 0 writes."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config.errors import ConfigError
from engine.data.build import Progress
from engine.runs import figures
from engine.runs.figures import EVALUATION_NAMES, binary_bytes, count, percent, plain
from engine.runs.folder import RunFolder
from engine.training.guard import Verdict
from engine.training.rank.faults import FAULT_VARIABLE
from engine.training.rank.process import RankStatus


class Recorder:
    """Writes rows and events of rank 0 to the run folder; on other ranks it only updates `status`."""

    def __init__(self, run: RunFolder, status: RankStatus, *, rank: int, tensorboard: bool) -> None:
        self._run, self._status, self._writes = run, status, rank == 0
        self._tensorboard = open_tensorboard(run) if tensorboard and self._writes else None
        self._warned = False
        self._stage = ""

    def phase(self, name: str) -> None:
        """Enter phase `name`, which live progress and errors show."""
        self._status.phase = name
        if self._writes:
            self._run.append_event("phase", phase=name)

    def save(self, path: Path) -> None:
        """Copy a file into the run folder, if it exists."""
        if self._writes and path.is_file():
            shutil.copyfile(path, self._run.path / path.name)

    def _emit(self, kind: str, line: str, **facts: Any) -> None:
        """Append an event and print a line."""
        if self._writes:
            self._run.append_event(kind, **facts)
            print(line, flush=True)

    def announce_faults(self, faults: Sequence[str]) -> None:
        """Report injected faults, so that they are not taken for real ones."""
        for fault in faults:
            self._emit("fault_injected", f"warning: {FAULT_VARIABLE} is set: {fault}", fault=fault)

    def preparing(self, progress: Progress) -> None:
        """Report progress of data preparation: one log line per stage."""
        self._status.advance()
        if self._writes and progress.stage != self._stage:
            self._stage = progress.stage
            print(f"prepare data: {progress.stage}", flush=True)

    def warn(self, message: str) -> None:
        """Record a warning, which the screen and `burst status` show."""
        self._emit("warning", f"warning: {message}", message=message)

    def warn_once(self, message: str | None) -> None:
        """Record the first of the warnings that every step may repeat; None: no warning."""
        if message is not None and not self._warned:
            self._warned = True
            self.warn(message)

    def note(self, message: str) -> None:
        """Record a note for the user."""
        self._emit("note", f"note: {message}", message=message)

    def kernel_chosen(self, name: str, reason: str, others: Mapping[str, str]) -> None:
        """Record the chosen attention kernel; `others` has the reason against each other one."""
        line = f"attention kernel {name} ({reason})"
        self._emit("attention_kernel", line, name=name, reason=reason, others=dict(others))

    def restored(self, step: int, run_id: str) -> None:
        """Record that training resumes after `step` from a checkpoint of run `run_id`."""
        line = f"resuming after step {step}, from a checkpoint of {run_id}"
        self._emit("restored", line, step=step, run_id=run_id)

    def saved(self, step: int, size_bytes: int, stall_s: float, seconds: float) -> None:
        """Record a committed checkpoint; stall_s: how long training was blocked."""
        took = f"{binary_bytes(size_bytes)} in {figures.seconds(seconds)}"
        line = f"checkpoint of step {step}: {took}, training waited {figures.seconds(stall_s)}"
        self._emit("checkpoint", line, step=step, bytes=size_bytes, stall_s=stall_s, seconds=seconds)

    def dropped(self, step: int, verdict: Verdict, samples: range) -> None:
        """Record that step `step` (from 1), over these samples of the stream, was not applied."""
        first, last = samples.start, samples.stop - 1
        line = f"step {step} is dropped ({verdict.action}): {verdict.reason}; samples {first} to {last}"
        facts = {"reason": verdict.reason, "reaction": verdict.action, "first_sample": first, "last_sample": last}
        self._emit("dropped", line, step=step, **facts)

    def row(self, row: dict[str, Any], total_steps: int | None = None) -> None:
        """Record the figures of one optimizer step of `total_steps`, or of an evaluation without training (None)."""
        if not self._writes:
            return
        if total_steps is not None:
            self._status.faults.at_metrics(row["step"])
        self._run.append_metrics(row)
        print(progress_line(row, total_steps), flush=True)
        if self._tensorboard is not None:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step":
                    self._tensorboard.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flush TensorBoard."""
        if self._tensorboard is not None:
            self._tensorboard.close()


def open_tensorboard(run: RunFolder, module: str = "torch.utils.tensorboard") -> Any:
    """Open a SummaryWriter of `module` for RUN/tensorboard; raises ConfigError if it cannot be imported."""
    try:
        writer = importlib.import_module(module).SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "train.tensorboard=true, but the package tensorboard is not installed; "
            "install it (pip install tensorboard) or set train.tensorboard=false"
        ) from error
    return writer(str(run.path / "tensorboard"))


def _by_position(buckets: Sequence[Mapping[str, Any]]) -> str:
    return "  ".join(f"[{item['first']:,} to {item['last']:,}] {plain(item['loss'])}" for item in buckets)


def _by_depth(depths: Sequence[Mapping[str, Any]]) -> str:
    return "  ".join(f"[depth {item['depth']:.0%}] {plain(item['gain'])}" for item in depths)


def _named(key: str) -> Callable[[float], str]:
    return lambda value: f"{EVALUATION_NAMES[key]} {plain(value)}"


# Format of each figure in a log line, in this order; names and units are those of the screen.
_FIGURES: Mapping[str, Callable[[Any], str]] = {
    "loss": lambda value: f"loss {plain(value)}",
    "grad_norm": lambda value: f"gradient norm {value:.3f}",
    "lr": lambda value: f"learning rate {value:.2e}",
    "tokens_per_s": lambda value: f"{count(value)} tokens/s",
    "mfu": lambda value: f"MFU {percent(value)}",
    "peak_memory_bytes": lambda value: f"memory {binary_bytes(value)}",
    "validation_loss": _named("validation_loss"),
    "validation_bits_per_byte": _named("validation_bits_per_byte"),
    "validation_loss_by_position": _by_position,
    "needle_accuracy": _named("needle_accuracy"),
    "needle_gain": _named("needle_gain"),
    "needle_by_depth": _by_depth,
}


def progress_line(row: Mapping[str, Any], total_steps: int | None) -> str:
    """Return one log line: step, loss, gradient norm, speed, MFU, memory and, if measured, validation.

    total_steps None: an evaluation without training, which has validation figures only.
    """
    shown = [name for name in _FIGURES if total_steps is not None or name.startswith(("validation", "needle"))]
    head = f"step {row['step']}" if total_steps is None else f"step {row['step']}/{total_steps}"
    return "  ".join([head, *(_FIGURES[name](row[name]) for name in shown if row.get(name) is not None)])
