"""Runs that only evaluate: the figures of the run whose weights they are, on any ranks and lengths, and no training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testkit.ranks import Pools
from testkit.whole_runs import create_run_of, small_corpus, train_until_error, trained, whole_config

from engine.config.settings import AttentionConfig, CheckpointConfig, RunConfig
from engine.pretrained.export import ExportOrder, export
from engine.runs.folder import RunFolder
from engine.runs.manifest import read_manifest
from engine.training.rank.process import RankStatus
from engine.training.trainer import Trainer

RELATIVE = 1e-5  # the same fp32 sums in another order
FIGURES = ("validation_loss", "validation_bits_per_byte", "needle_accuracy")
TABLES = ("validation_loss_by_position", "needle_by_depth")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluate_only")


@pytest.fixture(scope="module")
def config(folder: Path) -> RunConfig:
    """Three steps on two ranks with a checkpoint at the end, and needles at two depths."""
    train = {"seq_len": 120, "steps": 3, "eval_samples": 2, "checkpoint": CheckpointConfig(every_steps=3)}
    needles = {"eval_needle_depths": 2, "eval_needle_samples": 2, "eval_position_buckets": 3}
    corpus = replace(small_corpus(folder), validation_fraction=0.2)
    return whole_config(corpus, train={**train, **needles}, attention={"preset": "burst"})


@pytest.fixture(scope="module")
def source(folder: Path, config: RunConfig, ranks: Pools) -> RunFolder:
    return trained(ranks, 2, config, folder / "runs", "aaaaaa")


def evaluation_of(config: RunConfig, source: Path, **train: Any) -> RunConfig:
    changed = replace(config.train, evaluate_only=True, checkpoint=CheckpointConfig(resume_from=str(source)), **train)
    return replace(config, train=changed, attention=AttentionConfig(preset="single"))


def test_on_the_same_ranks_every_figure_is_the_same_number(
    source: RunFolder, folder: Path, config: RunConfig, ranks: Pools
) -> None:
    same = replace(evaluation_of(config, source.path), attention=config.attention)
    run = trained(ranks, 2, same, folder / "runs", "abcabc")
    (row,), expected, summary = run.read_metrics(), source.read_metrics()[-1], source.read_summary()
    assert summary is not None
    assert [depth["depth"] for depth in expected["needle_by_depth"]] == [0.0, 1.0]
    assert summary["final_needle_by_depth"] == expected["needle_by_depth"]
    assert (summary["final_needle_accuracy"], summary["final_needle_gain"]) == (0.0, expected["needle_gain"])
    assert "needle_gain" not in source.read_metrics()[0]
    names = (*FIGURES, "needle_gain", *TABLES)
    assert {name: row[name] for name in names} == {name: expected[name] for name in names}


def test_the_evaluation_of_a_run_has_its_last_figures(
    source: RunFolder, folder: Path, config: RunConfig, ranks: Pools
) -> None:
    own = evaluation_of(config, source.path)
    run = trained(ranks, 1, own, folder / "runs", "bbbbbb")
    (row,), summary = run.read_metrics(), run.read_summary()
    assert summary is not None
    expected = source.read_metrics()[-1]
    assert {name: row[name] for name in FIGURES} == pytest.approx(
        {name: expected[name] for name in FIGURES}, rel=RELATIVE
    )
    # The difference of two losses of six nats, which fp32 knows to 5e-7 each: as exact as the gain of a depth below.
    assert row["needle_gain"] == pytest.approx(expected["needle_gain"], rel=RELATIVE, abs=1e-6)
    for name in TABLES:
        for found, known in zip(row[name], expected[name], strict=True):
            assert found == pytest.approx(known, rel=RELATIVE, abs=1e-6)
    assert (summary["status"], summary["steps"], summary["evaluated_step"]) == ("completed", 0, 3)
    assert summary["evaluated_run"] == source.run_id
    assert summary["tokens_per_s"] is None
    assert row["evaluation_s"] > 0
    assert row["peak_memory_bytes"] > 0
    assert not list(run.path.glob("checkpoints/step-*"))
    phases = [event["phase"] for event in run.read_events() if event["kind"] == "phase"]
    assert phases[-2:] == ["restore", "evaluate"]


def test_length_and_step_may_be_others(source: RunFolder, folder: Path, config: RunConfig, ranks: Pools) -> None:
    """Longer than the training split, even: nothing is trained."""
    own = evaluation_of(config, source.path / "checkpoints" / "step-00000003", seq_len=9000)
    own = replace(own, attention=AttentionConfig(preset="ring"))
    run = trained(ranks, 2, own, folder / "runs", "cccccc")
    (row,) = run.read_metrics()
    assert row["needle_by_depth"][1]["position"] > 8000
    assert row["validation_loss_by_position"][-1]["first"] == 4500


def test_weights_of_a_hugging_face_folder_have_the_figures_of_the_run_that_they_are_of(
    source: RunFolder, folder: Path, config: RunConfig, ranks: Pools
) -> None:
    saved, exported = source.path / "checkpoints" / "step-00000003", folder / "exported"
    export(ExportOrder(saved, config, exported, dtype="float32"), read_manifest(saved))
    own = evaluation_of(replace(config, model=replace(config.model, init_from=str(exported))), saved)
    own = replace(own, train=replace(own.train, checkpoint=CheckpointConfig()))
    (row,) = trained(ranks, 1, own, folder / "runs", "abcdab").read_metrics()
    expected = source.read_metrics()[-1]["validation_loss"]
    assert (row["step"], row["validation_loss"]) == (0, pytest.approx(expected, rel=RELATIVE))


def optimizer_entries(path: str, config: RunConfig) -> tuple[int, bool]:
    """How many parameters have moments after an evaluation, and whether every batch of it was seen from outside."""
    from engine.parallel.mesh import build_mesh
    from engine.training.rank.recorder import Recorder

    status, run = RankStatus(), RunFolder(Path(path))
    recorder = Recorder(run, status, rank=0, tensorboard=False)
    trainer = Trainer(config, run, build_mesh(config.parallel, config.cluster), recorder, status)
    before = status.advances
    trainer.run()
    return len(trainer.train_step.optimizer.state), status.advances - before > config.train.eval_samples


def test_no_memory_is_spent_on_an_optimizer(source: RunFolder, folder: Path, config: RunConfig, ranks: Pools) -> None:
    own = evaluation_of(config, source.path)
    assert ranks(1).run(optimizer_entries, str(create_run_of(own, folder / "runs", "dddddd").path), own) == [(0, True)]


def test_weights_of_another_model_are_refused(source: RunFolder, folder: Path, config: RunConfig, ranks: Pools) -> None:
    own = evaluation_of(replace(config, model=replace(config.model, ffn_hidden_size=96)), source.path)
    (error,) = ranks(1).run(train_until_error, str(create_run_of(own, folder / "runs", "eeeeee").path), own)
    assert "is of another model or optimizer: model.layers.0.mlp.down_proj.weight is float32 [32, 64] there" in error


def test_needles_that_do_not_fit_end_a_run_before_it_trains(folder: Path, config: RunConfig, ranks: Pools) -> None:
    own = replace(config, train=replace(config.train, seq_len=40))
    run = create_run_of(own, folder / "runs", "ffffff")
    (error,) = ranks(1).run(train_until_error, str(run.path), replace(own, attention=AttentionConfig(preset="single")))
    assert error.startswith("ConfigError: train.eval_needle_depths: sentence, question and answer take up to")
    assert run.read_metrics() == []
