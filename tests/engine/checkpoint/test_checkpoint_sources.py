"""Checkpoints that lie elsewhere: another run's, copied ones, and parts on the disks of several nodes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import CASES, MORE, NAMES, STEPS, Case, hash_now, train
from testkit.ranks import Pools, RankFailedError
from testkit.saved_checkpoints import checkpointing, take_all
from testkit.tiny_training import start_run

from engine.config.settings import RunConfig


@pytest.fixture(scope="module")
def rings(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Two rings trained without interruption, with a checkpoint in the middle: (folder, what was seen)."""
    root = str(tmp_path_factory.mktemp("checkpoints"))
    return root, ranks(2).run(train, CASES[1].config, root, STEPS, False)[0]


def restore_from(config: RunConfig, root: str, source: str) -> tuple[int, str, str]:
    """(step, hash of what was read, what was told) of taking up another run's state."""
    run = start_run(config)
    told: list[str] = []
    with checkpointing(run, root, told.append) as (checkpointer, training):
        manifest = checkpointer.restore_from(Path(source), training, take_all)
    return manifest.step, hash_now(run), " ".join(told)


def restore_where_it_is(config: RunConfig, root: str, sources: list[str]) -> tuple[int, str, str]:
    """As `restore_from`, every rank on a disk of its own, with the folder as its node has it."""
    rank = torch.distributed.get_rank()
    return restore_from(config, f"{root}{rank}", sources[rank])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_runs_folder_is_read_and_left_as_it_is(
    ranks: Pools, rings: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    one, (root, whole) = CASES[1], rings
    source = tmp_path / "source"
    shutil.copytree(root, source / "checkpoints")
    newest = source / "checkpoints" / "step-00000009"
    shutil.copytree(source / "checkpoints" / f"step-{STEPS:08d}", newest)  # holds another step than its name says
    (source / "checkpoints" / "step-00000010.tmp-ab").mkdir()
    before = contents(source)
    for step, digest, told in ranks(2).run(restore_from, one.config, str(tmp_path / "own"), str(source)):
        assert (step, digest) == (STEPS, whole["hashes"][STEPS])
        assert "step 9 is passed over" in told or not told
    assert contents(source) == before
    with pytest.raises(RankFailedError, match=f"holds step {STEPS}"):
        ranks(2).run(restore_from, one.config, str(tmp_path / "own"), str(newest))
    assert contents(source) == before
    shutil.rmtree(source / "checkpoints" / f"step-{STEPS:08d}")
    with pytest.raises(RankFailedError, match=f"holds step {STEPS}"):  # nor is any left
        ranks(2).run(restore_from, one.config, str(tmp_path / "own"), str(source))


@pytest.mark.parametrize("named", ["", "/checkpoints", f"/checkpoints/step-{STEPS:08d}"])
def test_a_node_that_lacks_the_folder_is_sent_what_it_needs(
    ranks: Pools, rings: tuple[str, dict[str, Any]], tmp_path: Path, named: str
) -> None:
    root, whole = rings
    copy = shutil.copytree(root, tmp_path / "here/run/checkpoints")
    (copy / "storage").unlink()
    sources = [f"{tmp_path}/{node}/run{named}" for node in ("away", "here")]
    answers = ranks(2).run(restore_where_it_is, CASES[1].config, f"{tmp_path}/own", sources)
    assert [digest for _, digest, _ in answers] == [whole["hashes"][STEPS]] * 2
    assert not (tmp_path / "away").exists()


def test_a_folder_that_no_node_has_is_an_error(ranks: Pools, tmp_path: Path) -> None:
    gone = [f"{tmp_path}/gone"] * 2
    with pytest.raises(RankFailedError, match=f"cannot go on from {gone[0]}: .* holds no checkpoint"):
        ranks(2).run(restore_where_it_is, CASES[1].config, f"{tmp_path}/own", gone)


def train_on_disks(config: RunConfig, roots: list[str], saves: int | None, restores: bool) -> dict[str, Any]:
    """As `train`, every rank with the folder of its node."""
    return train(config, roots[torch.distributed.get_rank()], saves, restores)


REPLICAS = CASES[NAMES.index("replicated")]


@pytest.fixture(scope="module")
def two_nodes(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any]]:
    """Folders of two nodes that share no disk, with a checkpoint of four ranks, and what their run gave.

    The second node holds a replica of the first one's shards, of which DCP writes only one.
    """
    folders = [str(tmp_path_factory.mktemp("node")) for _ in range(2)]
    seen = ranks(4).run(train_on_disks, REPLICAS.config, [folders[rank // 2] for rank in range(4)], STEPS, False)[0]
    return folders, seen


@pytest.mark.parametrize(
    ("one", "nodes"),
    [(REPLICAS, [0, 0, 1, 1]), (REPLICAS, [1, 0, 1, 0]), (CASES[3], [0, 1, 1]), (CASES[1], [1, 0])],
    ids=["same", "ranks elsewhere", "three ranks", "one per node"],
)
def test_nodes_without_a_common_disk_get_what_they_lack_from_each_other(
    ranks: Pools, two_nodes: tuple[list[str], dict[str, Any]], tmp_path: Path, one: Case, nodes: list[int]
) -> None:
    folders, whole = two_nodes
    copies = [str(shutil.copytree(folder, tmp_path / str(node))) for node, folder in enumerate(folders)]
    before = [contents(Path(copy)) for copy in copies]
    resumed = ranks(one.world_size).run(train_on_disks, one.config, [copies[node] for node in nodes], None, True)[0]
    assert resumed["hashes"][STEPS] == whole["hashes"][STEPS]
    assert list(resumed["losses"].values()) == pytest.approx(
        [whole["losses"][STEPS + i] for i in range(MORE)], rel=1e-5
    )
    assert [contents(Path(copy)) for copy in copies] == before


def test_files_on_a_disk_that_no_rank_sees_are_an_error_and_nothing_is_put_aside(
    ranks: Pools, two_nodes: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(two_nodes[0][0], copy)
    before = contents(copy)
    with pytest.raises(RankFailedError, match="lie on a disk that no rank sees"):
        ranks(2).run(train, CASES[1].config, str(copy), None, True)
    assert contents(copy) == before


def restore_on_disks(config: RunConfig, roots: list[str]) -> int | None:
    """The step that ranks go on from, each with the folder of its node; None: from the beginning."""
    run = start_run(config)
    with checkpointing(run, roots[run.mesh.rank]) as (checkpointer, training):
        manifest = checkpointer.restore(training, take_all)
    return None if manifest is None else manifest.step


def test_a_new_node_gets_all_it_needs_from_the_others_unless_a_disk_is_lost(
    ranks: Pools, two_nodes: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    copies = [str(shutil.copytree(folder, tmp_path / str(node))) for node, folder in enumerate(two_nodes[0])]
    assert ranks(3).run(restore_on_disks, CASES[3].config, [*copies, str(tmp_path / "new")]) == [STEPS] * 3
    with pytest.raises(RankFailedError, match="lie on a disk that no rank sees"):  # and no new beginning
        ranks(2).run(restore_on_disks, CASES[1].config, [copies[0], str(tmp_path / "newer")])
    for step in Path(copies[1]).glob("step-*"):  # a first save that did not reach every disk is none
        shutil.rmtree(step)
    assert ranks(2).run(restore_on_disks, CASES[1].config, copies) == [None, None]
