"""Saving and restoring a training state over real ranks: the same numbers, whatever the mesh and method."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from testkit.checkpoint_cases import CASES, LONG, MORE, NAMES, SEQUENCES, STEPS, Case, restore, save, train
from testkit.ranks import Pools
from testkit.saved_checkpoints import checkpointing, take_all
from testkit.tiny_training import start_run, tiny_config, train_losses

from engine.checkpoint.checkpointer import Snapshot
from engine.checkpoint.parts import local_parts, read_parts, share_out, write_parts
from engine.config.settings import RunConfig
from engine.runs.checkpoints import list_checkpoints, read_manifest

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
    for source in sorted({CASES[(index + 3) % len(CASES)].name, CORE[(index + 1) % len(CORE)]} - {one.name})
]


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


def restore_damaged(config: RunConfig, root: str) -> tuple[int, str, list[int]]:
    """(step that was restored, what was told, how often two saves, and then a restore, said that they go on)."""
    run = start_run(config)
    told: list[str] = []
    advances = [0]

    def advance() -> None:
        advances[-1] += 1

    with checkpointing(run, root, told.append, advance=advance) as (checkpointer, training):
        for step in (1, 2):
            advances.append(0)
            checkpointer.save(Snapshot(step, training.tensors, {"updates": 0}))
        if run.mesh.rank == 0:
            path = Path(root) / "step-00000002" / "rank00001.safetensors"
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(bytes(content))
        torch.distributed.barrier()
        advances.append(0)
        manifest = checkpointer.restore(training, take_all)
    assert manifest is not None
    return manifest.step, " ".join(told), advances[1:]


def test_all_ranks_skip_a_checkpoint_with_a_flipped_bit(ranks: Pools, tmp_path: Path) -> None:
    answers = ranks(2).run(restore_damaged, CASES[1].config, str(tmp_path))
    assert [step for step, _, _ in answers] == [1, 1]
    assert "step 2 is moved aside" in answers[0][1]
    assert len(list(tmp_path.glob("step-00000002.bad-*"))) == 1
    for _, _, (first, second, restoring) in answers:
        assert first == second >= 4  # its folder, its files, their hashes, its commit
        assert restoring >= 2  # what there is, and what is in it


def test_without_an_undamaged_checkpoint_nothing_is_restored(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(save, CASES[1].config, str(tmp_path), 1)
    (tmp_path / "step-00000001" / "rank00000.safetensors").write_bytes(b"")
    for restored, _, message in ranks(2).run(restore, CASES[1].config, str(tmp_path)):
        assert restored is None
        assert f"no checkpoint under {tmp_path} is undamaged" in message
    assert list(tmp_path.glob("step-00000001.bad-*/WHY"))


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_read(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(1).run(save, tiny_config(), str(tmp_path), 1) == [""]
    other = tiny_config(model={"num_layers": 3})
    ((_, untrained, _),) = ranks(1).run(restore, other, f"{tmp_path}/nothing")
    ((step, digest, told),) = ranks(1).run(restore, other, str(tmp_path))
    assert step is None
    assert digest == untrained
    missing = "; ".join([r"\S+layers\.2\.\S+ is missing there"] * 4)
    assert re.search(rf"is of another model or optimizer: {missing}, and \d\d more\. Continue with", told)


def test_a_failed_rank_fails_the_save_on_all_ranks(ranks: Pools, tmp_path: Path) -> None:
    texts = ranks(2).run(save, CASES[1].config, str(tmp_path), 1, 2, broken_rank=1)
    assert all("cannot save step 2" in text for text in texts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "storage"]
    assert read_manifest(tmp_path / "step-00000001").step == 1


def dues(config: RunConfig, root: str) -> list[bool]:
    """Whether a save is due: by steps that do, by ones that do not, by neither, by five minutes, by none, by one."""
    run, found, never = start_run(config), [], {"every_steps": None}
    by_steps = [({"every_steps": 2}, 4), ({"every_steps": 2}, 3), (never, 4)]
    by_time = [(never | {"every_minutes": minutes}, 1) for minutes in (5.0, 1e-9)]
    for how, step in (*by_steps, *by_time, ({"every_steps": 2, "every_minutes": 1e-9}, 3)):
        with checkpointing(run, root, **how) as (checkpointer, _):
            found.append(checkpointer.is_due(step))
    return found


def test_saves_are_due_by_steps_or_by_time(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(2).run(dues, CASES[1].config, str(tmp_path)) == [[True, False, False, False, True, True]] * 2


def kept_after(config: RunConfig, root: str, steps: list[int]) -> list[int]:
    """Steps of the checkpoints that are left when one was restored and these were saved."""
    run = start_run(config)
    with checkpointing(run, root, keep_last=2) as (checkpointer, training):
        checkpointer.restore(training, take_all)
        for step in steps:
            checkpointer.save(Snapshot(step, training.tensors, {"updates": 0}))
    return [checkpoint.step for checkpoint in list_checkpoints(Path(root))]


def test_pruning_spares_the_checkpoints_that_a_run_needs(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(1).run(save, tiny_config(), str(tmp_path), 1) == [""]
    assert ranks(1).run(kept_after, tiny_config(), str(tmp_path), [2, 4, 5, 3]) == [[5, 4, 3, 1]]


def replicated() -> dict[str, torch.Tensor]:
    """Tensors that every rank has as a whole."""
    tensors = {name: torch.arange(4.0) for name in "abcd"}
    return tensors | {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 2)}


def test_replicated_tensors_are_shared_out_to_all_writers() -> None:
    chosen = share_out([local_parts(replicated(), rank) for rank in range(2)])
    files = [[chunk.file for chunk in facts.chunks] for facts in chosen.values()]
    one, other = ["rank00000.safetensors"], ["rank00001.safetensors"]
    assert files == [one, other, one, other, one, []]


def test_shared_out_tensors_read_back(tmp_path: Path) -> None:
    tensors = replicated()
    chosen = share_out([local_parts(tensors, rank) for rank in range(2)])
    found = {name: torch.full_like(tensor, -1.0) for name, tensor in tensors.items()}
    for rank in range(2):
        write_parts(tmp_path, rank, tensors, chosen)
    read_parts(found, chosen, lambda names: {name: tmp_path / name for name in names})
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
