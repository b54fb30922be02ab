from __future__ import annotations

from typing import Any

import pytest

from engine.runs.summary import MEDIANS, predicted_facts, summarise


def rows(*times: float) -> list[dict[str, Any]]:
    return [{"step": i, "step_time_s": t, "tokens": 10, "loss": 5.0 - i} for i, t in enumerate(times, start=1)]


REPEATED = [*rows(9.0, 9.0), *rows(1.0, 1.0, 1.0)]  # a run that was taken up again
MEASURED = rows(1.0, 2.0, 3.0)
MEASURED[0] |= {"peak_memory_bytes": 7, "validation_loss": 3.0}
MEASURED[1] |= {"step_time_s": None, "validation_loss": 2.5}
NOTHING = dict.fromkeys((*MEDIANS, "peak_memory_bytes", "final_train_loss", "tokens_total"))


@pytest.mark.parametrize(
    ("table", "warmup", "expected"),
    [
        (
            rows(100.0, 50.0, 1.0, 2.0, 3.0),
            2,
            {"step_time_s": 2.0, "step_time_s_n": 3, "step_time_s_p25": 1.5, "step_time_s_p75": 2.5},
        ),
        (rows(1.0, 1.0, 1.0), 2, {"steps": 3, "tokens_total": 30, "final_train_loss": 2.0}),
        (rows(1.0, 2.0), 3, {"step_time_s": 2.0, "step_time_s_n": 1, "steps": 2}),
        ([], 3, {"steps": 0, **NOTHING}),
        (REPEATED, 0, {"step_time_s": 1.0, "step_time_s_n": 3, "steps": 3}),
        (MEASURED, 0, {"step_time_s": 2.0, "step_time_s_n": 2, "final_validation_loss": 2.5}),
        (MEASURED, 1, {"peak_memory_bytes": 7}),
        ([{"loss": 1.0}, {"step": "x"}, {"step": 1, "loss": 2.0}], 0, {"final_train_loss": 2.0}),
    ],
)
def test_figures_of_a_run(table: list[dict[str, Any]], warmup: int, expected: dict[str, Any]) -> None:
    assert summarise(table, warmup).items() >= expected.items()


STEP = {"seconds": 1.5, "machine": "h100", "parts": {}}


@pytest.mark.parametrize(
    ("plan", "facts"),
    [
        ({"device_peak_bytes": 5, "fits": True}, {"predicted_peak_bytes": 5}),
        (
            {"device_peak_bytes": None, "step_time": STEP},
            {"predicted_step_time_s": 1.5, "predicted_step_machine": "h100"},
        ),
        (None, {}),
        ({}, {}),
        ({"device_peak_bytes": None, "step_time": None}, {}),
    ],
)
def test_what_was_predicted_stands_in_the_summary(plan: dict[str, Any] | None, facts: dict[str, Any]) -> None:
    assert predicted_facts(plan) == facts
