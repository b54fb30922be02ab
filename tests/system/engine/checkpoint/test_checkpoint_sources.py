"""Checkpoints that lie elsewhere: another run's, copied ones, and parts on the disks of several nodes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from testkit.checkpoint_cases import CASES, MORE, NAMES, STEPS, Case, restore, train
from testkit.ranks import Pools

RINGS = CASES[NAMES.index("two rings")]
STRIPES = CASES[NAMES.index("three ranks")]
REPLICAS = CASES[NAMES.index("replicated")]
SAVED = f"step-{STEPS:08d}"


@pytest.fixture(scope="module")
def rings(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Two rings trained without interruption, with a checkpoint in the middle: (folder, what was seen)."""
    root = str(tmp_path_factory.mktemp("checkpoints"))
    return root, ranks(2).run(train, RINGS.config, root, STEPS, False)[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def source(rings: tuple[str, dict[str, Any]], tmp_path: Path) -> Path:
    """Another run: a checkpoint, a copy of it named after step 9, and one that was never finished."""
    folder = tmp_path / "source"
    shutil.copytree(rings[0], folder / "checkpoints")
    shutil.copytree(folder / "checkpoints" / SAVED, folder / "checkpoints" / "step-00000009")
    (folder / "checkpoints" / "step-00000010.tmp-ab").mkdir()
    return folder


def test_checkpoint_of_another_run_is_restored(
    ranks: Pools, rings: tuple[str, dict[str, Any]], source: Path, tmp_path: Path
) -> None:
    for step, digest, message in ranks(2).run(restore, RINGS.config, f"{tmp_path}/own", str(source)):
        assert step == STEPS
        assert digest == rings[1]["hashes"][STEPS]
        assert "step 9 is skipped" in message or not message


def test_reading_another_run_changes_none_of_its_files(ranks: Pools, source: Path, tmp_path: Path) -> None:
    before = contents(source)
    ranks(2).run(restore, RINGS.config, f"{tmp_path}/own", str(source))
    assert contents(source) == before


@pytest.mark.parametrize("named", [True, False], ids=["named", "the only one"])
def test_checkpoint_under_the_name_of_another_step_is_refused(
    ranks: Pools, source: Path, tmp_path: Path, named: bool
) -> None:
    if not named:
        shutil.rmtree(source / "checkpoints" / SAVED)
    given = source / "checkpoints" / "step-00000009" if named else source
    for step, _, message in ranks(2).run(restore, RINGS.config, f"{tmp_path}/own", str(given)):
        assert step is None
        assert f"holds step {STEPS}" in message


def test_missing_source_is_named(ranks: Pools, tmp_path: Path) -> None:
    for step, _, message in ranks(2).run(restore, RINGS.config, f"{tmp_path}/own", f"{tmp_path}/gone"):
        assert step is None
        assert message.startswith(f"cannot continue from {tmp_path}/gone: ")
        assert "holds no checkpoint" in message


@pytest.mark.parametrize("named", ["", "/checkpoints", f"/checkpoints/{SAVED}"])
def test_a_node_that_lacks_the_folder_is_sent_what_it_needs(
    ranks: Pools, rings: tuple[str, dict[str, Any]], tmp_path: Path, named: str
) -> None:
    root, whole = rings
    copy = shutil.copytree(root, tmp_path / "here/run/checkpoints")
    (copy / "storage").unlink()
    own, sources = ([f"{tmp_path}/{node}{name}" for node in ("away", "here")] for name in ("own", f"/run{named}"))
    answers = ranks(2).run(restore, RINGS.config, own, sources)
    assert [digest for _, digest, _ in answers] == [whole["hashes"][STEPS]] * 2
    assert not (tmp_path / "away").exists()


@pytest.fixture(scope="module")
def two_nodes(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any]]:
    """Folders of two nodes that share no disk, with a checkpoint of four ranks, and what their run gave.

    The second node holds a replica of the first one's shards, of which only one is written.
    """
    folders = [str(tmp_path_factory.mktemp("node")) for _ in range(2)]
    seen = ranks(4).run(train, REPLICAS.config, [folders[rank // 2] for rank in range(4)], STEPS, False)[0]
    return folders, seen


@pytest.fixture
def copies(two_nodes: tuple[list[str], dict[str, Any]], tmp_path: Path) -> list[str]:
    """Of both folders."""
    return [str(shutil.copytree(folder, tmp_path / str(node))) for node, folder in enumerate(two_nodes[0])]


@pytest.mark.parametrize(
    ("one", "nodes"),
    [(REPLICAS, [0, 0, 1, 1]), (REPLICAS, [1, 0, 1, 0]), (STRIPES, [0, 1, 1]), (RINGS, [1, 0])],
    ids=["same", "ranks elsewhere", "three ranks", "one per node"],
)
def test_nodes_without_a_common_disk_get_what_they_lack_from_each_other(
    ranks: Pools, two_nodes: tuple[list[str], dict[str, Any]], copies: list[str], one: Case, nodes: list[int]
) -> None:
    _, whole = two_nodes
    before = [contents(Path(copy)) for copy in copies]
    resumed = ranks(one.world_size).run(train, one.config, [copies[node] for node in nodes], None, True)[0]
    assert resumed["hashes"][STEPS] == whole["hashes"][STEPS]
    losses = [whole["losses"][STEPS + i] for i in range(MORE)]
    assert list(resumed["losses"].values()) == pytest.approx(losses, rel=1e-5)
    assert [contents(Path(copy)) for copy in copies] == before


def test_a_new_node_gets_all_it_needs_from_the_others_unless_a_disk_is_lost(
    ranks: Pools, copies: list[str], tmp_path: Path
) -> None:
    assert [step for step, _, _ in ranks(3).run(restore, STRIPES.config, [*copies, f"{tmp_path}/new"])] == [STEPS] * 3
    before = contents(Path(copies[0]))
    for roots in ([copies[0], f"{tmp_path}/newer"], [copies[0]] * 2):  # and no new beginning
        for step, _, told in ranks(2).run(restore, RINGS.config, roots):
            assert step is None
            assert "are on a disk that no rank sees" in told
    assert contents(Path(copies[0])) == before
    for step in Path(copies[1]).glob("step-*"):  # a first save that did not reach every disk is none
        shutil.rmtree(step)
    for found in ranks(2).run(restore, RINGS.config, copies):
        assert found[0] is None
        assert found[2] == ""
