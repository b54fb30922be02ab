"""What a page draws, and how: runs of several methods, lengths and attempts; its words, marks and dashed lines."""

from __future__ import annotations

import html
import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_samples import make_run, metrics, variant

from burst_cli.report.build import build_report
from burst_cli.report.plots import (
    COLOURS,
    Line,
    Panel,
    Point,
    drawing_notes,
    group_panels,
    panel_svg,
    run_panels,
    style_numbers,
)
from engine.config.settings import DataConfig, OptimizerConfig

GIB = 2**30


def add_run(runs_dir: Path, place: int, preset: str, seq_len: int, speed: float, **facts: Any) -> None:
    def row(step: int) -> dict[str, Any]:
        return {**metrics(step), "tokens_per_s_per_device": speed, "mfu": speed / 1e4}

    name = f"tiny/20260101-0000{place:02d}-{place:06x}"
    make_run(runs_dir, name, config=variant(preset, seq_len), row=row, **{"steps": 8, **facts})


def shown(runs_dir: Path) -> dict[str, Panel]:
    """The panels of all runs by what they are of."""
    found = build_report(runs_dir)
    ((_, records),) = found.groups
    return {panel.y_label: panel for panel in group_panels(records, style_numbers(found.groups))}


def test_equal_runs_are_one_point_with_the_widest_quartiles(tmp_path: Path) -> None:
    for place, (preset, seq_len, speed) in enumerate([("ring", 512, 1000), ("ring", 1024, 500), ("burst", 512, 2000)]):
        add_run(tmp_path, place, preset, seq_len, speed)
    add_run(tmp_path, 10, "burst", 512, 4000.0, **{f"tokens_per_s_per_device_p{end}": end * 60.0 for end in (25, 75)})
    add_run(tmp_path, 11, "burst", 512, 100.0, final="failed")  # has no part in it
    add_run(tmp_path, 12, "burst", 1024, 0.0, final="oom", steps=0)
    assert shown(tmp_path)["tokens/s per device"] == Panel(
        "lengths",
        "Tokens/s per device",
        "sequence length (tokens)",
        "tokens/s per device",
        (
            Line("burst/full", 0, (Point(512, 3000.0, 1500.0, 4500.0),)),
            Line("ring/full", 1, (Point(512, 1000.0, 1000.0, 1000.0), Point(1024, 500.0, 500.0, 500.0))),
        ),
        (("burst/full", 0, 1024),),
    )


def test_utilisations_of_different_peaks_are_not_drawn(tmp_path: Path) -> None:
    add_run(tmp_path, 0, "ring", 512, 1000)
    add_run(tmp_path, 1, "burst", 512, 1000, peak_flops_per_device=1.01e12)
    assert list(shown(tmp_path)) == ["tokens/s per device", "MFU, causal-aware (%)", "peak memory (GiB)"]
    add_run(tmp_path, 2, "burst", 512, 1000, peak_flops_per_device=1.02e12)
    assert list(shown(tmp_path)) == ["tokens/s per device", "peak memory (GiB)"]


def test_memory_predictions_are_drawn_against_measurements(tmp_path: Path) -> None:
    on_cpu = {"peak_tensor_bytes": GIB / 2, "peak_memory_bytes": 8 * GIB}  # there live tensors are what is predicted
    for place, (preset, measured) in enumerate([("ring", on_cpu), ("burst", {"peak_memory_bytes": 2 * GIB})]):
        add_run(tmp_path / "predicted", place, preset, 512, 1000, predicted_peak_bytes=GIB, **measured)
    panel = shown(tmp_path / "predicted")["measured peak (GiB)"]
    assert panel.title == "Memory predictions are -50% to +100% off what was measured"
    assert panel.lines == (
        Line("burst/full", 0, (Point(1, 2, 2, 2),)),
        Line("ring/full", 1, (Point(1, 0.5, 0.5, 0.5),)),
    )


