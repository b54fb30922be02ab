"""Full and read-only disks, and files that would run code: refused with their reason, what was saved before is used."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testkit.ranks import Pools
from testkit.saved_checkpoints import checkpointing, state_hash, take_all
from testkit.tiny_training import start_run, tiny_config

from engine.checkpoint.checkpointer import Snapshot
from engine.config.settings import ParallelConfig
from engine.runs.commit import file_facts, list_checkpoints
from engine.runs.files import hash_json
from engine.runs.manifest import MANIFEST_FILE, CheckpointError

CONFIG = tiny_config(parallel=ParallelConfig(dp_shard_size=2, cp_size=1))
RANKS = 2
FILE = "rank00001.safetensors"


def save(root: str, step: int, *, background: bool = False) -> str:
    """The error of saving `step`, every rank the same, or nothing."""
    try:
        with checkpointing(start_run(CONFIG), root, keep_last=5, in_background=background) as (checkpointer, training):
            checkpointer.save(Snapshot(step, training.tensors, {"updates": 0}))
            checkpointer.finish()
    except CheckpointError as error:
        return str(error)
    return ""


def restore(root: str) -> tuple[int, str, str]:
    """(step, hash of the state, what was told, or the error with step 0)."""
    told: list[str] = []
    with checkpointing(start_run(CONFIG), root, told.append) as (checkpointer, training):
        try:
            manifest = checkpointer.restore(training, take_all)
        except CheckpointError as error:
            return 0, "", str(error)
    assert manifest is not None
    return manifest.step, state_hash(training.tensors), " ".join(told)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own that holds one checkpoint and a half."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")  # where everything must run, a skip is a failure (skip_rule.py)
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_fails_the_save_and_keeps_what_was_there(ranks: Pools, disk: Path, background: bool) -> None:
    root = disk / "checkpoints"
    assert ranks(RANKS).run(save, str(root), 1) == [""] * RANKS
    errors = ranks(RANKS).run(save, str(root), 2, background=background)
    assert errors[0] == errors[1]
    # The cause alone, without what torch's own checkpointing wraps around it.
    cause = r"Error while serializing: [^:]+: No space left on device \(os error 28\)"
    assert re.fullmatch(rf"cannot save step 2: rank \d: {cause}", errors[0]), errors[0]
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001", "storage"]
    assert ranks(RANKS).run(restore, str(root))[0][0] == 1
    mount("-o", "remount,size=2m", str(disk))
    assert ranks(RANKS).run(save, str(root), 3) == [""] * RANKS
    assert [checkpoint.step for checkpoint in list_checkpoints(root)] == [3, 1]


def test_a_read_only_disk_is_named_and_can_be_restored_from(ranks: Pools, disk: Path) -> None:
    root = disk / "checkpoints"
    assert ranks(RANKS).run(save, str(root), 1) == [""] * RANKS
    mount("-o", "remount,ro", str(disk))
    errors = ranks(RANKS).run(save, str(root), 2)
    assert all("Read-only file system" in error for error in errors), errors
    assert ranks(RANKS).run(restore, str(root))[0][0] == 1
    errors = ranks(RANKS).run(save, str(disk / "elsewhere"), 1)
    assert all("Read-only file system" in error and "elsewhere" in error for error in errors), errors


class Bomb:
    """Pickled, and then unpickled, it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.target),)


def plant(checkpoint: Path, name: str, bomb: bytes, *, sign: bool) -> None:
    """Puts a bomb in place of a file; `sign`: as somebody would who can write a manifest, too."""
    (checkpoint / name).write_bytes(bomb)
    if not sign:
        return
    document = json.loads((checkpoint / MANIFEST_FILE).read_text())
    facts = file_facts(checkpoint / name, "disk")
    document["files"][name] |= {"bytes": facts.bytes, "sha256": facts.sha256}
    del document["sha256"]
    document["sha256"] = hash_json(document)
    (checkpoint / MANIFEST_FILE).write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("name", "sign", "text"),
    [
        (FILE, False, "bytes, "),
        (MANIFEST_FILE, False, "cannot be read"),
        (FILE, True, "cannot read"),
    ],
)
def test_a_pickle_is_never_run(ranks: Pools, tmp_path: Path, name: str, sign: bool, text: str) -> None:
    root, target = tmp_path / "checkpoints", tmp_path / "exploded"
    for step in (1, 2):
        assert ranks(RANKS).run(save, str(root), step) == [""] * RANKS
    plant(root / "step-00000002", name, pickle.dumps(Bomb(target)), sign=sign)
    step, _, told = ranks(RANKS).run(restore, str(root))[0]
    assert step == (0 if sign else 1)  # what is signed and cannot be read is nobody's accident
    assert text in told
    assert not target.exists()
    # The bomb is real: what was planted would have been seen.
    pickle.loads(pickle.dumps(Bomb(target)))  # noqa: S301 - our own, a line above
    assert target.exists()
