"""Saving and restoring a training state over real ranks: the same numbers, whatever the mesh and method."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from testkit.ranks import Pools, RankFailedError
from testkit.saved_checkpoints import checkpointing, state_hash, take_all
from testkit.tiny_training import TinyRun, own_part, random_batches, start_run, tiny_config, train_losses

from engine.checkpoint.checkpointer import Snapshot
from engine.checkpoint.state import training_tensors
from engine.config.settings import AttentionConfig, MemoryConfig, ParallelConfig, RunConfig
from engine.runs.manifest import CheckpointError, read_manifest

SEQUENCES = 4
STEPS = 3
MORE = 2
LONG = 50


@dataclass(frozen=True)
class Case:
    """A way to run the same training."""

    name: str
    world_size: int
    config: RunConfig


def case(name: str, world_size: int, **changes: Any) -> Case:
    """With dropout: what is random must go on where it was."""
    return Case(name, world_size, tiny_config(train={"dropout": 0.1}, **changes))


CASES = [
    case("one rank", 1),
    case("two rings", 2, parallel=ParallelConfig(cp_size=2), attention=AttentionConfig(preset="ring")),
    case("two data-parallel", 2, parallel=ParallelConfig(dp_shard_size=2, cp_size=1)),
    case("three ranks", 3, parallel=ParallelConfig(cp_size=3), attention=AttentionConfig(preset="striped")),
    case("burst on four", 4, parallel=ParallelConfig(cp_size=4), attention=AttentionConfig(preset="burst")),
    case(
        "replicated",
        4,
        parallel=ParallelConfig(dp_replicate_size=2, dp_shard_size=1, cp_size=2),
        attention=AttentionConfig(preset="ring"),
    ),
    case(
        "tensor parallel",
        2,
        parallel=ParallelConfig(tp_size=2, cp_size=1),
        attention=AttentionConfig(preset="megatron_tp"),
    ),
    case(
        "recomputed",
        2,
        parallel=ParallelConfig(cp_size=2),
        attention=AttentionConfig(preset="ring"),
        memory=MemoryConfig(activation_checkpoint="full"),
    ),
]
NAMES = [one.name for one in CASES]
# The others are variations of these: tried when asked for.
CORE = ("one rank", "two rings", "burst on four", "tensor parallel")


def thorough_unless(is_tried_always: bool) -> list[pytest.MarkDecorator]:
    return [] if is_tried_always else [pytest.mark.thorough]


# How many steps after the checkpoint every bit is compared.
TRIED = [
    pytest.param(
        *(one, more),
        marks=thorough_unless(one.name in CORE and (one.name == CORE[0]) == (more == LONG)),
        id=f"{one.name}, {more}",
    )
    for one in CASES
    for more in (MORE, LONG)
]
# Every case takes up what another one has saved.
PAIRS = [
    pytest.param(*(source, one), marks=thorough_unless({source, one.name} <= {*CORE}), id=f"{source} to {one.name}")
    for index, one in enumerate(CASES)
    for source in {CASES[(index + 3) % len(CASES)].name, CORE[(index + 1) % len(CORE)]} - {one.name}
]


def train(
    config: RunConfig, root: str, saves: int | None, restores: bool, background: bool = False, more: int = MORE
) -> dict[str, Any]:
    """Losses of all steps, hashes of the state where a save is and at the end; saves after step `saves`, or restores.

    more: steps after the saved ones.
    """
    run, first = start_run(config), 0
    losses, hashes = {}, {}
    with checkpointing(run, root, in_background=background) as (checkpointer, before):
        if restores:
            manifest = checkpointer.restore(before, take_all)
            assert manifest is not None
            first = manifest.step
            hashes[first] = hash_now(run)
        for step in range(first, STEPS + more):
            losses[step] = run.train_step(step, own_part(random_batches(step, sequences=SEQUENCES), run.mesh)).loss
            if step + 1 in (saves, STEPS + more):
                hashes[step + 1] = hash_now(run)
            if step + 1 == saves:
                tensors = training_tensors(run.model, run.train_step.optimizer)
                checkpointer.save(Snapshot(step + 1, tensors.tensors, {"updates": tensors.updates}))
    return {"losses": losses, "hashes": hashes}


def hash_now(run: TinyRun) -> str:
    """Of all that a checkpoint would hold."""
    return state_hash(training_tensors(run.model, run.train_step.optimizer).tensors)


class Saved(Protocol):
    """A case by its name, trained without interruption, with a checkpoint in its middle: (folder, what was seen)."""

    def __call__(self, name: str, more: int = MORE) -> tuple[str, dict[str, Any]]: ...


@pytest.fixture(scope="module")
def saved(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    found: dict[tuple[str, int], tuple[str, dict[str, Any]]] = {}

    def of(name: str, more: int = MORE) -> tuple[str, dict[str, Any]]:
        if (name, more) not in found:
            one, root = CASES[NAMES.index(name)], str(tmp_path_factory.mktemp("checkpoints"))
            found[name, more] = (root, ranks(one.world_size).run(train, one.config, root, STEPS, False, more=more)[0])
        return found[name, more]

    return of


@pytest.mark.parametrize("one", [CASES[0], CASES[4]], ids=[NAMES[0], NAMES[4]])
def test_saving_changes_nothing(ranks: Pools, saved: Saved, one: Case) -> None:
    losses = ranks(one.world_size).run(train_losses, one.config, SEQUENCES, STEPS + MORE)[0]
    assert [loss.hex() for loss in losses] == [loss.hex() for loss in saved(one.name)[1]["losses"].values()]


@pytest.mark.parametrize(("one", "more"), TRIED)
def test_resumed_on_the_same_ranks_every_bit_is_the_same(ranks: Pools, saved: Saved, one: Case, more: int) -> None:
    root, whole = saved(one.name, more)
    resumed = ranks(one.world_size).run(train, one.config, root, None, True, more=more)[0]
    assert len(resumed["losses"]) == more
    for step in range(STEPS, STEPS + more):
        assert resumed["losses"][step].hex() == whole["losses"][step].hex()
    assert resumed["hashes"] == whole["hashes"]


@pytest.mark.parametrize(("source", "one"), PAIRS)
def test_resumed_on_other_ranks_the_state_is_the_same(ranks: Pools, saved: Saved, source: str, one: Case) -> None:
    root, whole = saved(source)
    resumed = ranks(one.world_size).run(train, one.config, root, None, True)[0]
    assert resumed["hashes"][STEPS] == whole["hashes"][STEPS]
    for step in range(STEPS, STEPS + MORE):
        assert resumed["losses"][step] == pytest.approx(whole["losses"][step], rel=1e-5)


def test_a_save_in_the_background_holds_what_was_there_when_it_began(
    ranks: Pools, saved: Saved, tmp_path: Path
) -> None:
    one = CASES[1]
    ranks(2).run(train, one.config, str(tmp_path), STEPS, False, True)
    resumed = ranks(2).run(train, one.config, str(tmp_path), None, True)[0]
    assert resumed["hashes"] == saved(one.name)[1]["hashes"]


def restore_damaged(config: RunConfig, root: str) -> tuple[int, str]:
    run = start_run(config)
    told: list[str] = []
    with checkpointing(run, root, told.append) as (checkpointer, training):
        for step in (1, 2):
            checkpointer.save(Snapshot(step, training.tensors, {"updates": 0}))
        if run.mesh.rank == 0:
            path = Path(root) / "step-00000002" / "rank00001.safetensors"
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(bytes(content))
        torch.distributed.barrier()
        manifest = checkpointer.restore(training, take_all)
    assert manifest is not None
    return manifest.step, " ".join(told)


def test_one_flipped_bit_of_one_rank_is_noticed_by_all_and_the_one_before_is_taken(
    ranks: Pools, tmp_path: Path
) -> None:
    answers = ranks(2).run(restore_damaged, CASES[1].config, str(tmp_path))
    assert [step for step, _ in answers] == [1, 1]
    assert "step 2 is put aside" in answers[0][1]
    assert len(list(tmp_path.glob("step-00000002.bad-*"))) == 1


def count_advances(config: RunConfig, root: str) -> tuple[int, int]:
    """How often a save, and then a restore, said that it goes on."""
    told: list[str] = []
    advance = partial(told.append, "it goes on")
    with checkpointing(start_run(config), root, advance=advance) as (checkpointer, training):
        begun = len(told)
        checkpointer.save(Snapshot(1, training.tensors, {"updates": 0}))
        saved = len(told)
        checkpointer.restore(training, take_all)
    return saved - begun, len(told) - saved


def test_every_part_of_a_save_and_of_a_restore_counts_as_progress_on_every_rank(ranks: Pools, tmp_path: Path) -> None:
    for saving, restoring in ranks(2).run(count_advances, CASES[1].config, str(tmp_path)):
        assert saving >= 4  # its folder, its files, their hashes, its commit
        assert restoring >= 2  # what there is, and what is in it


def refuse_other_model(config: RunConfig, other: RunConfig, root: str) -> str:
    with checkpointing(start_run(config), root) as (checkpointer, training):
        checkpointer.save(Snapshot(1, training.tensors, {"updates": 0}))
    run = start_run(other)
    before = hash_now(run)
    with checkpointing(run, root) as (checkpointer, training), pytest.raises(CheckpointError) as caught:
        checkpointer.restore(training, take_all)
    assert hash_now(run) == before
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_read(ranks: Pools, tmp_path: Path) -> None:
    text = ranks(1).run(refuse_other_model, tiny_config(), tiny_config(model={"num_layers": 3}), str(tmp_path))[0]
    assert "of another model or optimizer" in text
    assert "layers.2" in text


def fail_to_write(config: RunConfig, root: str) -> str:
    run = start_run(config)
    with checkpointing(run, root) as (checkpointer, training):
        checkpointer.save(Snapshot(1, training.tensors, {"updates": 0}))
        broken: dict[str, Any] = {"model.norm.weight": "no tensor"} if run.mesh.rank == 1 else {}
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(Snapshot(2, {**training.tensors, **broken}, {"updates": 0}))
    return str(caught.value)


def test_a_rank_that_fails_fails_the_save_on_all_and_loses_nothing(ranks: Pools, tmp_path: Path) -> None:
    texts = ranks(2).run(fail_to_write, CASES[1].config, str(tmp_path))
    assert all("cannot save step 2" in text for text in texts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "storage"]
    assert read_manifest(tmp_path / "step-00000001").step == 1


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


def test_another_runs_folder_is_read_and_left_as_it_is(ranks: Pools, saved: Saved, tmp_path: Path) -> None:
    one, (root, whole) = CASES[1], saved(CASES[1].name)
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


def test_a_checkpoint_that_was_copied_elsewhere_is_read_there(ranks: Pools, saved: Saved, tmp_path: Path) -> None:
    root, whole = saved(CASES[1].name)
    shutil.copytree(Path(root) / f"step-{STEPS:08d}", tmp_path / "copy" / f"step-{STEPS:08d}")  # without its storage id
    answers = ranks(2).run(restore_from, CASES[1].config, str(tmp_path / "own"), str(tmp_path / "copy"))
    assert [digest for _, digest, _ in answers] == [whole["hashes"][STEPS]] * 2


@pytest.mark.parametrize("named", ["", "/checkpoints", f"/checkpoints/step-{STEPS:08d}"])
def test_a_node_that_lacks_the_folder_is_sent_what_it_needs(
    ranks: Pools, saved: Saved, tmp_path: Path, named: str
) -> None:
    root, whole = saved(CASES[1].name)
    shutil.copytree(root, tmp_path / "here/run/checkpoints")
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


def test_a_node_that_is_new_gets_all_it_needs_from_the_others(
    ranks: Pools, two_nodes: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    copies = [str(shutil.copytree(folder, tmp_path / str(node))) for node, folder in enumerate(two_nodes[0])]
    roots = [*copies, str(tmp_path / "new")]
    assert ranks(3).run(restore_on_disks, CASES[3].config, roots) == [STEPS] * 3


def test_a_new_node_in_the_place_of_a_lost_disk_is_an_error_and_no_new_beginning(
    ranks: Pools, two_nodes: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    copy = str(shutil.copytree(two_nodes[0][0], tmp_path / "copy"))
    with pytest.raises(RankFailedError, match="lie on a disk that no rank sees"):
        ranks(2).run(restore_on_disks, CASES[1].config, [copy, str(tmp_path / "new")])


def test_a_first_save_that_did_not_reach_every_disk_is_none(
    ranks: Pools, two_nodes: tuple[list[str], dict[str, Any]], tmp_path: Path
) -> None:
    copies = [shutil.copytree(folder, tmp_path / str(node)) for node, folder in enumerate(two_nodes[0])]
    for step in copies[1].glob("step-*"):
        shutil.rmtree(step)
    assert ranks(2).run(restore_on_disks, CASES[1].config, [str(copy) for copy in copies]) == [None, None]
