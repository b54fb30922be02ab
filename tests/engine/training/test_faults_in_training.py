"""Faults in real training: NaN ends every rank or is dropped without trace, a slow rank is found, a full disk told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from testkit.ranks import Pools
from testkit.whole_runs import create_run_of, ended, events_of, train_until_error, whole_config

from engine.config.settings import CheckpointConfig, DataConfig, GuardConfig, RunConfig
from engine.runs.folder import RunFolder
from engine.runs.manifest import Manifest, read_manifest
from engine.training.rank.faults import FAULT_VARIABLE, NO_FAULTS, Faults, read_faults

# Of the slow rank, longer than a busy machine holds up any other: who is late by more is the straggler, and rightly so.
SLOW_S = 2.0


def run_with_fault(
    ranks: Pools, size: int, corpus: DataConfig, folder: Path, fault: str, **sections: Any
) -> tuple[RunFolder, list[int]]:
    """(its folder, exit codes of its ranks) of a run of four steps."""
    config = whole_config(corpus, train={"steps": 4}, **sections)
    return ended(ranks, size, config, folder, partial(read_faults, environment={FAULT_VARIABLE: fault}))


def test_a_loss_that_is_nan_on_one_rank_ends_all_and_names_the_step(
    ranks: Pools, corpus: DataConfig, tmp_path: Path
) -> None:
    run, codes = run_with_fault(ranks, 2, corpus, tmp_path, "nan;1;3", attention={"preset": "burst"})
    assert (codes, run.read_state()["state"]) == ([1, 1], "failed")
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    for error in run.rank_errors():
        assert "the loss of step 3 is nan: training has diverged" in error["message"]
        assert "Lower optimizer.learning_rate" in error["message"]
        assert (error["kind"], error["step"]) == ("user", 3)
    assert events_of(run, "fault_injected", "fault") == ["nan on rank 1 at step 3"]


def test_a_slow_rank_is_the_straggler_of_its_steps(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    run, codes = run_with_fault(ranks, 4, corpus, tmp_path, f"slow:{SLOW_S};2;3", attention={"preset": "burst"})
    rows = run.read_metrics()
    assert codes == [0] * 4
    assert [row["straggler_rank"] for row in rows[2:]] == [2] * 2, rows
    for row in rows[2:]:
        assert row["rank_wait_s_max"] >= 0.9 * SLOW_S
        assert 0 <= row["rank_wait_s_min"] <= row["rank_wait_s_max"] - SLOW_S / 2
        assert row["step_time_s"] >= SLOW_S
    assert all(row["rank_wait_s_max"] is not None for row in rows[:2])


def test_where_not_every_wait_is_seen_none_is_reported(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    sliced: dict[str, Any] = {"parallel": {"tp_size": 2}, "attention": {"preset": "megatron_tp"}}
    run, codes = run_with_fault(ranks, 2, corpus, tmp_path, "slow:0.01;1;2", **sliced)
    assert codes == [0, 0]
    for row in run.read_metrics():
        assert (row["straggler_rank"], row["rank_wait_s_min"], row["rank_wait_s_max"]) == (None, None, None)


def test_a_full_disk_is_said_and_a_rank_alone_has_nobody_to_wait_for(
    ranks: Pools, corpus: DataConfig, tmp_path: Path
) -> None:
    run, codes = run_with_fault(ranks, 1, corpus, tmp_path, "disk;0;4")
    (error,) = run.rank_errors()
    assert [row["rank_wait_s_max"] for row in run.read_metrics()] == [None] * 3
    assert (codes, error["step"]) == ([1], 4)
    assert "No space left on device" in error["message"]


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"ranks_per_node": 4}, "= 4 ranks, but 2 ranks were started, 2 of them on this node"),
        ({"ranks_per_node": 1, "num_nodes": 2}, "--nproc-per-node 1"),
    ],
)
def test_other_ranks_than_configured_are_refused_on_every_rank(
    ranks: Pools, corpus: DataConfig, tmp_path: Path, cluster: dict[str, int], words: str
) -> None:
    config = whole_config(corpus, attention={"preset": "burst"}, cluster=cluster)
    for error in ranks(2).run(train_until_error, str(create_run_of(config, tmp_path).path), config):
        assert error.startswith("ConfigError: ")
        assert words in error


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


def test_a_skipped_step_leaves_weights_and_moments_as_they_were(injured: Any) -> None:
    run, is_well = injured(Injury(1, 3), 6, GuardConfig(on_nonfinite="skip"), every_steps=1)
    assert is_well
    manifests = [saved(run, step) for step in range(1, 7)]
    assert hashes(manifests[1]) == hashes(manifests[2])
    assert len(set(map(hashes, manifests))) == 5
    assert [one.state["updates"] for one in manifests] == [1, 2, 2, 3, 4, 5]
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if row["loss"] is None] == [3]
    assert [row["step"] for row in rows if row.get("dropped") == "skip"] == [3]
    assert run.read_summary()["dropped_steps"] == 1
    samples = manifests[2].state["samples"] // 3
    (dropped,) = (event for event in run.read_events() if event["kind"] == "dropped")
    assert (dropped["step"], dropped["reaction"], dropped["reason"]) == (3, "skip", "the loss is nan")
    assert (dropped["first_sample"], dropped["last_sample"]) == (2 * samples, 3 * samples - 1)


def test_rewound_training_goes_on_with_other_data(injured: Any) -> None:
    run, is_well = injured(Injury(0, 4), 6, REWIND, every_steps=2)
    assert is_well
    rows, state = run.read_metrics(), saved(run, 6).state
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 3, 4, 5, 6]
    assert events_of(run, "restored", "step") == [2]
    per_step = saved(run, 2).state["samples"] // 2
    assert (state["step"], state["updates"], state["samples"]) == (6, 6, 8 * per_step)
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
        (2, 5, [1, 2], "no checkpoint yet to go back to"),
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
