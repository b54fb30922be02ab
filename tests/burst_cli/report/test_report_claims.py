"""A report claims no more than its data show: few steps rank nobody, two peaks are not compared, one way to pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_samples import make_run, metrics, variant

from burst_cli.report.build import Request, build_report
from burst_cli.report.panels import (
    MEMORY,
    MFU,
    SPEED,
    Line,
    Panel,
    Point,
    group_panels,
    style_numbers,
)

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


def shown(runs_dir: Path) -> dict[str, Panel]:
    """The panels of all runs."""
    found = build_report(Request(runs_dir))
    (group,) = found.groups
    panels = group_panels(group.records, style_numbers(found.records))
    return {panel.key: panel for panel in panels}


@pytest.mark.parametrize("measured", [4, 5])
def test_who_has_few_measured_steps_is_not_ranked(tmp_path: Path, measured: int) -> None:
    add_methods(tmp_path, steps=1 + measured)  # the first is the warm-up
    panels = shown(tmp_path)
    is_ranked = measured == 5
    assert ("is fastest" in panels["tokens_per_s_per_device"].title) == is_ranked
    assert ("with burst" in panels["mfu"].title) == is_ranked


def test_utilisations_of_two_peaks_stand_in_no_comparison(tmp_path: Path) -> None:
    add_methods(tmp_path, peak_flops_per_device=2e12)
    panels = shown(tmp_path)
    assert "mfu" not in panels
    assert "tokens_per_s_per_device" in panels
    compared = build_report(Request(tmp_path, compare=("000000", "000001"))).comparison
    assert compared is not None
    assert [one.metric for one in compared.differences if "mfu" in one.metric] == []
    assert any("not compared" in warning for warning in compared.warnings)
    (verdict,) = build_report(Request(tmp_path, names=("000001",), fail_below=("mfu=50%of000000",))).verdicts
    assert (verdict.passed, verdict.limit) == (False, None)


def test_runs_of_one_length_are_one_point(tmp_path: Path) -> None:
    add_methods(tmp_path)
    add_run(tmp_path, 10, "burst", 512, 4000.0)
    add_run(tmp_path, 11, "burst", 512, 100.0, final="failed")  # has no part in it
    panels = shown(tmp_path)
    (line,) = (line for line in panels["tokens_per_s_per_device"].lines if line.name == "burst/full")
    point = line.points[0]
    assert (point.y, point.low, point.high) == (3000.0, 2000.0, 4000.0)


def methods(metric: str, ring: float, burst: float) -> list[dict[str, Any]]:
    """Runs of two methods; only `ring` was also run at the longest length."""
    return [
        {
            **{"attention_preset": preset, "seq_len": seq_len, "status": "completed", "step_time_s_n": 9},
            **{metric: value, f"{metric}_p25": 0.9 * value, f"{metric}_p75": 1.1 * value},
        }
        for preset, seq_len, value in (("ring", 1024, ring), ("burst", 1024, burst), ("ring", 2048, ring))
    ]


@pytest.mark.parametrize(
    ("metric", "ring", "burst", "title"),
    [
        (SPEED, 100, 200, "burst is fastest at 1K: 200 tokens/s, 2× ring"),
        (SPEED, 100, 120, "Tokens/s per device: burst and ring lie within their spread at 1K"),
        (SPEED, 100, 0, "Tokens/s per device"),
        (MFU, 0.5, 0.4, "MFU at 1K: 50% with ring, 40% with burst"),
        (MEMORY, 2**30, 2**31, "ring needs least memory at 1K: 1 GiB, burst 2 GiB"),
        (MEMORY, 100, 101, "ring and burst need the same memory at 1K: 100 B"),
    ],
)
def test_a_title_says_who_is_best_where_two_were_measured(metric: str, ring: float, burst: float, title: str) -> None:
    records = methods(metric, ring, burst)
    (panel,) = group_panels(records, style_numbers(records))
    assert (panel.title, panel.kind) == (title, "lines")
    (panel,) = group_panels(records[:2], style_numbers(records))  # at one length
    assert (panel.title, panel.kind) == (title, "dots")


def test_a_panel_of_memory_as_a_whole() -> None:
    records = methods(MEMORY, 2**28, 2**29)
    records.append({"attention_preset": "burst", "seq_len": 2048, "status": "oom"})
    assert group_panels(records, style_numbers(records)) == [
        Panel(
            MEMORY,
            "lines",
            "ring needs least memory at 1K: 256 MiB, burst 512 MiB",
            "sequence length (tokens)",
            "peak memory (MiB)",
            (
                Line("burst", 0, (Point(1024, 512, 0.9 * 512, 1.1 * 512),)),
                Line("ring", 1, (Point(1024, 256, 0.9 * 256, 1.1 * 256), Point(2048, 256, 0.9 * 256, 1.1 * 256))),
            ),
            (("burst", 0, 2048),),
        )
    ]


def test_predictions_are_held_against_what_was_measured() -> None:
    records = [
        {"attention_preset": preset, "seq_len": 512, "predicted_peak_bytes": 2**30, **measured}
        for preset, measured in (
            ("ring", {"peak_tensor_bytes": 2**29, "peak_memory_bytes": 2**33}),  # on a CPU: live tensors
            ("burst", {"peak_memory_bytes": 2**31}),
        )
    ]
    (panel,) = [one for one in group_panels(records, style_numbers(records)) if one.key == "prediction"]
    assert panel == Panel(
        "prediction",
        "scatter",
        "Memory predictions are -50% to +100% off what was measured",
        "predicted peak (GiB)",
        "measured peak (GiB)",
        (Line("burst", 0, (Point(1, 2, 2, 2),)), Line("ring", 1, (Point(1, 0.5, 0.5, 0.5),))),
    )
