from __future__ import annotations

from typing import Any

import pytest

from engine.runs.record import FINAL_TABLES, FINALS, MAXIMA, MEDIANS, predicted_facts, summarise

FIGURES = {name: f"final_{name}" for name in FINALS} | {"loss": "final_train_loss"}
NOTHING: dict[str, Any] = {
    **{"steps": 0, "tokens_total": None, "dropped_steps": 0, "warmup_metric_steps": 0},
    **{f"{name}{part}": 0 if part == "_n" else None for name in MEDIANS for part in ("", "_p25", "_p75", "_n")},
    **dict.fromkeys((*MAXIMA, *FIGURES.values())),
}
MEASURED: list[dict[str, Any]] = [
    {"step": 1, "tokens": 10, "step_time_s": 9.0, **dict.fromkeys(MAXIMA, 7), **dict.fromkeys(FINALS, 3.0)},
    {"step": 2, "tokens": 10, "step_time_s": None, "dropped": "skip", **dict.fromkeys(FINALS, 2.5)},
    {"step": 3, "tokens": 10, "step_time_s": 1.0, "loss": 2.0, **{name: [1] for name in FINAL_TABLES}},
    {"step": 4, "tokens": 10, "step_time_s": 3.0, "mfu": True, **{name: [2] for name in FINAL_TABLES}},
    {"step": 5, "tokens": 10, "step_time_s": 2.0, "dropped": None},
]


@pytest.mark.parametrize(
    ("table", "warmup", "expected"),
    [
        (
            MEASURED,
            1,
            {
                **{"steps": 5, "tokens_total": 50, "dropped_steps": 1, "warmup_metric_steps": 1},
                **{"step_time_s": 2.0, "step_time_s_n": 3, "step_time_s_p25": 1.5, "step_time_s_p75": 2.5},
                **{**dict.fromkeys(MAXIMA, 7), **dict.fromkeys(FIGURES.values(), 2.5), "final_train_loss": 2.0},
                **{f"final_{name}": [2] for name in FINAL_TABLES},
            },
        ),
        ([], 3, {}),
        *(
            (
                [{"step": step, "step_time_s": 2.0} for step in range(1, 3)],
                warmup,
                {"steps": 2, "warmup_metric_steps": 1, "step_time_s": 2.0, "step_time_s_n": 1}
                | dict.fromkeys(("step_time_s_p25", "step_time_s_p75"), 2.0),
            )
            for warmup in (1, 3)
        ),
        (
            [{"loss": 1.0}, {"step": "x"}, {"step": 1, "loss": 2.0}, {"step": 1, "loss": 1.0}],
            0,
            {"steps": 1, "final_train_loss": 1.0},  # of a run that was taken up again the later row
        ),
    ],
)
def test_figures_of_a_run(table: list[dict[str, Any]], warmup: int, expected: dict[str, Any]) -> None:
    assert summarise(table, warmup) == NOTHING | expected


def test_the_prediction_is_in_the_summary() -> None:
    step = {"step_time": {"seconds": 1.5, "machine": "h100", "parts": {}}}
    times = {"predicted_step_time_s": 1.5, "predicted_step_machine": "h100"}
    assert predicted_facts({"device_peak_bytes": 5, "fits": True}) == {"predicted_peak_bytes": 5}
    assert predicted_facts({"device_peak_bytes": None} | step) == times
    assert predicted_facts({"device_peak_bytes": 0} | step) == {"predicted_peak_bytes": 0} | times
    for nothing in (None, {}, {"device_peak_bytes": None, "step_time": None}):
        assert predicted_facts(nothing) == {}
