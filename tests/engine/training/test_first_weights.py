"""The weights that training begins with: set once, and neither drawn nor read where a checkpoint brings all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from testkit.ranks import Pools
from testkit.whole_runs import create_run_of, train_on_rank, whole_config

from engine.config.settings import AttentionConfig, CheckpointConfig, DataConfig, RunConfig
from engine.runs.folder import RunFolder


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def config(request: pytest.FixtureRequest, corpus: DataConfig) -> RunConfig:
    return whole_config(
        corpus,
        train={"steps": 4, "checkpoint": CheckpointConfig(every_steps=2)},
        model={"tie_embeddings": request.param},
        attention={"preset": "burst"},
    )


def train(path: str, config: RunConfig) -> int:
    """Exit code of this rank, whose weights are no numbers until somebody sets them: torch fills new memory so."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return train_on_rank(path, config)
    finally:
        torch.use_deterministic_algorithms(False)


def sets_first_weights(run: RunFolder) -> bool:
    """Whether a run drew or read them."""
    return "first weights" in [event.get("phase") for event in run.read_events()]


def last_losses(run: RunFolder) -> tuple[float, float]:
    row = run.read_metrics()[-1]
    return float(row["loss"]), float(row["validation_loss"])


def test_first_weights_are_set_once_and_not_where_a_checkpoint_brings_them(
    ranks: Pools, config: RunConfig, tmp_path: Path
) -> None:
    whole = create_run_of(config, tmp_path, "aaaaaa")
    assert ranks(2).run(train, str(whole.path), config) == [0, 0]
    assert sets_first_weights(whole) is True

    half = replace(config, train=replace(config.train, steps=2))
    begun = create_run_of(half, tmp_path, "bbbbbb")
    assert ranks(2).run(train, str(begun.path), half) == [0, 0]
    assert sets_first_weights(begun) is True
    going_on = CheckpointConfig(resume_from=str(begun.path))
    resumed_config = replace(config, train=replace(config.train, checkpoint=going_on))
    resumed = create_run_of(resumed_config, tmp_path, "cccccc")
    assert ranks(2).run(train, str(resumed.path), resumed_config) == [0, 0]
    assert sets_first_weights(resumed) is False
    assert last_losses(resumed) == last_losses(whole)

    only = replace(resumed_config.train, evaluate_only=True, checkpoint=CheckpointConfig(resume_from=str(whole.path)))
    evaluation = replace(config, train=only, attention=AttentionConfig(preset="single"))
    evaluated = create_run_of(evaluation, tmp_path, "dddddd")
    assert ranks(1).run(train, str(evaluated.path), evaluation) == [0]
    assert sets_first_weights(evaluated) is False
    assert evaluated.read_metrics()[-1]["validation_loss"] == pytest.approx(last_losses(whole)[1], rel=1e-5)
