"""What a launch reads and leaves on disks, looked at before ranks start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from testkit.fake_plan import CODE, nodes, run_config
from testkit.run_maker import make_run
from testkit.saved_checkpoints import checkpointing
from testkit.tiny_training import start_run, tiny_config

from burst_cli.compose import compose
from burst_cli.launch.sources import check_room, check_source, quote_source, with_source_path
from cluster.launch.ssh import build_ssh_plan
from engine.checkpoint.checkpointer import Snapshot
from engine.config.errors import ConfigError
from engine.config.settings import CheckpointConfig, ModelConfig, RunConfig
from engine.predict.room import checkpoint_bytes
from engine.runs.checkpoints import CheckpointError
from engine.runs.folder import RunFolder, create_run

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


def resolved(root: Path, *words: str, folder: Path | None = None) -> str | None:
    """train.checkpoint.resume_from of the launch of these words, runs in `root`, own files in `folder`."""
    overrides, folders = quote_source(words), () if folder is None else (folder,)
    words = with_source_path(overrides, compose(overrides, folders), root)
    return compose(words, folders).config.train.checkpoint.resume_from


@pytest.fixture
def saved(root: Path) -> RunFolder:
    """A run with a checkpoint."""
    run = make_run(root, state="completed")
    (run.path / "checkpoints/step-00000010").mkdir(parents=True)
    return run


def test_resume_from_takes_a_run_as_every_verb_does(root: Path, saved: RunFolder) -> None:
    for name in (saved.run_id, "aaaaaa", "tiny", f"tiny/{saved.run_id}"):
        assert resolved(root, f"{KEY}={name}") == str(saved.path / "checkpoints"), name
    for name, path in (("null", None), ("/some/where", "/some/where"), ("'~/saved'", "~/saved")):
        assert resolved(root, f"{KEY}={name}") == path


def own_file(folder: Path, source: str) -> Path:
    """A folder of configuration files in which exp=mine goes on from `source`."""
    (folder / "exp").mkdir(parents=True)
    text = f"# @package _global_\ndefaults:\n  - tiny\ntrain:\n  checkpoint:\n    resume_from: {source}\n"
    (folder / "exp/mine.yaml").write_text(text)
    return folder


@pytest.mark.parametrize("more", [(), ("cluster.launcher=ssh", "cluster.nodes=n1")])
def test_resume_from_takes_a_run_in_a_file_as_on_the_command_line(
    root: Path, tmp_path: Path, saved: RunFolder, more: tuple[str, ...]
) -> None:
    folder = own_file(tmp_path / "conf", "aaaaaa")
    assert resolved(root, "exp=mine", *more, folder=folder) == str(saved.path / "checkpoints")


def test_a_run_id_of_digits_alone_is_no_number(root: Path) -> None:
    run = make_run(root, "tiny/20260101-000000-123456", state="completed")
    (run.path / "checkpoints/step-00000010").mkdir(parents=True)
    assert resolved(root, f"{KEY}=123456") == str(run.path / "checkpoints")


def test_an_unknown_run_in_a_file_is_named_with_the_file(root: Path, tmp_path: Path, saved: RunFolder) -> None:
    folder = own_file(tmp_path / "conf", "tinny")
    words = ("exp=mine", "cluster.launcher=ssh", "cluster.nodes=n1")
    with pytest.raises(ConfigError, match=r"tinny: no such run .*a path on the nodes begins .*\(in .*exp/mine\.yaml"):
        resolved(root, *words, folder=folder)


def test_checkpoints_that_are_on_nodes_are_not_read_here(root: Path, tmp_path: Path) -> None:
    plan = build_ssh_plan(run_config(), nodes(1), CODE, root / "tiny/20260101-000000-aaaaaa")
    create_run(Path(plan.run_path), dict(plan.files))
    with pytest.raises(CheckpointError, match=r"are on its nodes, .*burst checkpoint fetch 20260101-000000-aaaaaa"):
        resolved(root, f"{KEY}=aaaaaa")
    assert resolved(root, f"{KEY}=aaaaaa", "cluster.launcher=ssh", "cluster.nodes=n1") == (
        "~/.burst/runs/20260101-000000-aaaaaa/checkpoints"
    )
    (fetched := Path(plan.run_path) / "checkpoints/step-00000010").mkdir(parents=True)
    assert resolved(root, f"{KEY}=aaaaaa") == str(fetched.parent)


def test_a_source_that_is_not_there_is_refused_before_ranks_start(root: Path, tmp_path: Path) -> None:
    make_run(root, state="completed")
    with pytest.raises(ConfigError, match=f"{KEY}=tinny: no such run .*did you mean tiny"):
        resolved(root, f"{KEY}=tinny")
    train = replace(RunConfig().train, checkpoint=CheckpointConfig(resume_from=str(tmp_path / "none")))
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        check_source(replace(RunConfig(), train=train))
