"""`burst report --sweep`: every cell is a row, also the ones that never ran; and figures that others published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_samples import make_run, report, variant

from burst_cli.report.against import caveats_of, load_published
from burst_cli.report.build import Request, build_report
from burst_cli.report.panels import PUBLISHED, group_panels, style_numbers
from burst_cli.report.write import report_page
from engine.config.errors import ConfigError
from engine.runs.summary import config_facts


def cell(name: str, preset: str, seq_len: int, state: str, run: Path | None = None, **facts: Any) -> dict[str, Any]:
    overrides = ["exp=tiny", f"attention={preset}", f"train.seq_len={seq_len}"]
    known = config_facts(replace(variant(preset, seq_len), exp="tiny"))
    path = str(run) if run else None
    return {
        "id": name,
        "exp": "tiny",
        "facts": known,
        "overrides": overrides,
        "run_path": path,
        "state": state,
        **facts,
    }


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    first = make_run(tmp_path, "tiny/20260101-000001-aaaaaa", config=variant("ring", 512))
    second = make_run(tmp_path, "tiny/20260101-000002-bbbbbb", config=variant("burst", 512))
    lost = make_run(tmp_path, "tiny/20260101-000003-cccccc", config=variant("burst", 1024), final="oom", steps=0)
    make_run(tmp_path, "tiny/20260101-000004-dddddd", config=variant("ulysses", 512))
    cells = [
        cell("c1", "ring", 512, "completed", first.path),
        cell("c2", "burst", 512, "completed", Path("tiny/20260101-000002-bbbbbb")),
        cell("c3", "burst", 1024, "oom", lost.path),
        cell("c4", "ring", 1024, "pending"),
        cell("c5", "ring", 2048, "oom", None, result={"predicted": True, "message": "needs 90 GiB"}),
        cell("c6", "burst", 2048, "completed", tmp_path / "tiny/20260101-999999-ffffff"),
    ]
    write(tmp_path, "lengths-12ab", {"cells": cells})
    assert second.run_id.endswith("bbbbbb")
    return tmp_path


def write(runs_dir: Path, name: str, document: dict[str, Any]) -> None:
    folder = runs_dir / "sweeps" / name
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps({"format": 1, **document}))


def test_every_cell_is_a_row_of_one_group(runs_dir: Path) -> None:
    found = build_report(Request(runs_dir, sweep="lengths-12ab"))
    assert [(record["cell"], record["status"]) for record in found.records] == [
        ("c1", "completed"),
        ("c2", "completed"),
        ("c3", "oom"),
        ("c4", "not run"),
        ("c5", "oom"),
        ("c6", "missing"),
    ]
    assert len(found.groups) == 1
    assert found.sweep is not None
    assert found.sweep.line == "sweep lengths-12ab, 6 cells: 2 completed, 2 oom, 1 not run, 1 missing"


def test_missing_cells_are_seen_in_table_and_page(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs_dir, "--sweep", "12ab") == 0
    output = capsys.readouterr().out
    assert "cell c4" in output
    assert "not run" in output
    page = report_page(build_report(Request(runs_dir, sweep="lengths", is_page=True)))[0]
    assert ">not run<" in page
    assert ">missing<" in page
    assert "needs 90 GiB" in page


def test_cell_that_is_expected_not_to_fit_is_marked_at_its_length(runs_dir: Path) -> None:
    found = build_report(Request(runs_dir, sweep="lengths"))
    panels = group_panels(found.groups[0].names, found.groups[0].records, style_numbers(found.records))
    assert {(name, length) for name, _, length in panels[0].missing} == {("burst/full", 1024), ("ring/full", 2048)}


def test_json_keeps_runs_and_cells_apart(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs_dir, "--sweep", "lengths-12ab", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["runs"]) == 3
    assert all(run["run_id"] for run in document["runs"])
    assert [one["run_id"] for one in document["sweep"]["cells"]][3:] == [None, None, None]
    assert document["sweep"]["states"] == {"completed": 2, "oom": 2, "not run": 1, "missing": 1}


@pytest.mark.parametrize(
    ("name", "words"), [("lengthz", "did you mean lengths-12ab?"), ("l", "2 sweeps are meant"), ("broken", "damaged")]
)
def test_sweeps_that_cannot_be_read_are_named(
    runs_dir: Path, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(runs_dir, "lx", {"cells": []})
    (runs_dir / "sweeps/broken").mkdir()
    (runs_dir / "sweeps/broken/sweep.json").write_text("{")
    assert report(runs_dir, "--sweep", name) == 2
    assert words in capsys.readouterr().err


def test_damaged_cells_are_counted_and_the_rest_is_shown(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"id": None, "overrides": "no list", "state": 3, "run_path": ["x"], "result": "y"}
    write(runs_dir, "odd", {"cells": [good, 7, None]})
    assert report(runs_dir, "--sweep", "odd") == 0
    captured = capsys.readouterr()
    assert "2 cells are damaged" in captured.err
    assert "cell None" in captured.out


def test_filters_that_would_hide_cells_are_refused(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs_dir, "--sweep", "lengths", "--latest") == 2
    assert "all cells of a sweep" in capsys.readouterr().err
    assert report(runs_dir, "--sweep", "lengths", "--status", "oom", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 1


def test_sweep_without_cells_is_refused(runs_dir: Path) -> None:
    write(runs_dir, "none", {"cells": "many"})
    with pytest.raises(ConfigError, match="does not describe a sweep"):
        build_report(Request(runs_dir, sweep="none"))


# --- published --------------------------------------------------------------------------------------------------------


def test_published_rows_carry_hardware_source_and_caveats() -> None:
    rows = load_published("all")
    assert len(rows) == 47
    assert all(row.hardware is not None and row.source and row.caveats for row in rows)
    oom = [row for row in rows if row.status == "oom"]
    assert len(oom) == 3
    assert all(row.tokens_per_s_per_device is None for row in oom)


def test_published_speed_and_share_are_those_of_the_source() -> None:
    best = next(row for row in load_published("BurstEngine") if row.method == "burst/attn_out" and row.model == "7b")
    assert (best.tokens_per_s_per_device, best.peak_memory_gb, best.mfu) == (100.1, 55.4, 0.542)
    assert any("unfused loss" in caveat for caveat in caveats_of(load_published("burstengine")))


def test_unknown_system_is_refused_with_those_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(tmp_path, "--published", "burstengin") == 2
    assert "did you mean burstengine?" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["table", "md", "json"])
def test_published_rows_are_apart_from_runs(runs_dir: Path, format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs_dir, "--published", "torchtitan", "--format", format) == 0
    output = capsys.readouterr().out
    assert "torchtitan benchmark notes" in output
    if format == "json":
        document = json.loads(output)
        assert len(document["runs"]) == 4
        assert [row["tokens_per_s_per_device"] for row in document["published"]] == [548, 1071]


def test_published_figures_are_hollow_in_plots_of_the_same_size_and_nowhere_else(
    runs_dir: Path, tmp_path: Path
) -> None:
    rows = load_published("burstengine")
    large = tmp_path / "large"
    for place, length in enumerate((1048576, 2097152)):
        make_run(large, f"llama7b/20260101-00000{place}-aaaaaa", config=variant("ring", length), model="llama7b")
    for folder, expected in ((runs_dir, False), (large, True)):
        found = build_report(Request(folder))
        panels = group_panels(found.groups[0].names, found.groups[0].records, style_numbers(found.records), rows)
        drawn = [line for line in panels[0].lines if line.is_published]
        assert bool(drawn) is expected
        assert all(line.name.startswith(PUBLISHED) for line in drawn)
        assert (panels[0].note is not None) is expected
    page = report_page(build_report(Request(large, published="burstengine", is_page=True)))[0]
    assert "published (hollow): BurstEngine, 32 × A800-80GB" in page
    assert "stroke-dasharray" in page
