from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runs.summary import MEDIANS, predicted_facts, spread, summarise


def rows(*times: float, **more: float | None) -> list[dict[str, float | int | None]]:
    return [{"step": i, "step_time_s": t, "tokens": 10, "loss": 5.0 - i, **more} for i, t in enumerate(times, start=1)]


def test_medians_leave_out_the_warm_up() -> None:
    summary = summarise(rows(100.0, 50.0, 1.0, 2.0, 3.0), warmup_steps=2)
    assert (summary["step_time_s"], summary["step_time_s_n"]) == (2.0, 3)
    assert (summary["step_time_s_p25"], summary["step_time_s_p75"]) == (1.5, 2.5)


def test_totals_and_finals_count_every_step() -> None:
    summary = summarise(rows(1.0, 1.0, 1.0), warmup_steps=2)
    assert (summary["steps"], summary["tokens_total"], summary["final_train_loss"]) == (3, 30, 2.0)


def test_a_run_shorter_than_its_warm_up_is_measured_by_its_last_step() -> None:
    summary = summarise(rows(1.0, 2.0), warmup_steps=3)
    assert (summary["step_time_s"], summary["step_time_s_n"], summary["steps"]) == (2.0, 1, 2)


def test_run_without_rows_has_nulls_and_no_zeros() -> None:
    summary = summarise([], warmup_steps=3)
    assert summary["steps"] == 0
    assert all(summary[name] is None for name in (*MEDIANS, "peak_memory_bytes", "final_train_loss", "tokens_total"))


def test_null_figures_are_left_out_of_medians() -> None:
    table = rows(1.0, 2.0, 3.0)
    table[1]["step_time_s"] = None
    summary = summarise(table, warmup_steps=0)
    assert (summary["step_time_s"], summary["step_time_s_n"]) == (2.0, 2)


def test_later_row_of_a_repeated_step_counts() -> None:
    table = [*rows(9.0, 9.0), *rows(1.0, 1.0, 1.0)]
    summary = summarise(table, warmup_steps=0)
    assert (summary["step_time_s"], summary["step_time_s_n"], summary["steps"]) == (1.0, 3, 3)


def test_peak_memory_is_the_largest_of_all_steps() -> None:
    table = rows(1.0, 1.0)
    table[0]["peak_memory_bytes"] = 7
    assert summarise(table, warmup_steps=1)["peak_memory_bytes"] == 7


def test_validation_figures_are_the_last_measured() -> None:
    table = rows(1.0, 1.0, 1.0)
    table[0]["validation_loss"], table[1]["validation_loss"] = 3.0, 2.5
    assert summarise(table, warmup_steps=0)["final_validation_loss"] == 2.5


def test_rows_without_a_step_are_ignored() -> None:
    assert summarise([{"loss": 1.0}, {"step": "x"}, {"step": 1, "loss": 2.0}], 0)["final_train_loss"] == 2.0


@given(st.lists(st.floats(min_value=-1e9, max_value=1e9), min_size=1, max_size=30))
def test_spread_agrees_with_the_statistics_library(values: list[float]) -> None:
    figures = spread("x", values)
    assert figures["x"] == pytest.approx(
        statistics.median(values), rel=1e-12, abs=1e-9
    )  # rounding of one interpolation
    assert min(values) <= figures["x_p25"] <= figures["x"] + 1e-6
    assert figures["x"] - 1e-6 <= figures["x_p75"] <= max(values)
    assert figures["x_n"] == len(values)
    assert all(math.isfinite(figures[key]) for key in ("x", "x_p25", "x_p75"))


def test_prediction_of_the_memory_plan_stands_in_the_summary() -> None:
    plan = {"device_peak_bytes": 5, "source": "the prediction", "fits": True}
    assert predicted_facts(plan) == {"predicted_peak_bytes": 5, "predicted_peak_source": "the prediction"}


def test_prediction_of_time_stands_beside_that_of_memory() -> None:
    plan = {"device_peak_bytes": None, "step_time": {"seconds": 1.5, "machine": "h100", "parts": {}}}
    assert predicted_facts(plan) == {"predicted_step_time_s": 1.5, "predicted_step_machine": "h100"}


@pytest.mark.parametrize("plan", [None, {}, {"device_peak_bytes": None, "step_time": None}])
def test_run_without_a_prediction_says_nothing_of_one(plan: dict[str, object] | None) -> None:
    assert predicted_facts(plan) == {}
