"""Which steps are traced, and the trace itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.training.metrics import StepProfiler


@pytest.mark.parametrize(
    ("profile", "steps", "traced"),
    [("2:4", 5, ["step 2", "step 3"]), ("2:9", 3, ["step 2", "step 3"]), (None, 2, None)],
    ids=["whole", "cut short", "none"],
)
def test_the_trace_holds_exactly_the_chosen_steps(
    tmp_path: Path, profile: str | None, steps: int, traced: list[str] | None
) -> None:
    profiler, path = StepProfiler(profile, tmp_path / "profile", rank=3), tmp_path / "profile" / "rank0003.json"
    for step in range(1, steps + 1):
        with profiler.step(step):
            torch.ones(4).sum()
    assert path.exists() == (profile == "2:4")
    profiler.close()
    events = json.loads(path.read_text())["traceEvents"] if path.exists() else []
    names = {event["name"] for event in events if str(event.get("name")).startswith("step ")}
    assert (sorted(names) or None) == traced
