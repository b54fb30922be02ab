"""Two runs or two groups: what differs, by how much, and whether it is more than chance."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_samples import PROVENANCE, make_run, metrics, variant

from burst_cli.report.bootstrap import compare_paired, compare_runs, compare_steps, smallest_p
from burst_cli.report.build import Request, build_report
from burst_cli.report.compare import Comparison, Difference, config_differences
from burst_cli.report.records import provenance_facts
from engine.config.errors import ConfigError


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


def test_real_difference_is_found_with_an_interval_around_it() -> None:
    generator = np.random.default_rng(3)
    a, b = correlated(200, 0.5, generator), [value + 3 for value in correlated(200, 0.5, generator)]
    found = compare_steps(a, b)
    assert found == compare_steps(a, b)  # the same input, the same answer
    assert found is not None
    assert found.p < 0.01
    assert found.low < 3 < found.high
    assert found.low > 1.5


def test_few_steps_are_no_ground_for_a_verdict() -> None:
    assert compare_steps([1.0] * 9, [2.0] * 100) is None
    assert compare_paired([1.0] * 9, [2.0] * 9) is None


def test_paired_losses_show_what_their_common_noise_hides() -> None:
    chance = random.Random(5)
    noise = [chance.gauss(0, 1) for _ in range(60)]
    a = [5 + value for value in noise]
    b = [5.05 + value + chance.gauss(0, 0.01) for value in noise]
    paired, apart = compare_paired(a, b), compare_steps(a, b)
    assert paired is not None
    assert apart is not None
    assert paired.p < 0.01 < 0.05 < apart.p


def test_permutation_test_counts_every_split_of_few_runs() -> None:
    found = compare_runs([1.0, 2.0, 3.0, 4.0], [11.0, 12.0, 13.0, 14.0])
    assert found.p == pytest.approx(2 / 70) == pytest.approx(smallest_p(4, 4))
    assert "all permutations" in found.method


def test_permutation_test_samples_the_splits_of_many_runs() -> None:
    generator = np.random.default_rng(6)
    a, b = generator.normal(0, 1, 15).tolist(), generator.normal(0, 1, 15).tolist()
    found = compare_runs(a, b)
    assert found.p > 0.05
    assert smallest_p(2, 3) == 0.1


# --- of runs ----------------------------------------------------------------------------------------------------------


def noisy(speed: float, seed: int) -> Callable[[int], dict[str, Any]]:
    """Rows of a run that makes about `speed` tokens/s per device."""
    chance = random.Random(seed)

    def row(step: int) -> dict[str, Any]:
        now = speed * (1 + chance.gauss(0, 0.01))
        loss = 4 / step**0.3 + random.Random(step).gauss(0, 0.1)  # the same data, so the same noise
        return {**metrics(step), "tokens_per_s_per_device": now, "step_time_s": 1e3 / now, "loss": loss}

    return row


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    make_run(tmp_path, "tiny/20260101-000000-aaaaaa", steps=40, row=noisy(1000, 1))
    make_run(
        tmp_path,
        "tiny/20260102-000000-bbbbbb",
        steps=40,
        row=noisy(1100, 2),
        config=variant("burst", eval_interval_steps=7),
    )
    return tmp_path


def compared(runs_dir: Path, a: str, b: str, **request: Any) -> Comparison:
    found = build_report(Request(runs_dir, compare=(a, b), **request)).comparison
    assert found is not None
    return found


def figure(comparison: Comparison, metric: str) -> Difference:
    return next(one for one in comparison.differences if one.metric == metric)


def test_a_comparison_as_a_whole(two_runs: Path) -> None:
    """The second run is a tenth faster; their losses are equal, and of their memory there is one value each."""
    found = compared(two_runs, "aaaaaa", "bbbbbb")
    speed = figure(found, "tokens_per_s_per_device")
    assert speed.low is not None
    assert speed.high is not None
    assert speed.change is not None
    assert speed.change == pytest.approx(0.1, abs=0.01)
    assert speed.low < speed.change < speed.high < speed.low + 0.02
    document = found.to_dict()
    of_steps, of_losses = "of medians, blocks of 6 and 6 steps", "of the mean difference per step, blocks of 3 steps"
    bootstrap = "circular block bootstrap {}, 4000 draws"
    untested = ("one value per side: not tested", None)
    assert {row["metric"]: (row["verdict"], row["method"]) for row in document.pop("differences")} == {
        "tokens_per_s_per_device": ("B is better", bootstrap.format(of_steps)),
        "step_time_s": ("B is better", bootstrap.format(of_steps)),
        "mfu": ("equal", bootstrap.format(of_steps)),
        "loss, last quarter": ("equal", bootstrap.format(of_losses)),
        "peak_memory_bytes": untested,
    }
    assert document == {
        "a": "aaaaaa",
        "b": "bbbbbb",
        "runs_a": ("tiny/20260101-000000-aaaaaa",),
        "runs_b": ("tiny/20260102-000000-bbbbbb",),
        "config": (
            {"key": "attention.preset", "a": '"ring"', "b": '"burst"', "matters": True},
            {"key": "train.eval_interval_steps", "a": "null", "b": "7", "matters": False},
        ),
        "warnings": (
            "the configurations differ in what matters: attention.preset",
            "one run on a side: the test tells whether the steps of these runs differ; how much a run differs from its "
            "own repetition is not in it",
        ),
    }


@pytest.mark.parametrize(
    ("difference", "cells"),
    [
        (
            Difference("mfu", 0.5, 0.55, 0.1, 0.05, 0.15, 0.0004, "B is better"),
            ("MFU (causal-aware)", "50%", "55%", "+10.0%", "+5.00% … +15.0%", "< 0.001", "B is better"),
        ),
        (
            Difference("tokens_per_s_per_device", 12345, 12346, 1 / 12345, -0.001, 0.001, 0.5, "no difference shown"),
            ("tokens/s/device", "12.35K", "12.35K", "+0.01%", "-0.10% … +0.10%", "0.500", "no difference shown"),
        ),
        (
            Difference("loss, last quarter", 2.5, None),
            ("loss, last quarter", "2.5000", "–", "–", "–", "–", "not measured on both sides"),
        ),
    ],
)
def test_a_difference_as_people_read_it(difference: Difference, cells: tuple[str, ...]) -> None:
    assert difference.cells == cells


def test_a_damaged_step_of_impossible_size_is_no_step(two_runs: Path) -> None:
    with (two_runs / "tiny/20260102-000000-bbbbbb/metrics.jsonl").open("a") as file:
        file.write(json.dumps({**metrics(41), "tokens_per_s_per_device": 1e308, "loss": -1e308}) + "\n")
    assert figure(compared(two_runs, "aaaaaa", "bbbbbb"), "tokens_per_s_per_device").verdict == "B is better"


def test_losses_are_compared_over_the_whole_last_quarter(tmp_path: Path) -> None:
    def row(step: int) -> dict[str, Any]:
        return {**metrics(step), "loss": 1000.0 / step}

    make_run(tmp_path, "tiny/20260101-000000-aaaaaa", steps=80, row=row)
    make_run(tmp_path, "tiny/20260102-000000-bbbbbb", steps=80, row=row)
    found = figure(compared(tmp_path, "aaaaaa", "bbbbbb"), "loss, last quarter")
    assert (
        found.a == found.b == pytest.approx(sum(1000.0 / step for step in range(62, 81)) / 19)
    )  # of 79 steps after the warm-up


def test_what_weakens_a_comparison_is_said(tmp_path: Path) -> None:
    make_run(tmp_path, "tiny/20260101-000000-aaaaaa", peak_flops_per_device=2e12, device="H100", world_size="9\x1b[2J")
    make_run(tmp_path, "tiny/20260102-000000-bbbbbb")
    (tmp_path / "tiny/20260102-000000-bbbbbb/config.yaml").write_text("damaged: [")
    words = " ".join(compared(tmp_path, "aaaaaa", "bbbbbb").warnings)
    assert "different hardware: H100 against cpu" in words
    assert "different numbers of ranks: 9 against 2" in words  # and nothing that a terminal obeys
    assert "MFU is against different peaks" in words
    assert "one run on a side" in words
    assert "not readable as YAML" in words


def groups(runs_dir: Path, each: int) -> None:
    """`each` runs of two commits; the second is a tenth faster."""
    for commit, speed in (("a", 1000), ("b", 1100)):
        provenance = {**PROVENANCE, "git": {"sha": commit * 40, "dirty": False}}
        for index in range(each):
            row = noisy(speed * (1 + 0.002 * index), index)
            name = f"tiny/20260101-0000{index:02}-{commit * 6}"
            make_run(runs_dir, name, steps=12, row=row, provenance=provenance)


def test_runs_that_are_not_compared_are_not_shown(two_runs: Path, tmp_path: Path) -> None:
    shutil.copytree(two_runs, tmp_path / "three")
    make_run(tmp_path / "three", "tiny/20260102-000000-cccccc")
    found = build_report(Request(tmp_path / "three", compare=("aaaaaa", "bbbbbb")))
    assert {record["run_id"][-6:] for record in found.records} == {"aaaaaa", "bbbbbb"}


def test_two_commits_are_compared_over_their_runs(tmp_path: Path) -> None:
    groups(tmp_path, 4)
    found = compared(tmp_path, "git_sha=aaaa", "git_sha=bbbb")
    assert (len(found.runs_a), len(found.runs_b)) == (4, 4)
    speed = figure(found, "tokens_per_s_per_device")
    assert speed.verdict == "B is better"
    assert "permutation test over 4 and 4 runs" in (speed.method or "")
    assert not any("one run on a side" in warning for warning in found.warnings)


def test_too_few_runs_are_told_so_instead_of_a_verdict(tmp_path: Path) -> None:
    groups(tmp_path, 3)
    verdict = figure(compared(tmp_path, "commit=a", "commit=b"), "tokens_per_s_per_device").verdict
    assert verdict == "too few runs to tell: even the clearest difference has p = 0.1"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"compare": ("tiny", "tiny")}, "both mean"),
        ({"compare": ("aaaaaa", "nobody")}, "no such run"),
        ({"compare": ("git_sha=a", "git_sha=zzz")}, "no run has git_sha=zzz; values of git_sha: abcabc"),
        ({"compare": ("aaaaaa", "policy=a")}, "values of policy: full"),
        ({"compare": ("git_sha=a", "git_sha=ab")}, "both mean"),
    ],
)
def test_comparisons_that_cannot_be_are_refused(two_runs: Path, request_: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_report(Request(two_runs, **request_))


@pytest.mark.parametrize("format", ["table", "md", "json", "html"])
def test_comparison_is_in_every_format(burst, two_runs: Path, tmp_path: Path, format: str) -> None:
    file = tmp_path / "r.out"
    words = ("--compare", "aaaaaa", "bbbbbb", "--format", format, "--output", str(file))
    assert burst("report", "--runs-dir", str(two_runs), *words).code == 0
    text = file.read_text(encoding="utf-8")
    assert ("B is better" in text, "attention.preset" in text) == (True, True)
    if format == "json":
        assert json.loads(text)["comparison"]["a"] == "aaaaaa"
    if format == "html":
        assert "Training loss of both sides" in text


def test_values_of_the_environment_stay_out_of_reports(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("exp: tiny\ncluster:\n  environment: [TOKEN=canary]\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("exp: tiny\n")
    command = ["burst", "launch", "cluster.environment=[TOKEN=canary]", "+cluster.environment.0=TOKEN=canary"]
    (tmp_path / "provenance.json").write_text(json.dumps({"command": command}))
    found, _ = config_differences([tmp_path], [tmp_path / "other"])
    assert [(one.key, one.a) for one in found] == [("cluster.environment", '["TOKEN"]')]
    told = provenance_facts(tmp_path)["command"]
    assert told == "burst launch cluster.environment=... +cluster.environment.0=..."
