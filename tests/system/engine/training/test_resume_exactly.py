"""A run that goes on from a checkpoint has its weights and no others, sees the data that come next, and only those."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.ranks import Pools
from testkit.whole_runs import create_run_of, events_of, train_on_rank, train_until_error, trained, whole_config

from engine.config.schema import JsonObject
from engine.config.settings import AttentionConfig, CheckpointConfig, DataConfig, ModelConfig, RunConfig
from engine.runs.folder import RunFolder
from engine.training.checkpoints import model_facts

STEPS, HALF = 4, 2


def going_on(config: RunConfig, source: Path, **train: Any) -> RunConfig:
    """`config`, from the checkpoint of another run."""
    return replace(config, train=replace(config.train, checkpoint=CheckpointConfig(resume_from=str(source)), **train))


@pytest.fixture(scope="module")
def still(corpus: DataConfig) -> RunConfig:
    """One sample a step, at a rate below every rounding: the loss of a step then says which samples it read."""
    return whole_config(corpus, train={"steps": STEPS}, optimizer={"learning_rate": 1e-30})


@pytest.fixture(scope="module")
def untaught(ranks: Pools, still: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run saved after two steps; the losses of its first samples."""
    train = replace(still.train, steps=3 * HALF, checkpoint=CheckpointConfig(every_steps=HALF, keep_last=10))
    run = trained(ranks, 1, replace(still, train=train), tmp_path_factory.mktemp("untaught"))
    return run.path / "checkpoints" / f"step-{HALF:08}", [row["loss"] for row in run.read_metrics()]


def test_another_seed_is_refused_with_both_values(
    ranks: Pools, still: RunConfig, untaught: tuple[Path, list[float]], tmp_path: Path
) -> None:
    config = replace(going_on(still, untaught[0]), seed=4)
    (error,) = ranks(1).run(train_until_error, str(create_run_of(config, tmp_path).path), config)
    assert "is of other data: seed was 3, is 4" in error


def test_another_model_is_refused_with_the_setting_that_differs(
    ranks: Pools, still: RunConfig, untaught: tuple[Path, list[float]], tmp_path: Path
) -> None:
    config = going_on(still, untaught[0])
    config = replace(config, model=replace(config.model, norm_eps=0.5))
    (error,) = ranks(1).run(train_until_error, str(create_run_of(config, tmp_path).path), config)
    assert f"is of another model: model.norm_eps was {still.model.norm_eps}, is 0.5" in error


@pytest.mark.thorough
def test_ranks_refuse_a_continuation_without_steps(
    ranks: Pools, still: RunConfig, untaught: tuple[Path, list[float]], tmp_path: Path
) -> None:
    config = going_on(still, untaught[0], steps=HALF)
    (error,) = ranks(1).run(train_until_error, str(create_run_of(config, tmp_path).path), config)
    assert f"is at step {HALF}, so train.steps={HALF} leaves nothing to do" in error


@pytest.mark.parametrize(
    ("world_size", "train"),
    [(1, {"micro_batch_size": 2}), (1, {"grad_accum_steps": 2}), (2, {})],
    ids=["rows", "micro-steps", "ranks"],
)
def test_a_resume_with_another_batch_reads_every_sample_once(
    ranks: Pools, still: RunConfig, untaught: tuple[Path, list[float]], tmp_path: Path, world_size: int, train: Any
) -> None:
    source, losses = untaught
    config = going_on(still, source, **train)
    config = replace(config, parallel=replace(config.parallel, dp_shard_size=world_size))
    run = trained(ranks, world_size, config, tmp_path)
    found = {row["step"]: row["loss"] for row in run.read_metrics()}
    expected = {step: (losses[first] + losses[first + 1]) / 2 for step, first in ((3, 2), (4, 4))}
    assert found == pytest.approx(expected, rel=1e-6)  # fp32 sums in another order
    assert len({round(loss, 3) for loss in losses}) == len(losses)


def train_from_nothing(path: str, config: RunConfig) -> int:
    """Exit code of this rank, whose weights are no numbers until somebody sets them: torch fills new memory so."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return train_on_rank(path, config)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_are_initialised_unless_a_checkpoint_is_restored(
    ranks: Pools, corpus: DataConfig, tmp_path: Path, tied: bool
) -> None:
    train, model = {"steps": STEPS, "checkpoint": CheckpointConfig(every_steps=HALF)}, {"tie_embeddings": tied}
    config = whole_config(corpus, train=train, model=model, attention={"preset": "burst"})

    def run_of(config: RunConfig, name: str, size: int = 2) -> tuple[RunFolder, list[str], list[float]]:
        """(its folder, its phases once the peak is measured, its last losses)."""
        run = create_run_of(config, tmp_path, name)
        assert ranks(size).run(train_from_nothing, str(run.path), config) == [0] * size
        row = run.read_metrics()[-1]
        phases = events_of(run, "phase", "phase")[3:]
        return run, phases, [row[name] for name in ("loss", "validation_loss") if name in row]

    whole, phases, losses = run_of(config, "aaaaaa")
    evaluated, saved = ["evaluate", "train"], ["checkpoint", "train"]
    assert phases == ["restore", "first weights", "train", *saved, *evaluated, *saved]
    begun, phases, _ = run_of(replace(config, train=replace(config.train, steps=HALF)), "bbbbbb")
    assert phases == ["restore", "first weights", "train", *evaluated, *saved]
    resumed, phases, resumed_losses = run_of(going_on(config, begun.path), "cccccc")
    assert phases == ["restore", "train", *evaluated]
    assert resumed_losses == losses
    assert events_of(resumed, "restored", "run_id") == [begun.run_id]
    only = replace(going_on(config, whole.path, evaluate_only=True), attention=AttentionConfig(preset="single"))
    _, phases, [loss] = run_of(only, "dddddd", 1)
    assert phases == ["restore", "evaluate"]
    assert loss == pytest.approx(losses[1], rel=1e-5)


def test_a_fall_back_to_an_older_checkpoint_is_a_warning(
    ranks: Pools, still: RunConfig, untaught: tuple[Path, list[float]], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(untaught[0].parent, tmp_path / "checkpoints"))
    newest = sorted(root.glob("step-????????"))[-1]
    assert newest.name == f"step-{3 * HALF:08}", newest
    (newest / "rank00000.safetensors").write_bytes(b"")
    run = trained(ranks, 1, going_on(still, root, steps=2 * HALF + 1), tmp_path)
    warnings = [event["message"] for event in run.read_events() if event["kind"] == "warning"]
    assert any(f"older checkpoint of step {2 * HALF}" in text for text in warnings), f"no warning names it: {warnings}"


def test_who_wrote_a_config_json_is_no_part_of_the_model() -> None:
    written = [JsonObject({"eps": 1e-6, "transformers_version": version}) for version in ("5.0", "5.23")]
    first, second = (model_facts(ModelConfig(hf_config=each)) for each in written)
    assert first == second
    assert first["model.hf_config.eps"] == 1e-6