def test_curves_are_of_the_newest_run_of_each_configuration(tmp_path: Path) -> None:
    for place, power in enumerate((*range(7), 1), 1):
        add_run(tmp_path, place, "ring", 512 << power, 1000, steps=161 if place == 8 else 2)
    add_run(tmp_path, 11, "burst", 512, 1000, steps=1)  # a point is no curve
    add_run(tmp_path, 12, "ulysses", 512, 1000, steps=0, final="oom")
    records = build_report(tmp_path).records
    loss, step_time = run_panels(records)
    lengths = ["512", "2K", "4K", "8K", "16K", "32K", "1K"]
    assert [line.name for line in loss.lines] == [f"ring/full {length}" for length in lengths]
    assert (loss.y_label, step_time.y_label, loss.x_label) == ("training loss", "step time (s)", "optimizer step")
    newest = step_time.lines[6]
    assert (newest.style, len(newest.points), newest.is_dashed) == (6, 81, False)
    assert newest.points[::80] == (Point(1.5, *[pytest.approx(0.15)] * 3), Point(161, *[pytest.approx(16.1)] * 3))
    assert drawing_notes(records) == ["Not drawn: 1 older run of the same configuration as a newer one (000002)."]


def add_rates(runs_dir: Path, rates: Iterable[float], **data: Any) -> None:
    """A run per learning rate, of one method and length."""
    for place, rate in enumerate(rates):
        base = replace(variant("ring"), optimizer=OptimizerConfig(learning_rate=rate), data=DataConfig(**data))
        make_run(runs_dir, f"tiny/20260101-0000{place:02d}-{place:06x}", config=base)


def test_a_sweep_over_learning_rates_has_a_curve_per_rate(tmp_path: Path) -> None:
    rates = [place / 1000 for place in range(1, 13)]
    add_rates(tmp_path, rates)
    records = build_report(tmp_path).records
    panels = [panel for panel in run_panels(records) if panel.y_label == "training loss"]
    assert [line.name for panel in panels for line in panel.lines] == [f"learning_rate={rate:g}" for rate in rates]
    assert max(len(panel.lines) for panel in panels) <= 8, "more curves in a picture than can be told apart"
    assert drawing_notes(records) == []
    assert [record["differs"] for record in records] == [f"learning_rate={rate:g}" for rate in rates]


def test_runs_on_different_data_are_in_different_groups(tmp_path: Path) -> None:
    for place, paths in enumerate([("a.txt",), ("b.txt",), ("a.txt",)]):
        config = replace(variant("ring", 512 << place), data=DataConfig(format="text", paths=paths))
        make_run(tmp_path, f"tiny/20260101-00000{place}-{place:06x}", config=config)
    found = build_report(tmp_path)
    groups = [(title.rpartition(" · ")[2], [run["seq_len"] for run in runs]) for title, runs in found.groups]
    assert groups == [("paths=[a.txt]", [512, 2048]), ("paths=[b.txt]", [1024])]


def test_data_are_the_same_where_the_ranks_read_the_same_tokens(tmp_path: Path) -> None:
    copies = [("a.txt", "f00d"), ("copy_of_a.txt", "f00d"), ("a.txt", None)]
    for place, (path, digest) in enumerate(copies):
        config = replace(variant("ring"), data=DataConfig(format="text", paths=(path,)))
        final = "completed" if digest else "failed"
        name = f"tiny/20260101-00000{place}-{place:06x}"
        make_run(tmp_path, name, config=config, final=final, data_content_hash=digest)
    assert [len(runs) for _, runs in build_report(tmp_path).groups] == [3]


def test_a_speed_that_another_setting_changed_is_a_line_of_its_own(tmp_path: Path) -> None:
    for place, dtype in enumerate(("bfloat16", "float32")):
        config = variant("ring", 512, compute_dtype=dtype)
        make_run(tmp_path, f"tiny/20260101-00000{place}-{place:06x}", config=config)
    lines = shown(tmp_path)["tokens/s per device"].lines
    assert [line.name for line in lines] == ["ring/full compute_dtype=bfloat16", "ring/full compute_dtype=float32"]


