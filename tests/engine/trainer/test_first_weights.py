"""The weights that training begins with: set once, and neither drawn nor read where a checkpoint brings all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Pools
from tiny_training import tiny_config

import engine.trainer
from engine.config import AttentionConfig, DataConfig, RunConfig, dump_config
from engine.config_checkpoint import CheckpointConfig
from engine.model.parallelize import build_empty_model
from engine.run.rank_process import run_rank
from engine.runs import RunFolder, create_run
from engine.trainer import run_training


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("first_weights")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return tiny_config(
        train={
            "steps": 4,
            "warmup_metric_steps": 1,
            "eval_batches": 1,
            "peak_flops_per_device": 1e12,
            "checkpoint": CheckpointConfig(every_steps=2),
        },
        model={"vocab_size": 320, "tie_embeddings": request.param},
        attention={"preset": "burst"},
        data=DataConfig(format="text", paths=(str(folder / "text.txt"),), prepared_dir=str(folder / "prepared")),
    )


def empty_means_nan(*args: Any) -> Any:
    """As build_empty_model, but what nobody sets is seen."""
    model, attention = build_empty_model(*args)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model, attention


def train(path: str, config: RunConfig, sets_first_weights: bool) -> int:
    """Exit code of this rank, whose weights are no numbers until somebody sets them."""
    run = RunFolder(Path(path))
    set_them = engine.trainer.set_first_weights
    with (
        mock.patch.object(engine.trainer, "build_empty_model", empty_means_nan),
        mock.patch.object(engine.trainer, "set_first_weights", side_effect=set_them) as asked,
    ):
        code = run_rank(run, lambda status: run_training(config, run, status))
    assert asked.call_count == int(sets_first_weights)
    return code


def new_run(folder: Path, name: str, config: RunConfig) -> RunFolder:
    return create_run(folder / "test" / f"20260101-000000-{name}", {"config.yaml": dump_config(config)})


def last_losses(run: RunFolder) -> tuple[float, float]:
    row = run.read_metrics()[-1]
    return float(row["loss"]), float(row["validation_loss"])


def test_first_weights_are_set_once_and_not_where_a_checkpoint_brings_them(
    ranks: Pools, config: RunConfig, tmp_path: Path
) -> None:
    whole = new_run(tmp_path, "aaaaaa", config)
    assert ranks(2).run(train, str(whole.path), config, True) == [0, 0]

    half = replace(config, train=replace(config.train, steps=2))
    begun = new_run(tmp_path, "bbbbbb", half)
    assert ranks(2).run(train, str(begun.path), half, True) == [0, 0]
    going_on = CheckpointConfig(resume_from=str(begun.path))
    resumed_config = replace(config, train=replace(config.train, checkpoint=going_on))
    resumed = new_run(tmp_path, "cccccc", resumed_config)
    assert ranks(2).run(train, str(resumed.path), resumed_config, False) == [0, 0]
    assert last_losses(resumed) == last_losses(whole)

    only = replace(resumed_config.train, evaluate_only=True, checkpoint=CheckpointConfig(resume_from=str(whole.path)))
    evaluation = replace(config, train=only, attention=AttentionConfig(preset="single"))
    evaluated = new_run(tmp_path, "dddddd", evaluation)
    assert ranks(1).run(train, str(evaluated.path), evaluation, False) == [0]
    assert evaluated.read_metrics()[-1]["validation_loss"] == pytest.approx(last_losses(whole)[1], rel=1e-5)
