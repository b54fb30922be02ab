"""torch.profiler over chosen steps: train.profile=START:STOP gives one Chrome trace per rank in RUN/profile/."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch


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
            self._profiler = torch.profiler.profile(profile_memory=True, with_stack=False)
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
