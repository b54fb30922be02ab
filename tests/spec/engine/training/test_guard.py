"""What the guard takes, drops and ends."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from engine.config.errors import RunError
from engine.config.settings import GuardConfig
from engine.training.guard import MOST_IN_A_ROW, TAKEN, Guard


def resolved(level: float = 2.0, noise: float = 0.05, **settings: Any) -> Guard:
    """A guard that has seen fifty losses around `level`."""
    guard, rng = Guard(GuardConfig(**{"spike_deviations": 6.0, **settings})), random.Random(0)
    for step in range(50):
        assert guard.judge(step, rng.gauss(level, noise), 1.0) == TAKEN
    return guard


@pytest.mark.parametrize("figures", [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_what_is_no_number_stops_the_run_unless_it_is_to_be_dropped(figures: tuple[float, float]) -> None:
    with pytest.raises(RunError, match=r"of step 8 is (nan|inf): training has diverged"):
        Guard(GuardConfig()).judge(7, *figures)
    for reaction in ("skip", "rewind"):
        verdict = Guard(GuardConfig(on_nonfinite=reaction)).judge(7, *figures)  # type: ignore[arg-type]
        assert verdict.action == reaction
        assert verdict.taken is False
        assert "is nan" in verdict.reason or "is inf" in verdict.reason


def test_loss_at_the_limit_is_taken() -> None:
    guard = resolved()
    assert guard.judge(50, guard.limit() or 0.0, 1.0).taken


def test_spike_of_the_loss_is_dropped() -> None:
    verdict = resolved().judge(51, 3.0, 1.0)
    assert verdict.action == "skip"
    assert verdict.reason.startswith("the loss is 3, above 2.")


def test_dropped_loss_does_not_move_the_limit() -> None:
    guard = resolved()
    before = guard.limit()
    guard.judge(51, 3.0, 1.0)
    assert guard.limit() == before


def test_noise_of_the_loss_is_taken() -> None:
    assert resolved().judge(52, 2.1, 1.0).taken


def test_spikes_are_taken_without_a_limit() -> None:
    assert resolved(spike_deviations=None).judge(50, 1e9, 1.0).taken


def test_the_limit_is_that_of_normal_noise() -> None:
    limit = resolved(noise=0.1, spike_deviations=5.0).limit()
    assert limit == pytest.approx(2.0 + 5 * 0.1, abs=0.15)


def test_a_falling_loss_is_no_spike() -> None:
    guard = Guard(GuardConfig(spike_deviations=4.0))
    assert all(guard.judge(step, 10 / (1 + step / 5), 1.0).taken for step in range(100))


def test_an_even_loss_has_no_spikes() -> None:
    guard = Guard(GuardConfig(spike_deviations=4.0))
    assert all(guard.judge(step, 2.0 + 0.01 * (step % 2), 1.0).taken for step in range(100))


def test_too_few_losses_detect_no_spike() -> None:
    guard = Guard(GuardConfig(spike_deviations=1.0))
    for step in range(8):
        assert guard.judge(step, 10.0**step, 1.0).taken
    assert not guard.judge(8, 1e12, 1.0).taken


def test_too_many_in_a_row_stop_the_run_from_its_first_step_on() -> None:
    guard = Guard(GuardConfig(on_nonfinite="skip"))
    for step in range(MOST_IN_A_ROW):
        assert guard.judge(step, math.nan, 1.0).action == "skip"
    with pytest.raises(RunError, match="5 steps before it were dropped without progress"):
        guard.judge(MOST_IN_A_ROW, math.nan, 1.0)


def test_a_step_that_is_taken_begins_the_count_anew() -> None:
    guard = resolved()
    for step in range(50, 90, 2):
        assert not guard.judge(step, 9.0, 1.0).taken
        assert guard.judge(step + 1, 2.0, 1.0).taken


def test_after_a_rewind_only_steps_beyond_the_dropped_one_are_progress() -> None:
    guard = resolved(on_spike="rewind")
    saved = guard.state()
    for _ in range(MOST_IN_A_ROW):
        assert guard.judge(60, 9.0, 1.0).action == "rewind"
        guard.rewound(saved)
        assert all(guard.judge(step, 2.0, 1.0).taken for step in range(50, 60))
    with pytest.raises(RunError, match="without progress"):
        guard.judge(60, 9.0, 1.0)


def test_its_state_makes_the_same_guard() -> None:
    guard = resolved()
    guard.judge(50, 9.0, 1.0)
    copy = Guard(guard.config)
    copy.load(json.loads(json.dumps(guard.state())))
    assert copy.state() == guard.state()
    assert copy.limit() == guard.limit()
