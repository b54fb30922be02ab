"""A report claims no more than its data show: few steps rank nobody, two peaks are not compared, one way to pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_samples import make_run, metrics, variant

from burst_cli.report.build import Request, build_report
from burst_cli.report.panels import Matrix, Panel, group_panels, method_matrix, style_numbers

LENGTHS = (512, 1024)


def add_run(runs_dir: Path, place: int, preset: str, seq_len: int, speed: float, **facts: Any) -> None:
    def row(step: int) -> dict[str, Any]:
        return {**metrics(step), "tokens_per_s_per_device": speed, "mfu": speed / 1e4}

    name = f"tiny/20260101-0000{place:02d}-{place:06x}"
    make_run(runs_dir, name, config=variant(preset, seq_len), row=row, **{"steps": 8, **facts})


def add_methods(runs_dir: Path, **facts: Any) -> None:
    """`burst` is twice as fast as `ring` at both lengths."""
    for index, seq_len in enumerate(LENGTHS):
        add_run(runs_dir, 2 * index, "ring", seq_len, 1000.0)
        add_run(runs_dir, 2 * index + 1, "burst", seq_len, 2000.0, **facts)


def shown(runs_dir: Path) -> tuple[Matrix, dict[str, Panel]]:
    """The matrix and the panels of all runs."""
    found = build_report(Request(runs_dir))
    (group,) = found.groups
    matrix = method_matrix(group.records)
    assert matrix is not None
    panels = group_panels(group.names, group.records, style_numbers(found.records))
    return matrix, {panel.key: panel for panel in panels}


@pytest.mark.parametrize("measured", [4, 5])
def test_who_has_few_measured_steps_is_not_ranked(tmp_path: Path, measured: int) -> None:
    add_methods(tmp_path, steps=1 + measured)  # the first is the warm-up
    matrix, panels = shown(tmp_path)
    is_ranked = measured == 5
    assert any(cell.best for _, cells in matrix.rows for cell in cells) == is_ranked
    assert ("is fastest" in panels["tokens_per_s_per_device"].title) == is_ranked
    assert ("with burst" in panels["mfu"].title) == is_ranked


def test_utilisations_of_two_peaks_stand_in_no_comparison(tmp_path: Path) -> None:
    add_methods(tmp_path, peak_flops_per_device=2e12)
    matrix, panels = shown(tmp_path)
    assert "mfu" not in panels
    assert "tokens_per_s_per_device" in panels
    assert not any("%" in cell.details for _, cells in matrix.rows for cell in cells)
    compared = build_report(Request(tmp_path, compare=("000000", "000001"))).comparison
    assert compared is not None
    assert [one.metric for one in compared.differences if "mfu" in one.metric] == []
    assert any("not compared" in warning for warning in compared.warnings)
    (verdict,) = build_report(Request(tmp_path, names=("000001",), fail_below=("mfu=50%of000000",))).verdicts
    assert (verdict.passed, verdict.limit) == (False, None)


def test_one_peak_is_compared(tmp_path: Path) -> None:
    add_methods(tmp_path)
    matrix, panels = shown(tmp_path)
    assert "mfu" in panels
    assert all("%" in cell.details for _, cells in matrix.rows for cell in cells)


def test_matrix_and_plot_pool_runs_by_one_rule(tmp_path: Path) -> None:
    add_methods(tmp_path)
    add_run(tmp_path, 10, "burst", 512, 4000.0)
    add_run(tmp_path, 11, "burst", 512, 100.0, final="failed")  # has no part in it
    matrix, panels = shown(tmp_path)
    column = matrix.methods.index("burst/full")
    cell = dict(matrix.rows)["512"][column]
    (line,) = (line for line in panels["tokens_per_s_per_device"].lines if line.name == "burst/full")
    point = line.points[0]
    assert (cell.figure, cell.best) == ("3K", True)
    assert cell.details.endswith("2 runs")
    assert (point.y, point.low, point.high) == (3000.0, 2000.0, 4000.0)
