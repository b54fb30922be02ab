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
from testkit.checkpoint_cases import restore, save
from testkit.needs import require
from testkit.ranks import Pools
from testkit.tiny_training import tiny_config

from engine.config.schema import hash_json
from engine.runs.checkpoints import MANIFEST_FILE, file_facts, list_checkpoints

CONFIG = tiny_config(parallel={"dp_shard_size": 2})
RANKS = 2
FILE = "rank00001.safetensors"


@pytest.fixture
def disk(tmp_path: Path, ranks: Pools) -> Iterator[Path]:
    """A disk of its own that holds one checkpoint, and has room for half of another."""
    require("root", "namespaces")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder))
    assert ranks(RANKS).run(save, CONFIG, f"{folder}/checkpoints", 1) == [""] * RANKS
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_fails_only_the_save(ranks: Pools, disk: Path, background: bool) -> None:
    root = disk / "checkpoints"
    errors = ranks(RANKS).run(save, CONFIG, str(root), 2, in_background=background)
    assert errors[0] == errors[1]
    # The cause alone, without what wraps around it.
    cause = r"Error while serializing: [^:]+: No space left on device \(os error 28\)"
    assert re.fullmatch(rf"cannot save step 2: rank \d: {cause}", errors[0]), errors[0]
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001", "storage"]
    assert ranks(RANKS).run(restore, CONFIG, str(root))[0][0] == 1
    mount("-o", "remount,size=2m", str(disk))
    assert ranks(RANKS).run(save, CONFIG, str(root), 3) == [""] * RANKS
    assert [checkpoint.step for checkpoint in list_checkpoints(root)] == [3, 1]


def test_saving_on_a_read_only_disk_is_an_error(ranks: Pools, disk: Path) -> None:
    mount("-o", "remount,ro", str(disk))
    for folder in ("checkpoints", "elsewhere"):
        for error in ranks(RANKS).run(save, CONFIG, str(disk / folder), 2):
            assert "Read-only file system" in error
            assert folder in error or folder == "checkpoints"


def test_a_read_only_disk_can_be_restored_from(ranks: Pools, disk: Path) -> None:
    mount("-o", "remount,ro", str(disk))
    assert ranks(RANKS).run(restore, CONFIG, str(disk / "checkpoints"))[0][0] == 1


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
    [(FILE, False, "bytes, "), (MANIFEST_FILE, False, "cannot be read"), (FILE, True, "cannot read")],
)
def test_a_pickle_is_never_run(ranks: Pools, tmp_path: Path, name: str, sign: bool, text: str) -> None:
    root, target = tmp_path / "checkpoints", tmp_path / "exploded"
    assert ranks(RANKS).run(save, CONFIG, str(root), 1, 2) == [""] * RANKS
    plant(root / "step-00000002", name, pickle.dumps(Bomb(target)), sign=sign)
    step, _, told = ranks(RANKS).run(restore, CONFIG, str(root))[0]
    assert step == (None if sign else 1)  # what is signed and cannot be read is nobody's accident
    assert text in told
    assert not target.exists()
    # The bomb is real: what was planted would have been seen.
    pickle.loads(pickle.dumps(Bomb(target)))  # noqa: S301 - our own, a line above
    assert target.exists()
