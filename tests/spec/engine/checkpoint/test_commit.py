"""The commit layer: what counts as a checkpoint, what is noticed, what is kept. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from testkit import PYTHON_PATH
from testkit.saved_checkpoints import FILE, newest_verified, save_checkpoint

from engine.config.schema import hash_json
from engine.config.settings import CheckpointConfig, RunConfig, TrainConfig, dump_config
from engine.runs.checkpoints import (
    MANIFEST_FILE,
    Checkpoint,
    CheckpointError,
    find_source,
    list_checkpoints,
    new_folder,
    put_aside,
    read_manifest,
    recover,
    storage_id,
    superfluous,
)

write = partial(save_checkpoint, content=b"12345678")


def steps(root: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(root)]


def test_checkpoint_is_read_back(tmp_path: Path) -> None:
    path = write(tmp_path, 99999999, loss=1.5)
    assert path.name == "step-99999999"
    assert read_manifest(path).state == {"loss": 1.5}
    assert read_manifest(path).bytes == 8


def test_state_that_is_no_number_is_saved_as_null(tmp_path: Path) -> None:
    assert read_manifest(write(tmp_path, 5, loss=float("nan"))).state == {"loss": None}


def test_checkpoints_are_ordered_by_step_whatever_its_digits(tmp_path: Path) -> None:
    for step in (5, 123456789, 99999999):
        write(tmp_path, step)
    newest = tmp_path / "step-123456789"
    assert steps(tmp_path) == [123456789, 99999999, 5]
    assert newest_verified(tmp_path) == (Checkpoint(123456789, newest), read_manifest(newest))


def test_whole_numbers_of_a_state_are_read(tmp_path: Path) -> None:
    manifest = read_manifest(write(tmp_path, 8, zero=0, three=3))
    assert manifest.whole("zero") == 0
    assert manifest.whole("three") == 3


@pytest.mark.parametrize(("name", "value"), [("number", 1.0), ("flag", True), ("below", -1), ("gone", None)])
def test_value_that_is_no_count_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    manifest = read_manifest(write(tmp_path, 8, number=1.0, flag=True, below=-1))
    with pytest.raises(CheckpointError, match=f"step 8 has no valid {name}: got {value}"):
        manifest.whole(name)


@pytest.mark.parametrize("removed", ["", ".gone-cd"])
def test_what_is_being_written_is_no_checkpoint(tmp_path: Path, removed: str) -> None:
    folder = new_folder(tmp_path, 3, "ab")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / FILE).write_bytes(b"1")
    folder.rename(f"{folder}{removed}")
    assert steps(tmp_path) == []
    recover(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"cannot write a checkpoint under {tmp_path}/file: Not a directory"):
        new_folder(tmp_path / "file", 1, "ab")


def test_a_second_save_of_a_step_replaces_the_first(tmp_path: Path) -> None:
    write(tmp_path, 3, content=b"first")
    path = write(tmp_path, 3, content=b"second")
    assert (path / FILE).read_bytes() == b"second"
    assert [child.name for child in tmp_path.iterdir()] == ["step-00000003"]
    path.rename(tmp_path / "step-00000003.old-ab")  # its successor never came
    recover(tmp_path)
    assert steps(tmp_path) == [3]


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Damage to a file of a checkpoint."""

    def damage(path: Path) -> None:
        (path / name).write_bytes(change((path / name).read_bytes()))

    return damage


def signed(change: Callable[[Any, Any, Any], object]) -> Callable[[Path], None]:
    """A changed manifest with the hash of what it says now; `change` is given it, its tensor and that one's chunk."""

    def damage(path: Path) -> None:
        document = json.loads((path / MANIFEST_FILE).read_text())
        change(document, document["tensors"]["w"], document["tensors"]["w"]["chunks"][0])
        del document["sha256"]
        document["sha256"] = hash_json(document)
        (path / MANIFEST_FILE).write_text(json.dumps(document))

    return damage


