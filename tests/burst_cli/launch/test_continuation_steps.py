"""A run that continues from a checkpoint has steps left to do, or does not start."""

from __future__ import annotations

from pathlib import Path

import pytest
from testkit.command_line import Burst
from testkit.saved_checkpoints import save_checkpoint

WORDS = ("launch", "exp=tiny", "cluster=local", "cluster.ranks_per_node=1", "attention=single", "--dry-run")


@pytest.fixture
def at_step_51(tmp_path: Path) -> Path:
    """The folder of a run whose newest checkpoint is of step 51."""
    for step in (20, 51):
        save_checkpoint(tmp_path / "old" / "checkpoints", step)
    return tmp_path / "old"


def resumed(burst: Burst, source: Path, steps: int) -> tuple[int, str]:
    result = burst(*WORDS, f"train.checkpoint.resume_from={source}", f"train.steps={steps}")
    return result.code, result.err


@pytest.mark.parametrize("steps", [30, 51])
def test_a_continuation_without_steps_is_refused(burst: Burst, at_step_51: Path, steps: int) -> None:
    code, message = resumed(burst, at_step_51, steps)
    assert code == 2
    assert f"is at step 51, so train.steps={steps} leaves nothing to do" in message


@pytest.mark.thorough
def test_a_continuation_with_steps_left_is_planned(burst: Burst, at_step_51: Path) -> None:
    code, message = resumed(burst, at_step_51, 52)
    assert code == 0, message


def test_the_step_of_a_named_checkpoint_counts(burst: Burst, at_step_51: Path) -> None:
    code, message = resumed(burst, at_step_51 / "checkpoints" / "step-00000020", 30)
    assert code == 0, message


def test_weights_are_evaluated_whatever_their_step(burst: Burst, at_step_51: Path) -> None:
    result = burst(*WORDS, f"train.checkpoint.resume_from={at_step_51}", "train.steps=30", "train.evaluate_only=true")
    assert result.code == 0, result.err
