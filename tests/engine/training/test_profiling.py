"""Which steps are traced, and the trace itself."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine.training.metrics import StepProfiler


def run_steps(profiler: StepProfiler, steps: int) -> None:
    for step in range(1, steps + 1):
        with profiler.step(step):
            torch.ones(4).sum()


def step_names(path: Path) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return sorted({event["name"] for event in events if str(event.get("name")).startswith("step ")})


def test_the_trace_holds_exactly_the_chosen_steps(tmp_path: Path) -> None:
    run_steps(StepProfiler("2:4", tmp_path / "profile", rank=3), 5)
    assert step_names(tmp_path / "profile" / "rank0003.json") == ["step 2", "step 3"]


def test_a_trace_cut_short_is_written_at_close(tmp_path: Path) -> None:
    profiler = StepProfiler("2:9", tmp_path, rank=0)
    run_steps(profiler, 3)
    profiler.close()
    assert step_names(tmp_path / "rank0000.json") == ["step 2", "step 3"]


def test_no_profile_writes_nothing(tmp_path: Path) -> None:
    profiler = StepProfiler(None, tmp_path / "profile", rank=0)
    run_steps(profiler, 2)
    profiler.close()
    assert not (tmp_path / "profile").exists()
