"""`burst bench` as its user meets it: what is printed, written and refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from burst_cli.bench_plot import bench_figure, write_plot
from burst_cli.bench_view import bench_view, spread
from engine.attention.presets import PRESETS

Burst = Callable[..., Any]
QUICK = ("--ranks", "2", "--seq-lens", "64", "--heads", "2", "--head-dim", "8", "--repeats", "2", "--warmup", "0")


def timing(median_s: float) -> dict[str, Any]:
    return {"median_s": median_s, "min_s": 0.9 * median_s, "max_s": 1.5 * median_s, "repeats": 3}


def row(variant: str, total_s: float, *, mask: str = "causal", seq_len: int = 4096) -> dict[str, Any]:
    parts = {"forward": timing(total_s / 3), "backward": timing(2 * total_s / 3), "total": timing(total_s)}
    sent = {"intra": 3 << 20, "inter": 1 << 20, "host": 0, "forward": 1 << 20, "backward": 3 << 20}
    place = {"variant": variant, "mask": mask, "seq_len": seq_len, "time_over_first": total_s / 2}
    return place | parts | {"exposed_s": total_s / 4, "sent_bytes_all_ranks": sent}


def document(*rows: dict[str, Any], skipped: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    facts = {"device": "a processor", "cores": 2, "torch": "2", "load": 0.5, "date": "2026-11-20"}
    return {"benchmark": "attention", "environment": facts, "results": list(rows), "skipped": skipped or []}


def printed(shown: dict[str, Any]) -> str:
    console = Console(width=300, file=io.StringIO())
    with console.capture() as text:
        console.print(bench_view(shown))
    return text.get()


def test_attention_is_measured_written_and_drawn(burst: Burst, tmp_path: Path) -> None:
    files = (tmp_path / "new" / "result.json", tmp_path / "plot.svg")
    argv = ("--presets", "single,ring,burst:backward_circulates=q", "--output", str(files[0]), "--plot", str(files[1]))
    result = burst("bench", "attention", *QUICK, *argv, "--json")
    assert result.code == 0, result.err
    shown = json.loads(result.out)
    assert [item["variant"] for item in shown["results"]] == ["ring", "burst:backward_circulates=q"]
    assert [(item["variant"], item["seq_len"]) for item in shown["skipped"]] == [("single", 64)]
    assert shown["settings"]["ranks"] == 2
    assert shown["environment"]["torch"]
    assert json.loads(files[0].read_text()) == shown
    assert files[1].read_text().startswith("<?xml")
    assert all(f"written: {file}" in result.err for file in files)


def test_exchange_tables_name_speed_and_what_was_skipped(burst: Burst) -> None:
    result = burst("bench", "exchange", *QUICK, "--presets", "ring,single")
    assert result.code == 0, result.err
    assert "exchange, causal, 64 tokens" in result.out
    assert "MB/s per rank" in result.out
    assert "skipped single (causal 64): attention=single holds the whole sequence on one rank" in result.out


def test_loss_is_measured(burst: Burst) -> None:
    argv = ("--rows", "64,128", "--vocab-size", "256", "--hidden-size", "8", "--max-plain-rows", "64", "--repeats", "1")
    result = burst("bench", "loss", *argv, "--json")
    assert result.code == 0, result.err
    assert [sorted(item["timings"]) for item in json.loads(result.out)["results"]] == [["fused", "plain"], ["fused"]]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--presets", "brust"), "'brust' is no preset"),
        (("--presets", "ring,ring"), "--presets: got 'ring,ring'; expected different values"),
        (("--presets", "burst:circulates=q"), "no such setting"),
        (("--masks", "casual"), "did you mean causal"),
        (("--seq-lens", "4Q"), "--seq-lens: got '4Q'; expected positive whole numbers"),
        (("--ranks", "4", "--nodes", "3"), "legal numbers of nodes: 1, 2, 4"),
        (("--plot", "picture.gif"), "must end in .svg or .png"),
        (("--rank-command", "run {gpu}", "--presets", "ring"), "legal in braces"),
        (("--presets", "single"), "no variant is legal here"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(burst: Burst, argv: tuple[str, ...], words: str) -> None:
    result = burst("bench", "attention", *argv)
    assert result.code == 2
    assert words in result.err


def test_a_failing_rank_ends_the_command_with_its_words(burst: Burst) -> None:
    result = burst("bench", "attention", *QUICK, "--presets", "ring", "--rank-command", "sh -c 'echo no >&2; exit 3'")
    assert result.code == 1
    assert "failed first, exit code 3" in result.err
    assert "    no\n" in result.err


def test_the_command_line_loads_neither_torch_nor_matplotlib() -> None:
    code = "import sys, burst_cli.commands.bench; print({'torch', 'numpy', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout == "set()\n"


def test_all_presets_are_measured_unless_some_are_named(burst: Burst) -> None:
    """With a single rank that cannot start, so that only the choice is made."""
    result = burst("bench", "attention", "--rank-command", "no-such-tool", "--ranks", "1")
    assert result.code == 1
    count = int(result.err.split("tokens: ")[1].split(" variants")[0])
    assert 1 <= count <= len(PRESETS)


def test_tables_part_masks_and_lengths_and_join_reasons() -> None:
    reason = {"variant": "single", "reason": "alone"}
    skipped = [reason | {"mask": "causal", "seq_len": 4096}, reason | {"mask": "full", "seq_len": 4096}]
    text = printed(document(row("ring", 2.0), row("burst", 1.0), row("ring", 3.0, mask="full"), skipped=skipped))
    assert text.count("attention, ") == 2
    assert "0.50x" in text
    assert "skipped single (causal 4,096, full 4,096): alone" in text
    assert "500 ms" in text  # exposed, a quarter of 2 s


def test_spread_is_median_and_extremes() -> None:
    assert spread(timing(2.0)) == "2 s (1.8…3)"
    assert spread(None) == "–"


def test_bars_end_at_the_median_with_the_exposed_part_at_the_end() -> None:
    (axes,) = bench_figure(document(row("ring", 2.0), row("burst", 1.0))).axes
    widths = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert widths == [(0, 2.0), (0, 1.0), (1.5, 0.5), (0.75, 0.25)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ring", "burst"]


def test_pictures_have_a_panel_per_mask_and_length(tmp_path: Path) -> None:
    shown = document(row("ring", 2.0), row("ring", 3.0, seq_len=8192), row("ring", 4.0, mask="full"))
    assert [axes.get_title(loc="left") for axes in bench_figure(shown).axes] == [
        "causal, 4,096 tokens",
        "causal, 8,192 tokens",
        "full, 4,096 tokens",
    ]
    write_plot(shown, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
