"""Where a run's figures go: metrics.jsonl, events.jsonl, lines of progress, TensorBoard. Rank 0 only."""

from __future__ import annotations

from typing import Any

from engine.data import Progress
from engine.errors import ConfigError
from engine.run.rank_process import RankStatus
from engine.runs import RunFolder


class Recorder:
    """Writes rows and events of rank 0 into the run folder; on other ranks every call only keeps `status`."""

    def __init__(self, run: RunFolder, status: RankStatus, *, rank: int, tensorboard: bool, log_interval: int) -> None:
        self._run = run
        self._status = status
        self._writes = rank == 0
        self._log_interval = log_interval
        self._tensorboard = open_tensorboard(run) if tensorboard and self._writes else None
        self._warned = False
        self._stage = ""

    def phase(self, name: str) -> None:
        """The run enters phase `name`: live progress shows it, an error names it."""
        self._status.phase = name
        if self._writes:
            self._run.append_event("phase", phase=name)

    def preparing(self, progress: Progress) -> None:
        """What the preparation of data reports: one line per stage in the log."""
        if self._writes and progress.stage != self._stage:
            self._stage = progress.stage
            print(f"prepare data: {progress.stage}", flush=True)

    def warn(self, message: str | None) -> None:
        """A warning for people, said once per run; None is none."""
        if message is not None and self._writes and not self._warned:
            self._warned = True
            self._run.append_event("warning", message=message)
            print(f"warning: {message}", flush=True)

    def step(self, row: dict[str, Any], total_steps: int) -> None:
        """The row of one optimizer step."""
        if not self._writes:
            return
        self._run.append_metrics(row)
        if row["step"] % self._log_interval == 0 or row["step"] == total_steps:
            print(progress_line(row, total_steps), flush=True)
        if self._tensorboard is not None:
            for name, value in row.items():
                if value is not None and name != "step":
                    self._tensorboard.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Writes out what TensorBoard still holds."""
        if self._tensorboard is not None:
            self._tensorboard.close()


def open_tensorboard(run: RunFolder) -> Any:
    """A writer into RUN/tensorboard; raises ConfigError when the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "train.tensorboard=true, but the package tensorboard is not installed; "
            "install it (pip install tensorboard) or set train.tensorboard=false"
        ) from error
    return SummaryWriter(str(run.path / "tensorboard"))


def progress_line(row: dict[str, Any], total_steps: int) -> str:
    """One line for logs: step, loss, gradient norm, speed, MFU, memory and, where measured, validation."""
    parts = [
        f"step {row['step']}/{total_steps}",
        f"loss {row['loss']:.4f}",
        f"grad_norm {row['grad_norm']:.3f}",
        f"lr {row['lr']:.2e}",
        f"{row['tokens_per_s']:,.0f} tokens/s",
    ]
    if row["mfu"] is not None:
        parts.append(f"mfu {100 * row['mfu']:.1f}%")
    if row["peak_memory_bytes"] is not None:
        parts.append(f"memory {row['peak_memory_bytes'] / 2**30:.2f} GiB")
    if row.get("validation_loss") is not None:
        parts.append(f"validation_loss {row['validation_loss']:.4f}")
    if row.get("validation_bits_per_byte") is not None:
        parts.append(f"bits_per_byte {row['validation_bits_per_byte']:.4f}")
    return "  ".join(parts)