HALVES = [{"offsets": [at], "sizes": [2], "file": FILE, "key": "w"} for at in (0, 1)] * 32
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (rewritten(FILE, lambda content: content[:-1]), "has 7 bytes, 8 were written"),
    "bit flipped": (rewritten(FILE, lambda content: b"0" + content[1:]), "SHA-256 differs"),
    "file missing": (lambda path: (path / FILE).unlink(), "cannot be read"),
    "manifest missing": (lambda path: (path / MANIFEST_FILE).unlink(), "expected the manifest of a whole save"),
    "manifest torn": (rewritten(MANIFEST_FILE, lambda content: content[: len(content) // 2]), "cannot be read"),
    "another step": (signed(lambda document, *_: document.update(step=7)), "holds step 7"),
    "another format": (signed(lambda document, *_: document.update(format=99)), "of format 99"),
    "no tensors": (signed(lambda document, *_: document.pop("tensors")), "is damaged"),
    "id that is a path": (signed(lambda document, *_: document.update(save_id="../../ab")), "no id of a save"),
    "files no table": (signed(lambda document, *_: document.update(files=[])), "is damaged"),
    "path out": (
        signed(lambda document, *_: document["files"].update({"../../x": document["files"][FILE]})),
        "no name of a checkpoint's file",
    ),
    "part missing": (signed(lambda _, tensor, __: tensor["chunks"].clear()), "do not make up the whole"),
    "part beyond": (signed(lambda _, __, chunk: chunk.update(offsets=[1])), "reaches beyond"),
    "part before": (signed(lambda _, __, chunk: chunk.update(offsets=[-1])), "reaches beyond"),
    "parts overlap": (
        signed(lambda _, tensor, __: tensor.update(shape=[128], chunks=HALVES)),
        "two of its parts overlap",
    ),
    "dimensions": (signed(lambda _, __, chunk: chunk.update(offsets=[0, 0])), "another number of dimensions"),
    "file unknown": (
        signed(lambda _, __, chunk: chunk.update(file="rank00009.safetensors")),
        "no file of this checkpoint",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_newest_undamaged_checkpoint_is_selected(tmp_path: Path, name: str) -> None:
    older, newer = write(tmp_path, 10), write(tmp_path, 20)
    DAMAGE[name][0](newer)
    found = newest_verified(tmp_path, on_bad=lambda *_: None)
    assert (found and found[0].path) == older


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_of_a_checkpoint_is_reported(tmp_path: Path, name: str) -> None:
    damage, text = DAMAGE[name]
    damage(write(tmp_path, 20))
    reasons: list[str] = []
    newest_verified(tmp_path, on_bad=lambda _, why: reasons.append(why))
    assert len(reasons) == 1
    assert text in reasons[0]


def test_no_byte_of_a_manifest_can_change_unnoticed(tmp_path: Path) -> None:
    path = write(tmp_path, 10) / MANIFEST_FILE
    whole, as_written = path.read_bytes(), json.loads(path.read_text())
    assert as_written["format"] == 1  # of all that were ever written
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(bytes(damaged))
        with contextlib.suppress(CheckpointError):
            assert read_manifest(path.parent).to_dict() == as_written  # another kind of white space changes nothing


def test_a_damaged_one_that_is_put_aside_is_not_taken_again(tmp_path: Path) -> None:
    path = write(tmp_path, 10)
    aside = put_aside(Checkpoint(10, path), "a bit was flipped")
    assert steps(tmp_path) == []
    assert (aside / "WHY").read_text() == "a bit was flipped\n"
    (tmp_path / "fetched-ab").write_text("")  # and what is no folder, whatever its name
    recover(tmp_path)
    assert aside.exists()


@pytest.mark.parametrize(
    ("keep_every", "protected", "gone"),
    [(None, (), [10, 20, 30]), (20, (), [10, 30]), (None, (10,), [20, 30]), (20, (30,), [10])],
)
def test_superfluous_steps_exclude_newest_milestone_or_protected_ones(
    keep_every: int | None, protected: tuple[int, ...], gone: list[int]
) -> None:
    found = superfluous([30, 10, 50, 20, 40], keep_last=2, keep_every=keep_every, protected=protected)
    assert found == gone


def test_a_disk_is_identified_by_a_file_on_it(tmp_path: Path) -> None:
    one = tmp_path / "deep/one"
    (tmp_path / "link").symlink_to(one, target_is_directory=True)
    first = storage_id(one)
    assert storage_id(one) == first == storage_id(tmp_path / "link")
    assert storage_id(tmp_path / "two") != first
    assert len(first) == 32
    assert stat.S_IMODE(one.stat().st_mode) == 0o700
    assert [child.name for child in one.iterdir()] == ["storage"]


@pytest.mark.parametrize("folder", [None, "shared", "~no such user/saved"])
def test_a_source_may_be_a_run_or_a_checkpoint(tmp_path: Path, folder: str | None) -> None:
    """Also where they lie elsewhere; but where this machine has none, there is no source."""
    run = tmp_path / "runs" / "20260101-000000-abcdef"
    run.mkdir(parents=True)
    chosen = str(tmp_path / folder) if folder == "shared" else folder
    settings = CheckpointConfig(folder=chosen)
    (run / "config.yaml").write_text(dump_config(RunConfig(train=TrainConfig(checkpoint=settings))))
    for source in (run, run / "config.yaml", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=f"{source.name} holds no checkpoint"):
            find_source(source)
    root = tmp_path / "shared" / run.name if folder == "shared" else run / "checkpoints"
    write(run / "checkpoints", 5)  # beside those of another folder they are what was fetched of them
    assert find_source(run) == (run / "checkpoints", None)
    newest = write(root, 20)
    assert find_source(run) == find_source(root) == (root, None)
    assert find_source(newest) == (root, 20)


SYNCED = """
import os, sys
from pathlib import Path
from engine.runs import files
from engine.runs.checkpoints import commit, new_folder, storage_id
from engine.runs.checkpoints import Manifest

def note(event, arguments):
    if event in ("os.rename", "os.link") and str(root) in arguments[1]:
        print("name", os.path.basename(arguments[1]), flush=True)
    if event == "open" and arguments[1] is None:
        print("sync", os.path.basename(str(arguments[0])).partition(".tmp")[0], flush=True)

root = Path(sys.argv[1])
folder = new_folder(root, 7, "ab")
sys.addaudithook(note)
commit(folder, Manifest(7, "ab", "now", {}, {}, {}, {}))
print("---", flush=True)
storage_id(root)
print("---", flush=True)
with files.new_folder(root / "made") as work:
    (work / "part").write_text("")
"""


def test_renames_are_durable_before_they_are_reported(tmp_path: Path) -> None:
    """Without it a crash may undo the naming, or leave a name without content. To sync is to open by descriptor."""
    root = tmp_path / "checkpoints"
    command = [sys.executable, "-c", SYNCED, str(root)]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    of_commit, of_storage, of_folder = (part.split("\n")[:-1] for part in done.stdout.split("---\n"))
    made, named = of_commit[:2], of_commit[2:]  # the file is made, too, by opening a descriptor
    assert all(line.startswith("sync .MANIFEST.json-") for line in made)
    assert named == ["name MANIFEST.json", "sync step-00000007", "name step-00000007", "sync checkpoints"]
    assert of_storage == ["sync storage", "name storage", "sync checkpoints"]
    assert of_folder == ["sync part", "sync made", "name made", "sync checkpoints"]