def line(name: str, style: int, points: dict[float, float], **how: bool) -> Line:
    return Line(name, style, tuple(Point(x, y, 0.9 * y, 1.1 * y) for x, y in points.items()), **how)


RING = line("ring", 0, {512: 1000, 1024: 2000, 4096: 30000})
DRAWN = {
    "over lengths, on a logarithmic axis": (
        Panel("lengths", "t", "x", "y", (RING, line("burst", 9, {1024: 1000})), (("lost", 1, 2048),)),
        "512 1K 2K 4K x 1,000 2,000 5,000 10,000 20,000 y OOM  ring burst",
        [12, 7],
        0,
        (9, 11),
        "y over x of ring, burst; lost ran out of memory at 2048 tokens",
    ),
    "every second length where they would touch": (
        Panel("lengths", "t", "x", "y", (line("ring", 0, {2.0**at: 5.0 ** (at % 5) / 2 for at in range(8, 21)}),)),
        "256 1K 4K 16K 64K 256K 1M x 1 10 100 y ring",
        [42],
        0,
        (10, 12),
        "y over x of ring",
    ),
    "predicted against measured": (
        Panel("predictions", "t", "x", "y", (line("ring", 0, {1: 2, 3: 2}),)),
        "0.0 0.5 1.0 1.5 2.0 2.5 3.0 x 0.0 0.5 1.0 1.5 2.0 2.5 3.0 y as predicted ring",
        [3],
        2,
        (14, 18),
        "y over x of ring",
    ),
    "over steps, the second side dashed, names as they are": (
        Panel(
            "steps",
            "t",
            "x",
            "step time (s)",
            (
                line("_$\\frac{$<b>", 0, dict.fromkeys(range(8), 1.0)),
                line("漢字", 1, {**dict.fromkeys(range(200), 2.0), 200: 90.0}, is_dashed=True),
            ),
        ),
        "0 40 80 120 160 200 x 0.0 0.5 1.0 1.5 2.0 2.5 step time (s) $\\frac{$<b> 漢字",
        [2, 1],
        2,
        (12, 14),
        "step time (s) over x of _$\\frac{$<b>, 漢字",
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_panel_as_it_is_drawn(name: str) -> None:
    panel, words, marks, dashed, greys, described = DRAWN[name]
    svg = panel_svg(panel)
    assert " ".join(html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)) == words
    colours = Counter(re.findall(r'<use [^>]*style="fill: (#\w+)', svg))
    assert [colours[colour] for colour in COLOURS if colour in colours] == marks
    assert svg.count("stroke-dasharray") == dashed
    assert svg.rindex("#dfe3e8") < min(svg.index(colour) for colour in colours)  # lines hide the grid
    ticks = [float(x) for x in re.findall(r'"xtick_\d+">\s*<g id="line2d_\d+">\s*<path d="M ([\d.]+)', svg)]
    gaps = [right - left for left, right in itertools.pairwise(ticks)]
    assert (len(gaps) + 1, max(gaps) - min(gaps) < 0.1) == (len(words.partition(" x ")[0].split()), True)
    assert [svg.count(word) for word in ("#dfe3e8", "#5c6672", 'id="patch_')] == [*greys, 4]
    legend = re.findall(r'font-size: 8px[^>]* text-anchor: start" x="[\d.]+" y="([\d.]+)"', svg)
    named = len(panel.lines) + (panel.kind == "predictions")
    assert (len(legend), len(set(legend)), float(legend[0]) > 210) == (named, 1, True)  # a row below everything else
    assert all(float(half) < 3 for half in re.findall(r'd="M ([\d.]+) 0 \nL -', svg))  # ends of bars cover no marker
    font = "font-size: 9px; font-family: 'DejaVu Sans', sans-serif"
    assert ('width="295.2pt" height="223.2pt"' in svg, font in svg) == (True, True)
    assert panel.described == described
