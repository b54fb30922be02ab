"""Runs that only evaluate: the figures of the run whose weights they are, on any ranks and lengths, and no training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testkit.ranks import Pools
from testkit.whole_runs import create_run_of, events_of, small_corpus, train_until_error, trained, whole_config

from engine.attention.library import resolve_here
from engine.config.settings import AttentionConfig, CheckpointConfig, RunConfig
from engine.distributed.mesh import build_mesh
from engine.export.hugging_face import ExportOrder, export
from engine.runs.checkpoints import read_manifest
from engine.runs.folder import RunFolder
from engine.training.rank.process import RankStatus
from engine.training.rank.recorder import Recorder
from engine.training.trainer import Trainer

RELATIVE = 1e-5  # the same fp32 sums in another order
FIGURES = ("validation_loss", "validation_bits_per_byte", "needle_accuracy")
TABLES = ("validation_loss_by_position", "needle_by_depth")
SINGLE = AttentionConfig(preset="single")


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


def evaluation_of(config: RunConfig, source: Path, attention: AttentionConfig = SINGLE, **train: Any) -> RunConfig:
    changed = replace(config.train, evaluate_only=True, checkpoint=CheckpointConfig(resume_from=str(source)), **train)
    return replace(config, train=changed, attention=attention)


def test_on_the_same_ranks_every_figure_is_the_same_number(
    source: RunFolder, folder: Path, config: RunConfig, ranks: Pools
) -> None:
    run = trained(ranks, 2, evaluation_of(config, source.path, config.attention), folder / "runs", "abcabc")
    (row,), expected, summary = run.read_metrics(), source.read_metrics()[-1], source.read_summary() or {}
    assert [depth["depth"] for depth in expected["needle_by_depth"]] == [0.0, 1.0]
    assert summary["final_needle_by_depth"] == expected["needle_by_depth"]
    assert summary["final_needle_accuracy"] == 0.0
    assert summary["final_needle_gain"] == expected["needle_gain"]
    assert "needle_gain" not in source.read_metrics()[0]
    names = (*FIGURES, "needle_gain", *TABLES)
    assert {name: row[name] for name in names} == {name: expected[name] for name in names}


def test_the_evaluation_of_a_run_has_its_last_figures(
    source: RunFolder, folder: Path, config: RunConfig, ranks: Pools
) -> None:
    run = trained(ranks, 1, evaluation_of(config, source.path), folder / "runs", "bbbbbb")
    (row,), expected, summary = run.read_metrics(), source.read_metrics()[-1], run.read_summary() or {}
    for name in FIGURES:
        assert row[name] == pytest.approx(expected[name], rel=RELATIVE), name
    # The difference of two losses of six nats, which fp32 knows to 5e-7 each: as exact as the gain of a depth below.
    assert row["needle_gain"] == pytest.approx(expected["needle_gain"], rel=RELATIVE, abs=1e-6)
    for name in TABLES:
        for found, known in zip(row[name], expected[name], strict=True):
            assert found == pytest.approx(known, rel=RELATIVE, abs=1e-6)
    facts = {"status": "completed", "steps": 0, "evaluated_step": 3, "evaluated_run": source.run_id}
    assert summary.items() >= {**facts, "tokens_per_s": None}.items()
    assert min(row["evaluation_s"], row["peak_memory_bytes"]) > 0
    assert not list(run.path.glob("checkpoints/step-*"))
    assert events_of(run, "phase", "phase")[-2:] == ["restore", "evaluate"]
    assert events_of(run, "note", "message") == [f"evaluating the weights of {source.run_id} after step 3"]


def test_the_sequence_may_be_longer_than_in_training(
    source: RunFolder, folder: Path, config: RunConfig, ranks: Pools
) -> None:
    """Longer than the training split, even: nothing is trained."""
    saved = source.path / "checkpoints" / "step-00000003"
    own = evaluation_of(config, saved, AttentionConfig(preset="ring"), seq_len=9000)
    (row,) = trained(ranks, 2, own, folder / "runs", "cccccc").read_metrics()
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
    assert row["step"] == 0
    assert row["validation_loss"] == pytest.approx(expected, rel=RELATIVE)


def optimizer_entries(path: str, config: RunConfig) -> tuple[int, bool]:
    """How many parameters have moments after an evaluation, and whether every batch of it was seen from outside."""
    status, run = RankStatus(), RunFolder(Path(path))
    recorder = Recorder(run, status, rank=0, tensorboard=False)
    mesh = build_mesh(config.parallel, config.cluster)
    trainer = Trainer(resolve_here(config, mesh), run, mesh, recorder, status)
    before = status.advances
    trainer.run()
    return len(trainer.train_step.optimizer.state), status.advances - before > config.train.eval_samples


def test_no_memory_is_spent_on_an_optimizer(source: RunFolder, folder: Path, config: RunConfig, ranks: Pools) -> None:
    own = evaluation_of(config, source.path)
    assert ranks(1).run(optimizer_entries, str(create_run_of(own, folder / "runs", "dddddd").path), own) == [(0, True)]


def test_weights_of_another_model_are_refused(source: RunFolder, folder: Path, config: RunConfig, ranks: Pools) -> None:
    other = evaluation_of(replace(config, model=replace(config.model, ffn_hidden_size=96)), source.path)
    run = create_run_of(other, folder / "runs", "eeeeee")
    (error,) = ranks(1).run(train_until_error, str(run.path), other)
    shape = "model.layers.0.mlp.down_proj.weight is float32 [32, 64] there"
    assert f"is of another model or optimizer: {shape}" in error
    assert run.read_metrics() == []


def test_needles_that_do_not_fit_are_refused_before_training(folder: Path, config: RunConfig, ranks: Pools) -> None:
    short = replace(config, train=replace(config.train, seq_len=40), attention=SINGLE)
    run = create_run_of(short, folder / "runs", "ffffff")
    (error,) = ranks(1).run(train_until_error, str(run.path), short)
    assert "ConfigError: train.eval_needle_depths: sentence, question and answer take up to" in error
    assert run.read_metrics() == []
