"""Evaluations in reports: their figures and tables, and nothing about steps that they did not make."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from report_samples import make_run, variant

from burst_cli.eval.view import evaluation_tables
from burst_cli.report.build import Request, build_report
from burst_cli.report.panels import needle_tables
from burst_cli.report.records import effective_time
from burst_cli.report.write import report_page
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


@pytest.mark.parametrize("format", ["md", "csv", "latex", "json", "table"])
def test_every_format_shows_what_was_evaluated_and_needs_no_steps(burst, runs_dir: Path, format: str) -> None:
    text = burst("report", "tiny-eval", "--format", format).out
    assert ("50\\%" if format == "latex" else "3.125") in text
    if format == "json":
        (run,) = json.loads(text)["runs"]
        assert (run["final_needle_by_depth"], run["tokens_per_s"]) == (figures(0)["needle_by_depth"], None)
    if format == "table":
        weights = "weights of 20260101-000000-aaaaaa after step 40"
        wanted = ("needles right", "50%", weights, "256 to 511", "needle at depth")
        assert [part for part in wanted if part not in text] == []
        assert "needle" not in burst("report", "tiny").out
    if format == "md":
        assert "| needle at depth |" in text


def test_the_page_has_the_tables_and_lengths_side_by_side(runs_dir: Path) -> None:
    make_evaluation(runs_dir, 2, seq_len=1024)
    page, _ = report_page(build_report(Request(runs_dir, ("tiny-eval",))))
    assert '<th class="n">512 tokens</th><th class="n">1K tokens</th>' in page
    assert page.count(">50%, +1.50</td>") == 2
    assert '<th class="n">needle at depth</th>' in page
    assert "256 to 511" in page


def test_needles_are_of_the_newest_run_of_every_length_however_they_are_sorted(runs_dir: Path) -> None:
    for number, seq_len, gain in ((2, 512, 9.0), (3, 256, 1.0), (4, 512, 2.0)):
        make_evaluation(runs_dir, number, seq_len, final_needle_by_depth=_depths(gain))
    found = build_report(Request(runs_dir, ("tiny-eval",), sort="-run"))
    assert needle_tables(found.groups[0].by_age) == [
        [["needles: right, gain", "256 tokens", "512 tokens"], ["25%", "100%, +1.00", "100%, +2.00"]]
    ]
    record = {"seq_len": 1024, "final_needle_by_depth": [{"depth": 0.5}]}
    assert needle_tables([*found.groups[0].by_age, record])[0][1:] == [
        ["25%", "100%, +1.00", "100%, +2.00", "–"],
        ["50%", "–", "–", "–"],
    ]


def _depths(gain: float) -> list[Mapping[str, Any]]:
    return [{"depth": 0.25, "accuracy": 1.0, "gain": gain}]


@pytest.mark.parametrize(
    "table",
    [None, [], 7, "text", [3], [{}], [{"depth": "<b>", "gain": "x"}], [{"depth": 0.5, "gain": None, "accuracy": None}]],
    ids=str,
)
def test_damaged_tables_are_shown_as_far_as_they_go(runs_dir: Path, table: Any) -> None:
    record = {"seq_len": 64, "evaluated_step": table, "final_needle_by_depth": table}
    needle_tables([record, {**record, "seq_len": 128}])
    evaluation_tables(record)
    make_evaluation(runs_dir, 3, final_needle_by_depth=table, evaluated_step=table)
    assert "tiny-eval" in report_page(build_report(Request(runs_dir, ("tiny-eval",))))[0]


def test_start_up_ends_where_evaluation_begins(runs_dir: Path) -> None:
    run = make_evaluation(runs_dir, 4)
    begin = run.read_state()["history"][1]["at"]
    (run.path / "events.jsonl").write_text("")
    events = [{"at": begin, "kind": "phase", "phase": phase} for phase in ("restore", "evaluate")]
    (run.path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert effective_time(run)["start_up_s"] == pytest.approx(0.0, abs=1e-3)
