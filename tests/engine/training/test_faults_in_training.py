"""Faults in real training: NaN ends every rank with the step named, a slow rank is found, a full disk is said."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from testkit.ranks import Pools
from testkit.whole_runs import create_run_of, train_on_rank, train_until_error, whole_config

from engine.config.settings import DataConfig, RunConfig
from engine.training.rank.faults import FAULT_VARIABLE, read_faults


def config_of(corpus: DataConfig, **sections: Any) -> RunConfig:
    return whole_config(corpus, train={"steps": 4}, **sections)


def train_with_fault(path: str, config: RunConfig, fault: str) -> int:
    """Exit code of this rank."""
    return train_on_rank(path, config, partial(read_faults, environment={FAULT_VARIABLE: fault}))


# Of the slow rank, longer than a busy machine holds up any other: who is late by more is the straggler, and rightly so.
SLOW_S = 2.0


def test_a_loss_that_is_nan_on_one_rank_ends_all_and_names_the_step(
    ranks: Pools, corpus: DataConfig, tmp_path: Path
) -> None:
    config = config_of(corpus, attention={"preset": "burst"})
    run = create_run_of(config, tmp_path)
    assert ranks(2).run(train_with_fault, str(run.path), config, "nan;1;3") == [1, 1]
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    for error in run.rank_errors():
        assert "the loss of step 3 is nan: training has diverged" in error["message"]
        assert "Lower optimizer.learning_rate" in error["message"]
        assert (error["kind"], error["step"]) == ("user", 3)
    assert run.read_state()["state"] == "failed"
    assert [event["fault"] for event in run.read_events() if event["kind"] == "fault_injected"] == [
        "nan on rank 1 at step 3"
    ]


def test_a_slow_rank_is_the_straggler_of_its_steps(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    config = config_of(corpus, attention={"preset": "burst"})
    run = create_run_of(config, tmp_path)
    assert ranks(4).run(train_with_fault, str(run.path), config, f"slow:{SLOW_S};2;3") == [0] * 4
    rows = run.read_metrics()
    assert [row["straggler_rank"] for row in rows[2:]] == [2] * 2, rows
    for row in rows[2:]:
        assert row["rank_wait_s_max"] >= 0.9 * SLOW_S
        assert 0 <= row["rank_wait_s_min"] <= row["rank_wait_s_max"] - SLOW_S / 2
        assert row["step_time_s"] >= SLOW_S
    assert all(row["rank_wait_s_max"] is not None for row in rows[:2])


def test_where_not_every_wait_is_seen_none_is_reported(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    config = config_of(corpus, parallel={"tp_size": 2}, attention={"preset": "megatron_tp"})
    run = create_run_of(config, tmp_path)
    assert ranks(2).run(train_with_fault, str(run.path), config, "slow:0.01;1;2") == [0, 0]
    for row in run.read_metrics():
        assert (row["straggler_rank"], row["rank_wait_s_min"], row["rank_wait_s_max"]) == (None, None, None)


def test_a_rank_alone_has_nobody_to_wait_for(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    config = config_of(corpus)
    run = create_run_of(config, tmp_path)
    assert ranks(1).run(train_with_fault, str(run.path), config, "disk;0;4") == [1]
    rows = run.read_metrics()
    assert [row["rank_wait_s_max"] for row in rows] == [None] * 3
    (error,) = run.rank_errors()
    assert "No space left on device" in error["message"]
    assert error["step"] == 4


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"ranks_per_node": 4}, "= 4 ranks, but 2 ranks were started, 2 of them on this node"),
        ({"ranks_per_node": 1, "num_nodes": 2}, "--nproc-per-node 1"),
    ],
)
def test_other_ranks_than_configured_are_refused_on_every_rank(
    ranks: Pools, corpus: DataConfig, tmp_path: Path, cluster: dict[str, int], words: str
) -> None:
    config = config_of(corpus, attention={"preset": "burst"}, cluster=cluster)
    for error in ranks(2).run(train_until_error, str(create_run_of(config, tmp_path).path), config):
        assert error.startswith("ConfigError: ")
        assert words in error
