"""Two runs: what differs, by how much, and whether it is more than chance."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_samples import make_run, metrics, variant

from burst_cli.report.bootstrap import Estimate, compare_paired, compare_steps
from burst_cli.report.compare import Difference


def correlated(n: int, phi: float, generator: np.random.Generator) -> list[float]:
    """An AR(1) series around 100: every step remembers the one before it."""
    value, found = 0.0, []
    for _ in range(n):
        value = phi * value + generator.normal()
        found.append(100 + value)
    return found


# --- the tests themselves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phi", [0.0, 0.7])
def test_equal_series_rarely_seem_different_even_when_steps_resemble_their_neighbours(phi: float) -> None:
    generator = np.random.default_rng(2)
    trials = 40
    found = [compare_steps(correlated(120, phi, generator), correlated(120, phi, generator)) for _ in range(trials)]
    false_alarms = sum(one is not None and one.p < 0.05 for one in found)
    assert false_alarms / trials < 0.2  # 0.05 by right; drawing single steps gives far more than that for phi = 0.7


def test_real_difference_is_found_with_an_interval_around_it_unless_steps_are_few() -> None:
    generator = np.random.default_rng(3)
    a, b = correlated(200, 0.5, generator), [value + 3 for value in correlated(200, 0.5, generator)]
    found = compare_steps(a, b)
    assert found == compare_steps(a, b)  # the same input, the same answer
    assert found is not None
    assert found.p < 0.01
    assert 1.5 < found.low < 3 < found.high
    assert compare_steps([1.0] * 9, [2.0] * 100) is compare_steps([1.0] * 100, [2.0] * 9) is None
    assert compare_paired([1.0] * 9, [2.0] * 9) is None
    assert compare_steps([1.0] * 10, [3.0] * 11) == Estimate(2.0, 2.0, 1 / 4001)  # of 4,000 draws none was as far
    assert compare_paired([1.0] * 10, [3.0] * 10) == Estimate(2.0, 2.0, 1 / 4001)
    assert compare_paired([1.0] * 10, [1.0] * 10) == Estimate(0.0, 0.0, 1.0)


def test_paired_losses_show_what_their_common_noise_hides() -> None:
    chance = random.Random(5)
    noise = [chance.gauss(0, 1) for _ in range(60)]
    a = [5 + value for value in noise]
    b = [5.05 + value + chance.gauss(0, 0.01) for value in noise]
    paired, apart = compare_paired(a, b), compare_steps(a, b)
    assert paired is not None
    assert apart is not None
    assert paired.p < 0.01 < 0.05 < apart.p


# --- of runs ----------------------------------------------------------------------------------------------------------


def noisy(speed: float, seed: int) -> Callable[[int], dict[str, Any]]:
    """Rows of a run that makes about `speed` tokens/s per device."""
    chance = random.Random(seed)

    def row(step: int) -> dict[str, Any]:
        now = speed * (1 + chance.gauss(0, 0.01))
        loss = 4 / step**0.3 + random.Random(step).gauss(0, 0.1)  # the same data, so the same noise
        speeds = {"tokens_per_s_per_device": now, "step_time_s": 1e3 / now, "mfu": now / 4e3}
        return {**metrics(step), **speeds, "loss": loss}

    return row


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    """The second is a tenth faster; their losses are equal, and of their memory there is one value each."""
    folder = tmp_path / "runs"
    lone, tensors = {"final_validation_loss": 1.5}, {"peak_tensor_bytes": 8}
    make_run(folder, "tiny/20260101-000000-aaaaaa", steps=40, row=noisy(1000, 1), peak_tensor_bytes=0, **lone)
    make_run(folder, "tiny/20260102-000000-bbbbbb", steps=40, row=noisy(1100, 2), config=variant("burst"), **tensors)
    return folder


@pytest.fixture
def compared(burst):
    """The comparison of `burst report --compare A B --json`."""
    return lambda *sides: json.loads(burst("report", "--json", "--compare", *sides).out)["comparison"]


def figure(comparison: dict[str, Any], metric: str) -> dict[str, Any]:
    return next(one for one in comparison["differences"] if one["metric"] == metric)


def test_a_comparison_as_a_whole(compared, two_runs: Path) -> None:
    found = compared("aaaaaa", "bbbbbb")
    speed = figure(found, "tokens_per_s_per_device")
    assert speed["change"] == pytest.approx(0.1, abs=0.01)
    assert speed["low"] < speed["change"] < speed["high"] < speed["low"] + 0.02
    back = {row["metric"]: row for row in compared("bbbbbb", "aaaaaa")["differences"]}
    assert [back[name]["verdict"] for name in ("tokens_per_s_per_device", "step_time_s", "mfu")] == ["B is worse"] * 3
    equal = {"change": 0.0, "low": 0.0, "high": 0.0, "p": 1.0, "verdict": "equal"}
    assert back["loss, last quarter"].items() >= equal.items()
    assert (back["peak_tensor_bytes"]["change"], figure(found, "peak_tensor_bytes")["change"]) == (-1.0, None)
    assert {row["metric"]: row["verdict"] for row in found.pop("differences")} == {
        **dict.fromkeys(("tokens_per_s_per_device", "step_time_s", "mfu"), "B is better"),
        "loss, last quarter": "equal",
        **dict.fromkeys(("peak_memory_bytes", "peak_tensor_bytes"), "one value per side: not tested"),
        "final_validation_loss": "not measured on both sides",
    }
    assert found == {
        "a": "tiny/20260101-000000-aaaaaa",
        "b": "tiny/20260102-000000-bbbbbb",
        "warnings": [
            f"the configurations differ: diff {two_runs}/tiny/20260101-000000-aaaaaa/config.yaml "
            f"{two_runs}/tiny/20260102-000000-bbbbbb/config.yaml"
        ],
    }
    # A damaged step of impossible size is no step.
    with (two_runs / "tiny/20260102-000000-bbbbbb/metrics.jsonl").open("a") as file:
        file.write(json.dumps({**metrics(41), "tokens_per_s_per_device": 1e308, "loss": -1e308}) + "\n")
    assert figure(compared("aaaaaa", "bbbbbb"), "tokens_per_s_per_device")["verdict"] == "B is better"


def test_a_difference_as_people_read_it() -> None:
    for difference, cells in [
        (
            Difference("mfu", 0.5, 0.55, 0.1, 0.05, 0.15, 0.0004, "B is better"),
            ("MFU (causal-aware)", "50%", "55%", "+10.0%", "+5.00% … +15.0%", "< 0.001", "B is better"),
        ),
        (
            Difference("tokens_per_s_per_device", 12345, 12346, 1 / 12345, -0.001, 0.001, 0.5, "no difference shown"),
            ("tokens/s/device", "12.35K", "12.35K", "+0.01%", "-0.10% … +0.10%", "0.500", "no difference shown"),
        ),
        (
            Difference("step_time_s", 2.0, 3.0, 0.5, -0.1, None, 0.001, "worse"),
            ("step time", "2 s", "3 s", "+50.0%", "–", "0.001", "worse"),
        ),
        (
            Difference("loss, last quarter", 2.5, None),
            ("loss, last quarter", "2.5000", "–", "–", "–", "–", "not measured on both sides"),
        ),
    ]:
        assert difference.cells == cells


def test_losses_are_compared_over_the_whole_last_quarter(compared, tmp_path: Path) -> None:
    for name, share in (("tiny/20260101-000000-aaaaaa", 1.0), ("tiny/20260102-000000-bbbbbb", 0.99)):

        def row(step: int, scale: float = share) -> dict[str, Any]:
            return {**metrics(step), "loss": scale * 1000.0 / step, "step_time_s": step if scale == 1 else 82 - step}

        make_run(tmp_path / "runs", name, steps=80, row=row)
    comparison = compared("aaaaaa", "bbbbbb")
    found = figure(comparison, "loss, last quarter")
    mean = sum(1000.0 / step for step in range(62, 81)) / 19  # of 79 steps after the warm-up
    assert (found["a"], found["b"]) == (pytest.approx(mean), pytest.approx(0.99 * mean))
    assert [found["verdict"], figure(comparison, "step_time_s")["verdict"]] == ["B is better", "no difference shown"]


def test_what_weakens_a_comparison_is_said(compared, tmp_path: Path) -> None:
    odd: dict[str, Any] = {"peak_flops_per_device": 2e12, "device": "H100", "world_size": "9\x1b[2J"}
    make_run(tmp_path / "runs", "tiny/20260101-000000-aaaaaa", **odd)
    make_run(tmp_path / "runs", "tiny/20260102-000000-bbbbbb", final="failed")
    found = compared("aaaaaa", "bbbbbb")
    assert found["warnings"] == [
        "different hardware: H100 against cpu",
        "different numbers of ranks: 9 against 2",  # and nothing that a terminal obeys
        "tiny/20260102-000000-bbbbbb is failed",
    ]
    assert figure(found, "tokens_per_s_per_device")["verdict"] == "too few steps to tell"


def test_an_experiment_stands_for_its_newest_run(burst, two_runs: Path) -> None:
    make_run(two_runs, "small/20260101-000000-cccccc", peak_flops_per_device=2e12)
    document = json.loads(burst("report", "--json", "--compare", "small", "tiny").out)
    found = document["comparison"]
    assert found["b"] == "tiny/20260102-000000-bbbbbb"
    assert [run["run_id"][-6:] for run in document["runs"]] == ["cccccc", "bbbbbb"]


def test_mfu_against_different_peaks_is_not_compared(burst, two_runs: Path) -> None:
    make_run(two_runs, "small/20260101-000000-cccccc", peak_flops_per_device=2e12)
    found = json.loads(burst("report", "--json", "--compare", "small", "tiny").out)["comparison"]
    assert [one["metric"] for one in found["differences"] if "mfu" in one["metric"]] == []
    assert found["warnings"][-1].startswith("MFU is against different peaks, 2 TFLOP/s and 1 TFLOP/s per device, so it")


def test_comparison_is_in_every_form_of_a_report(burst, two_runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    assert burst("report", "--compare", "aaaaaa", "bbbbbb", "--output", str(page)).code == 0
    shown, drawn = burst("report", "--compare", "aaaaaa", "bbbbbb").out, page.read_text(encoding="utf-8")
    table = [" ".join(line.split()) for line in shown.partition("\nA = ")[2].splitlines()]
    assert table[0] == "tiny/20260101-000000-aaaaaa, B = tiny/20260102-000000-bbbbbb"
    assert table[1] == "figure A B B against A 95% interval p verdict"
    assert ("B is better" in drawn, "Training loss of both sides" in drawn) == (True, True)


def test_losses_on_different_data_are_not_compared(compared, tmp_path: Path) -> None:
    for place, digest in enumerate(("aaaa", "bbbb")):
        make_run(tmp_path / "runs", f"tiny/20260101-00000{place}-{place:06x}", steps=40, data_content_hash=digest)
    found = compared("000000", "000001")
    assert [row["metric"] for row in found["differences"] if "loss" in row["metric"]] == []
    assert found["warnings"][0] == "different data (data aaaa against data bbbb): no losses compared"
