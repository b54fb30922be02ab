"""train.deterministic: torch's deterministic algorithms during a run, none afterwards, and equal bits."""

from __future__ import annotations

import os

import pytest
import torch
import torch.utils.deterministic
from testkit.ranks import Pools
from testkit.tiny_training import full_weights, own_part, random_batches, start_run, tiny_config

from engine.config.settings import RunConfig
from engine.training.determinism import deterministic_algorithms


def test_deterministic_algorithms_end_with_their_body() -> None:
    def body() -> None:
        with deterministic_algorithms(True):
            assert torch.are_deterministic_algorithms_enabled()
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        body()
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_algorithms_do_not_fill_new_memory() -> None:
    """Filling costs a pass over every tensor, and shows only reads of memory that was never written."""
    with deterministic_algorithms(True):
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_deterministic_algorithms_are_off_by_default() -> None:
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()


def steps_in_the_mode(config: RunConfig) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """(losses, weights after three steps, kernel): an operation without a deterministic algorithm would raise."""
    with deterministic_algorithms(config.train.deterministic):
        run = start_run(config)
        batches = [own_part(random_batches(step, sequences=2), run.mesh) for step in range(3)]
        losses = [run.train_step(step, batch).loss for step, batch in enumerate(batches)]
        kernel = run.train_step.attention.kernel_choice
    assert kernel is not None
    return losses, full_weights(run.model), kernel.reason


def test_two_deterministic_runs_have_the_same_bits(ranks: Pools) -> None:
    config = tiny_config(attention={"preset": "burst"}, train={"deterministic": True, "dropout": 0.1})
    (first, *_), (second, *_) = (ranks(2).run(steps_in_the_mode, config) for _ in range(2))
    assert first[0] == second[0]
    assert "deterministic" in first[2]
    for name, weight in first[1].items():
        assert torch.equal(weight, second[1][name]), name
