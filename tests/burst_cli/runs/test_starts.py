"""How long a start is expected to take: as earlier runs took, and never a guess."""

from __future__ import annotations

import json
from pathlib import Path

from burst_cli.plan.memory_check import Estimate, MemoryPlanner, estimate
from burst_cli.runs.starts import earlier_start_s
from engine.config.cluster import ClusterConfig
from engine.config.settings import AttentionConfig, RunConfig, TrainConfig

CONFIG = RunConfig(
    attention=AttentionConfig(preset="burst"),
    train=TrainConfig(seq_len=4096, steps=10),
    cluster=ClusterConfig(ranks_per_node=2, threads_per_rank=4, backend="gloo"),
)


def run_that_started_in(runs_dir: Path, name: str, start_s: int, world_size: int = 2) -> Path:
    """A run whose ranks began to train so many seconds after its launch."""
    path = runs_dir / "tiny" / name
    path.mkdir(parents=True)
    history = [{"at": "2026-01-01T00:00:00.000Z", "state": "starting"}]
    (path / "run.json").write_text(json.dumps({"world_size": world_size, "history": history}))
    event = {"at": f"2026-01-01T00:00:{start_s:02}.000Z", "kind": "phase", "phase": "train"}
    (path / "events.jsonl").write_text(json.dumps(event) + "\n")
    return path


def expected() -> Estimate:
    planner = MemoryPlanner()
    run = planner.resolve(CONFIG)
    found = estimate(run, planner.predict_time(run))
    assert found is not None
    return found


def test_expected_time_without_earlier_runs_is_that_of_the_steps() -> None:
    found = expected()
    assert found.seconds == 10 * found.step_s, "a start that nothing measured is in the expected time"


def test_expected_time_says_that_an_unknown_start_is_left_out() -> None:
    assert "without the start" in expected().source


def test_start_is_the_median_of_earlier_runs_of_the_experiment_on_as_many_ranks(tmp_path: Path) -> None:
    for number, (start_s, world_size) in enumerate([(4, 2), (10, 2), (12, 2), (50, 8)]):
        run_that_started_in(tmp_path, f"20260101-00000{number}-aaaaaa", start_s, world_size)
    assert earlier_start_s(tmp_path, "tiny", 2) == 10.0


def test_start_of_a_resumed_run_is_its_own(tmp_path: Path) -> None:
    own = run_that_started_in(tmp_path, "20260101-000000-aaaaaa", 3)
    run_that_started_in(tmp_path, "20260101-000001-aaaaaa", 40)
    assert earlier_start_s(tmp_path, "tiny", 2, own) == 3.0


def test_start_is_unknown_where_no_run_trained(tmp_path: Path) -> None:
    run_that_started_in(tmp_path, "20260101-000000-aaaaaa", 3)
    (tmp_path / "tiny/20260101-000000-aaaaaa/events.jsonl").write_text("")
    assert earlier_start_s(tmp_path, "tiny", 2) is None
