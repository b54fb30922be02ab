"""The guard in real training: a step that is dropped leaves no trace in the weights, and all ranks agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testkit.ranks import Pools
from testkit.whole_runs import create_run_of, train_on_rank, whole_config

from engine.config.settings import CheckpointConfig, DataConfig, GuardConfig, RunConfig
from engine.runs.folder import RunFolder
from engine.runs.manifest import Manifest, read_manifest
from engine.training.rank.faults import NO_FAULTS, Faults

RANKS = 2


class Injury(Faults):
    """Multiplies the loss of one rank at a step: each time, or the first time only."""

    def __init__(self, rank: int, step: int, *, once: bool, factor: float = math.nan) -> None:
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


def config_of(corpus: DataConfig, steps: int, guard: GuardConfig, checkpoint: CheckpointConfig) -> RunConfig:
    train = {"steps": steps, "guard": guard, "checkpoint": checkpoint}
    return whole_config(corpus, train=train, attention={"preset": "ring"}, parallel={"cp_size": RANKS})


def run_with(ranks: Pools, tmp_path: Path, config: RunConfig, injury: Injury) -> tuple[RunFolder, list[int]]:
    run = create_run_of(config, tmp_path)
    return run, ranks(RANKS).run(train_on_rank, str(run.path), config, injury.of_rank)


def hashes(manifest: Manifest) -> list[str]:
    """Of the files: equal where every tensor is."""
    return [file.sha256 for file in manifest.files.values()]


def events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["kind"] == kind]


def test_a_skipped_step_leaves_weights_and_moments_as_they_were(
    ranks: Pools, corpus: DataConfig, tmp_path: Path
) -> None:
    guard = GuardConfig(on_nonfinite="skip")
    config = config_of(corpus, 6, guard, CheckpointConfig(every_steps=1, keep_last=10))
    run, codes = run_with(ranks, tmp_path, config, Injury(1, 3, once=True))
    assert codes == [0] * RANKS
    saved = [read_manifest(run.path / "checkpoints" / f"step-{step:08d}") for step in range(1, 7)]
    assert hashes(saved[1]) == hashes(saved[2])
    assert len({tuple(hashes(one)) for one in saved}) == 5
    assert [one.state["updates"] for one in saved] == [1, 2, 2, 3, 4, 5]
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if row["loss"] is None] == [3]
    samples = saved[2].state["samples"] // 3
    (dropped,) = events(run, "dropped")
    assert (dropped["step"], dropped["reaction"], dropped["reason"]) == (3, "skip", "the loss is nan")
    assert [row["step"] for row in run.read_metrics() if row.get("dropped") == "skip"] == [3]
    summary = run.read_summary()
    assert summary is not None
    assert summary["dropped_steps"] == 1
    assert (dropped["first_sample"], dropped["last_sample"]) == (2 * samples, 3 * samples - 1)


def test_rewound_training_goes_on_with_other_data(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    guard = GuardConfig(on_nonfinite="rewind")
    config = config_of(corpus, 6, guard, CheckpointConfig(every_steps=2, keep_last=10))
    run, codes = run_with(ranks, tmp_path, config, Injury(0, 4, once=True))
    assert codes == [0] * RANKS
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 3, 4, 5, 6]
    assert [event["step"] for event in events(run, "restored")] == [2]
    state = read_manifest(run.path / "checkpoints" / "step-00000006").state
    per_step = read_manifest(run.path / "checkpoints" / "step-00000002").state["samples"] // 2
    assert (state["step"], state["updates"], state["samples"]) == (6, 6, 8 * per_step)
    assert rows[2]["loss"] != rows[4]["loss"]  # the same weights, other samples


def test_what_returns_after_every_rewind_ends_the_run(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    guard = GuardConfig(on_nonfinite="rewind")
    config = config_of(corpus, 6, guard, CheckpointConfig(every_steps=2))
    run, codes = run_with(ranks, tmp_path, config, Injury(0, 4, once=False))
    assert codes == [1] * RANKS
    assert [row["step"] for row in run.read_metrics()] == [1, 2, *[3, 4] * 5, 3]
    for error in run.rank_errors():
        assert "the loss of step 4 is nan, and 5 steps before it were dropped without progress" in error["message"]


def test_without_a_checkpoint_there_is_nothing_to_rewind_to(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    config = config_of(corpus, 6, GuardConfig(on_nonfinite="rewind"), CheckpointConfig(every_steps=5))
    run, codes = run_with(ranks, tmp_path, config, Injury(0, 2, once=False))
    assert codes == [1] * RANKS
    assert all("no checkpoint yet to go back to" in error["message"] for error in run.rank_errors())


def test_a_spike_that_one_rank_sees_is_dropped_on_all(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    config = config_of(corpus, 14, GuardConfig(spike_deviations=6.0), CheckpointConfig(every_steps=20))
    run, codes = run_with(ranks, tmp_path, config, Injury(1, 12, once=True, factor=20.0))
    assert codes == [0] * RANKS
    assert [event["step"] for event in events(run, "dropped")] == [12]
    assert read_manifest(run.path / "checkpoints" / "step-00000014").state["updates"] == 13
    losses = [row["loss"] for row in run.read_metrics()]
    assert losses[11] > 2 * losses[10]


def test_judging_changes_nothing_where_nothing_is_dropped(ranks: Pools, corpus: DataConfig, tmp_path: Path) -> None:
    losses = []
    for index, guard in enumerate((GuardConfig(), GuardConfig(on_nonfinite="skip", spike_deviations=1e6))):
        config = config_of(corpus, 4, guard, CheckpointConfig())
        run, codes = run_with(ranks, tmp_path / str(index), config, Injury(0, -1, once=True))
        assert codes == [0] * RANKS
        losses.append([row["loss"].hex() for row in run.read_metrics()])
    assert losses[0] == losses[1]
