"""torch.profiler over chosen steps: train.profile=START:STOP gives one Chrome trace per rank in RUN/profile/."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.errors import ConfigError


def parse_profile(text: str) -> range:
    """The steps, counted from 1, that "START:STOP" names: START up to and without STOP; raises ConfigError."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None or not 1 <= int(match[1]) < int(match[2]):
        raise ConfigError(
            f"train.profile: got {text!r}; expected START:STOP with 1 <= START < STOP, "
            "for example 5:8 to trace the steps 5, 6 and 7"
        )
    return range(int(match[1]), int(match[2]))


class StepProfiler:
    """Traces the steps of `profile` (null: none) and writes rank<NNNN>.json into `folder` when the last one ends."""

    def __init__(self, profile: str | None, folder: Path, rank: int) -> None:
        self._steps = range(0) if profile is None else parse_profile(profile)
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
