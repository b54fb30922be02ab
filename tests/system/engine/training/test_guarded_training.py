"""The guard in real training: a step that is dropped leaves no trace in the weights, and all ranks agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from testkit.ranks import Pools
from testkit.whole_runs import ended, events_of, whole_config

from engine.config.settings import CheckpointConfig, DataConfig, GuardConfig, RunConfig
from engine.runs.checkpoints import Manifest, read_manifest
from engine.runs.folder import RunFolder
from engine.training.rank.faults import NO_FAULTS, Faults


class Injury(Faults):
    """Multiplies the loss of one rank at a step: each time, or the first time only."""

    def __init__(self, rank: int, step: int, *, once: bool = True, factor: float = math.nan) -> None:
        super().__init__()
        self.rank, self.step, self.once, self.factor, self.done = rank, step, once, factor, False

    def of_rank(self, rank: int, world_size: int) -> tuple[Faults, Sequence[str]]:
        """In the place of `read_faults`."""
        return (self if rank == self.rank else NO_FAULTS), ()

    def at_loss(self, step: int | None, loss: Any) -> Any:
        if step != self.step or (self.once and self.done):
            return loss
        self.done = True
        return loss * self.factor


@pytest.fixture
def injured(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> Any:
    """A function to the (folder, whether all ranks ended well or all did not) of a guarded run on two ranks."""

    def run(injury: Injury, steps: int, guard: GuardConfig, **checkpoint: int) -> tuple[RunFolder, bool]:
        train = {"steps": steps, "guard": guard, "checkpoint": CheckpointConfig(keep_last=10, **checkpoint)}
        config: RunConfig = whole_config(corpus, train=train, attention={"preset": "ring"}, parallel={"cp_size": 2})
        folder, codes = ended(ranks, 2, config, tmp_path / str(len(list(tmp_path.iterdir()))), injury.of_rank)
        assert codes in ([0, 0], [1, 1])
        return folder, codes == [0, 0]

    return run


def saved(run: RunFolder, step: int) -> Manifest:
    return read_manifest(run.path / "checkpoints" / f"step-{step:08d}")


def hashes(manifest: Manifest) -> tuple[str, ...]:
    """Of the files: equal where every tensor is."""
    return tuple(file.sha256 for file in manifest.files.values())


REWIND = GuardConfig(on_nonfinite="rewind")


def test_skipped_step_updates_nothing(injured: Any) -> None:
    run, is_well = injured(Injury(1, 3), 6, GuardConfig(on_nonfinite="skip"), every_steps=1)
    assert is_well
    manifests = [saved(run, step) for step in range(1, 7)]
    assert hashes(manifests[1]) == hashes(manifests[2])
    assert len(set(map(hashes, manifests))) == 5
    assert [one.state["updates"] for one in manifests] == [1, 2, 2, 3, 4, 5]


def test_skipped_step_is_reported(injured: Any) -> None:
    run, _ = injured(Injury(1, 3), 4, GuardConfig(on_nonfinite="skip"), every_steps=3)
    assert [row["step"] for row in run.read_metrics() if row["loss"] is None] == [3]
    assert [row["step"] for row in run.read_metrics() if row.get("dropped") == "skip"] == [3]
    assert run.read_summary()["dropped_steps"] == 1
    samples = saved(run, 3).state["samples"] // 3
    (dropped,) = (event for event in run.read_events() if event["kind"] == "dropped")
    expected = {"step": 3, "reaction": "skip", "reason": "the loss is nan"}
    expected |= {"first_sample": 2 * samples, "last_sample": 3 * samples - 1}
    assert dropped.items() >= expected.items()


def test_rewound_training_continues_with_later_data(injured: Any) -> None:
    run, is_well = injured(Injury(0, 4), 6, REWIND, every_steps=2)
    assert is_well
    rows, state, folder = run.read_metrics(), saved(run, 6).state, run.path / "checkpoints" / "step-00000006"
    assert events_of(run, "checkpoint", "bytes")[-1] == sum(
        file.stat().st_size for file in folder.glob("*.safetensors")
    )
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 3, 4, 5, 6]
    assert events_of(run, "restored", "step") == [2]
    assert events_of(run, "restored", "run_id") == [run.run_id]
    begun, save = ["prepare data", "build model", "measure peak", "restore", "first weights"], ["checkpoint", "train"]
    then = ["train", *save, "rewind", "train", *save, "evaluate", "train", *save]
    assert events_of(run, "phase", "phase") == [*begun, *then]
    per_step = saved(run, 2).state["samples"] // 2
    assert state.keys() == {"step", "updates", "samples", "tokens", "guard", "seed", "seq_len", "data_hash", "model"}
    assert state["step"] == 6
    assert state["updates"] == 6
    assert state["samples"] == 8 * per_step
    assert state["tokens"] == 8 * per_step * 30
    assert state["seed"] == 3
    assert state["seq_len"] == 30
    assert rows[2]["loss"] != rows[4]["loss"]  # the same weights, other samples


@pytest.mark.parametrize(
    ("step", "every_steps", "steps", "words"),
    [
        (
            4,
            2,
            [1, 2, *[3, 4] * 5, 3],
            "the loss of step 4 is nan, and 5 steps before it were dropped without progress",
        ),
        (2, 5, [1, 2], "no checkpoint yet to rewind to"),
    ],
    ids=["it returns", "nothing to rewind to"],
)
def test_what_a_rewind_does_not_help_ends_the_run(
    injured: Any, step: int, every_steps: int, steps: list[int], words: str
) -> None:
    run, is_well = injured(Injury(0, step, once=False), 6, REWIND, every_steps=every_steps)
    assert not is_well
    assert [row["step"] for row in run.read_metrics()] == steps
    assert [words in error["message"] for error in run.rank_errors()] == [True, True]


def test_a_spike_that_one_rank_sees_is_dropped_on_all(injured: Any) -> None:
    run, is_well = injured(Injury(1, 12, factor=20.0), 14, GuardConfig(spike_deviations=6.0), every_steps=20)
    assert is_well
    assert events_of(run, "dropped", "step") == [12]
    assert saved(run, 14).state["updates"] == 13
    losses = [row["loss"] for row in run.read_metrics()]
    assert losses[11] > 2 * losses[10]


def test_judging_changes_nothing_where_nothing_is_dropped(injured: Any) -> None:
    guards = GuardConfig(), GuardConfig(on_nonfinite="skip", spike_deviations=1e6)
    runs = [injured(Injury(0, -1), 4, guard) for guard in guards]
    assert [is_well for _, is_well in runs] == [True, True]
    one, other = ([row["loss"].hex() for row in run.read_metrics()] for run, _ in runs)
    assert one == other
