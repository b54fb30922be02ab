"""Evaluations in reports: their figures and tables, and nothing about steps that they did not make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_samples import make_run, variant

from burst_cli.report.effective import effective_time
from engine.runs.folder import RunFolder


def figures(step: int) -> dict[str, Any]:
    """The one row of an evaluation."""
    depths = [
        {"depth": place / 2, "position": 200 * place, "accuracy": place / 2, "loss": 2.0, "gain": 1.5 * place}
        for place in range(3)
    ]
    positions = [{"first": 0, "last": 255, "loss": 3.25}, {"first": 256, "last": 511, "loss": 3.0}]
    return {
        "step": 40,
        "validation_loss": 3.125,
        "validation_bits_per_byte": 1.75,
        "validation_loss_by_position": positions,
        "needle_accuracy": 0.5,
        "needle_gain": 1.5,
        "needle_by_depth": depths,
        "evaluation_s": 2.0,
        "peak_memory_bytes": 2**30,
    }


def make_evaluation(runs_dir: Path, number: int, seq_len: int = 512, **summary: Any) -> RunFolder:
    facts = {"evaluated_run": "20260101-000000-aaaaaa", "evaluated_step": 40}
    made: RunFolder = make_run(
        runs_dir,
        f"tiny-eval/20260101-00000{number}-{number:06x}",
        config=variant("ring", seq_len),
        steps=1,
        row=figures,
        **{**facts, **summary},
    )
    written = made.read_summary()
    assert written is not None
    made.write_summary({**written, "steps": 0})
    return made


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs", "tiny/20260101-000000-aaaaaa")
    make_evaluation(tmp_path / "runs", 1)
    return tmp_path / "runs"


def test_table_page_and_document_show_what_was_evaluated(burst, runs_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    (run,) = json.loads(burst("report", "tiny-eval", "--json", "--output", str(page)).out)["runs"]
    assert (run["final_needle_by_depth"], run["tokens_per_s"]) == (figures(0)["needle_by_depth"], None)
    weights = "weights of 20260101-000000-aaaaaa after step 40"
    wanted = ("3.125", "needles right", "50%", weights, "256 to 511", "needle at depth")
    for text in (burst("report", "tiny-eval").out, page.read_text(encoding="utf-8")):
        assert [part for part in wanted if part not in text] == []
    assert "needle" not in burst("report", "tiny").out


@pytest.mark.parametrize(
    "table",
    [None, [], 7, "text", [3], [{}], [{"depth": "<b>", "gain": "x"}], [{"depth": 0.5, "gain": None, "accuracy": None}]],
    ids=str,
)
def test_damaged_tables_are_shown_as_far_as_they_go(burst, runs_dir: Path, table: Any) -> None:
    make_evaluation(runs_dir, 3, final_needle_by_depth=table, evaluated_step=table)
    assert "tiny-eval/20260101-000003-000003" in burst("report", "000003").out


def test_start_up_ends_where_evaluation_begins(runs_dir: Path) -> None:
    run = make_evaluation(runs_dir, 4)
    begin = run.read_state()["history"][1]["at"]
    (run.path / "events.jsonl").write_text("")
    events = [{"at": begin, "kind": "phase", "phase": phase} for phase in ("restore", "evaluate")]
    (run.path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert effective_time(run)["start_up_s"] == pytest.approx(0.0, abs=1e-3)
