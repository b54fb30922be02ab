"""Faults in real training: NaN ends every rank with the step named, a slow rank is found, a full disk is said."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from testkit.ranks import Pools
from testkit.whole_runs import ended, events_of, whole_config

from engine.config.settings import DataConfig
from engine.runs.folder import RunFolder
from engine.training.rank.faults import FAULT_VARIABLE, read_faults

# Of the slow rank, longer than a busy machine holds up any other: who is late by more is the straggler, and rightly so.
SLOW_S = 2.0


def run_with_fault(
    ranks: Pools, size: int, corpus: DataConfig, folder: Path, fault: str, **sections: Any
) -> tuple[RunFolder, list[int]]:
    """(its folder, exit codes of its ranks) of a run of four steps."""
    config = whole_config(corpus, train={"steps": 4}, **sections)
    return ended(ranks, size, config, folder, partial(read_faults, environment={FAULT_VARIABLE: fault}))


def test_a_nan_loss_of_one_rank_ends_all(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    run, codes = run_with_fault(ranks, 2, corpus, tmp_path, "nan;1;3", attention={"preset": "burst"})
    assert codes == [1, 1]
    assert run.read_state()["state"] == "failed"
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    for error in run.rank_errors():
        assert "the loss of step 3 is nan: training has diverged" in error["message"]
        assert "Lower optimizer.learning_rate" in error["message"]
        assert error["kind"] == "user"
        assert error["step"] == 3
    assert events_of(run, "fault_injected", "fault") == ["nan on rank 1 at step 3"]


def test_a_slow_rank_is_the_straggler_of_its_steps(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    run, codes = run_with_fault(ranks, 4, corpus, tmp_path, f"slow:{SLOW_S};2;3", attention={"preset": "burst"})
    rows = run.read_metrics()
    assert codes == [0] * 4
    assert [row["straggler_rank"] for row in rows[2:]] == [2] * 2, rows
    for row in rows[2:]:
        assert row["rank_wait_s_max"] >= 0.9 * SLOW_S
        assert 0 <= row["rank_wait_s_min"] <= row["rank_wait_s_max"] - SLOW_S / 2
        assert row["step_time_s"] >= SLOW_S
    assert all(row["rank_wait_s_max"] is not None for row in rows[:2])


def test_where_not_every_wait_is_seen_none_is_reported(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    sliced: dict[str, Any] = {"parallel": {"tp_size": 2}, "attention": {"preset": "megatron_tp"}}
    run, codes = run_with_fault(ranks, 2, corpus, tmp_path, "slow:0.01;1;2", **sliced)
    assert codes == [0, 0]
    for row in run.read_metrics():
        assert row["straggler_rank"] is None
        assert row["rank_wait_s_min"] is None
        assert row["rank_wait_s_max"] is None


def test_a_full_disk_ends_the_run(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    run, codes = run_with_fault(ranks, 1, corpus, tmp_path, "disk;0;4")
    (error,) = run.rank_errors()
    assert [row["rank_wait_s_max"] for row in run.read_metrics()] == [None] * 3
    assert codes == [1]
    assert error["step"] == 4
    assert "No space left on device" in error["message"]
