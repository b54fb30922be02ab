"""Evaluations in reports: their figures and tables, and nothing about steps that they did not make."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_samples import make_run, variant
from testkit.terminal import lines_of

from burst_cli.report.build import build_report
from burst_cli.report.effective import effective_time
from burst_cli.report.write import parts_of
from burst_cli.runs.evaluation import evaluation_lines, evaluation_tables, evaluation_view
from engine.runs.folder import RunFolder

DEPTHS = [
    {"depth": place / 2, "position": 200 * place, "accuracy": place / 2, "loss": 2.0, "gain": 1.5 * place}
    for place in range(3)
]
FIGURES = {  # the one row of an evaluation
    "step": 40,
    "validation_loss": 3.125,
    "validation_bits_per_byte": 1.75,
    "validation_loss_by_position": [
        {"first": 0, "last": 255, "loss": 3.25},
        {"first": 256, "last": 511, "loss": 3.0},
    ],
    "needle_accuracy": 0.5,
    "needle_gain": 1.5,
    "needle_by_depth": DEPTHS,
    "evaluation_s": 2.0,
    "peak_memory_bytes": 2**30,
}
LOSSES = "validation loss 3.1250 bits/byte 1.7500 on sequences of 512 tokens"
NEEDLES = "needles, all depths: 50% right, gain 1.5000 nats per token of the answer"


@pytest.fixture
def evaluation(tmp_path: Path) -> RunFolder:
    make_run(tmp_path / "runs", "tiny/20260101-000000-aaaaaa")
    name, facts = "tiny-eval/20260101-000001-000001", {"evaluated_run": "20260101-000000-aaaaaa", "evaluated_step": 40}
    made = make_run(tmp_path / "runs", name, config=variant("ring"), steps=1, row=lambda _: FIGURES, **facts)
    return changed(made, steps=0)


def changed(run: RunFolder, **summary: Any) -> RunFolder:
    run.write_summary({**(run.read_summary() or {}), **summary})
    return run


def test_evaluations_are_in_every_form_of_a_report(burst, evaluation: RunFolder, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    (run,) = json.loads(burst("report", "tiny-eval", "--json", "--output", str(page)).out)["runs"]
    assert (run["final_needle_by_depth"], run["tokens_per_s"]) == (DEPTHS, None)
    assert lines_of(evaluation_view(run)) == [
        *("weights of 20260101-000000-aaaaaa after step 40", LOSSES, NEEDLES, "", "tokens loss"),
        *("0 to 255 3.2500", "256 to 511 3.0000", "", "needle at depth token right loss gain"),
        *("0% 0 0% 2.0000 0.0000", "50% 200 50% 2.0000 1.5000", "100% 400 100% 2.0000 3.0000"),
    ]
    found = build_report(tmp_path / "runs", ["tiny-eval"])
    many = replace(found, groups=(("", list(found.records) * 6),))
    assert [part.title for part in parts_of(many) if part.is_aside] == ["tiny-eval/20260101-000001-000001"] * 4
    holes = [{"first": 3, "loss": 1.0}, {"last": 3}]
    bare = {"final_validation_loss_by_position": holes, "final_needle_by_depth": [{}]}
    dashes = [["–", "1.0000"], ["–", "–"]], [["–"] * 5]
    assert tuple(rows for _, *rows in evaluation_tables(bare)) == dashes
    assert evaluation_lines({"evaluated_step": 4}) == ["weights of model.init_from", "validation loss –  bits/byte –"]
    wanted = ("3.125", "needles right", "needle gain", "50%", "256 to 511", "needle at depth")
    for text in (burst("report", "tiny-eval").out, page.read_text(encoding="utf-8")):
        assert [part for part in wanted if part not in text] == []
    assert "needle" not in burst("report", "tiny").out


def test_damaged_tables_of_evaluations_are_shown(burst, evaluation: RunFolder) -> None:
    odd = [{"depth": "<b>", "gain": "x"}], [{"depth": 0.5, "gain": None, "accuracy": None}]
    for table in (None, [], 7, "text", [3], [{}], *odd):
        changed(evaluation, final_needle_by_depth=table, evaluated_step=table)
        assert "tiny-eval/20260101-000001-000001" in burst("report", "000001").out


def test_start_up_ends_where_evaluation_begins(evaluation: RunFolder) -> None:
    begin = evaluation.read_state()["history"][1]["at"]
    events = [{"at": begin, "kind": "phase", "phase": phase} for phase in ("restore", "evaluate")]
    (evaluation.path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert effective_time(evaluation)["start_up_s"] == pytest.approx(0.0, abs=1e-3)
