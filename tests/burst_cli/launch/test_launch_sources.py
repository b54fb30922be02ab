"""What a launch reads and leaves on disks, looked at before ranks start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from testkit.run_maker import make_run
from testkit.saved_checkpoints import checkpointing
from testkit.tiny_training import start_run, tiny_config

from burst_cli.launch.sources import check_room, check_source, with_source_paths
from engine.checkpoint.checkpointer import Snapshot
from engine.config.errors import ConfigError
from engine.config.settings import CheckpointConfig, ModelConfig, RunConfig
from engine.runs.checkpoints import CheckpointError
from engine.runs.room import checkpoint_bytes

KEY = "train.checkpoint.resume_from"


def save(root: Path) -> None:
    with checkpointing(start_run(tiny_config()), root) as (checkpointer, tensors):
        checkpointer.save(Snapshot(1, tensors.tensors, {}), wait=True)


def test_a_checkpoint_has_the_size_that_was_expected(tmp_path: Path, ranks) -> None:
    ranks(1).run(save, tmp_path)
    config = tiny_config()
    saved = sum(file.stat().st_size for file in tmp_path.glob("step-*/*.safetensors"))
    assert checkpoint_bytes(config) <= saved < 1.1 * checkpoint_bytes(config)


def test_a_disk_that_holds_no_checkpoint_is_refused_before_the_launch(tmp_path: Path) -> None:
    train = replace(RunConfig().train, checkpoint=CheckpointConfig(at_end=True))
    huge = replace(RunConfig(), train=train, model=ModelConfig(num_layers=10**9))
    with pytest.raises(ConfigError, match=r"a checkpoint takes .* free\. Free space"):
        check_room(huge, tmp_path / "run", force=False)
    assert check_room(huge, tmp_path / "run", force=True)[0].startswith("warning: a checkpoint takes")
    assert check_room(replace(RunConfig(), train=train), tmp_path / "run", force=False) == ()


def test_resume_from_takes_a_run_as_every_verb_does(root: Path) -> None:
    run = make_run(root, state="completed")
    (run.path / "checkpoints/step-00000010").mkdir(parents=True)
    for name in (run.run_id, "aaaaaa", "tiny", f"tiny/{run.run_id}"):
        assert with_source_paths((f"{KEY}={name}",), root) == (f"{KEY}='{run.path / 'checkpoints'}'",), name
    for word in (f"{KEY}=null", f"{KEY}=/some/where", f"{KEY}='~/saved'", "exp=tiny"):
        assert with_source_paths((word,), root) == (word,)


def test_a_source_that_is_not_there_is_refused_before_ranks_start(root: Path, tmp_path: Path) -> None:
    make_run(root, state="completed")
    with pytest.raises(ConfigError, match=f"{KEY}=tinny: no such run .*did you mean tiny"):
        with_source_paths((f"{KEY}=tinny",), root)
    train = replace(RunConfig().train, checkpoint=CheckpointConfig(resume_from=str(tmp_path / "none")))
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        check_source(replace(RunConfig(), train=train))
