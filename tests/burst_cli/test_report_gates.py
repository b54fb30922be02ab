"""Baselines and the conditions that fail a report in CI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_samples import make_methods, make_run, report

from burst_cli.report.against import judge, parse_gates
from burst_cli.report.build import Request, build_report
from engine.config.errors import ConfigError


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("methods")
    make_methods(folder)
    return folder


def test_ratios_are_against_the_baseline_of_the_same_length(runs_dir: Path) -> None:
    found = build_report(Request(runs_dir, baseline="ring"))
    ratios = {
        (record["attention_preset"], record["seq_len"]): record.get("ratio_tokens_per_s_per_device")
        for record in found.records
    }
    assert ratios == {
        ("ring", 512): 1.0,
        ("burst", 512): pytest.approx(2005 / 1005),
        ("ulysses", 512): pytest.approx(1505 / 1005),
        ("ring", 1024): 1.0,
        ("burst", 1024): pytest.approx(1005 / 505),
        ("ulysses", 1024): None,
    }


def test_interval_of_a_ratio_spans_the_quartiles_of_both(runs_dir: Path) -> None:
    found = build_report(Request(runs_dir, baseline="ring"))
    burst = next(record for record in found.records if record["attention_preset"] == "burst")
    assert burst["ratio_tokens_per_s_per_device_low"] == pytest.approx(2003.5 / 1006.5)
    assert burst["ratio_tokens_per_s_per_device_high"] == pytest.approx(2006.5 / 1003.5)


def test_a_run_may_be_the_baseline_even_one_that_is_not_shown(runs_dir: Path) -> None:
    found = build_report(Request(runs_dir, names=("20260101-000002",), baseline="20260101-000001"))
    assert found.records[0]["ratio_tokens_per_s_per_device"] == pytest.approx(2005 / 1005)
    assert found.baseline is not None
    assert found.baseline.name == "tiny/20260101-000001-000001"


def test_baseline_of_another_length_gives_no_ratio_and_says_so(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(runs_dir, "20260101-000002", "--baseline", "20260101-000004") == 0
    assert "no run has its model, seq_len, ranks and hardware" in capsys.readouterr().err


def test_unknown_baseline_is_refused_with_the_methods_there_are(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(runs_dir, "--baseline", "rings") == 2
    error = capsys.readouterr().err
    assert "did you mean ring?" in error
    assert "burst/full, ring/full, ulysses/full" in error


def test_baseline_columns_are_in_the_table_only_then(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(runs_dir, "--format", "md", "--baseline", "ring")
    assert "| speed | memory |" in capsys.readouterr().out
    report(runs_dir, "--format", "md")
    assert "| speed |" not in capsys.readouterr().out


# --- gates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "limit", "of"),
    [
        ("mfu=40%", 0.4, None),
        ("tokens_per_s=1.5K", 1500, None),
        ("peak_memory_bytes=70GiB", 70 * 2**30, None),
        ("peak_memory_bytes=70GB", 70e9, None),
        ("step_time_s=-1e-3", -0.001, None),
        ("mfu=90%ofring", 0.9, "ring"),
        ("mfu = 0.9 of burst/attn_out", 0.9, "burst/attn_out"),
    ],
)
def test_limits_are_read_with_their_units(words: str, limit: float, of: str | None) -> None:
    (gate,) = parse_gates([words], [])
    assert gate.limit == pytest.approx(limit)
    assert gate.of == of


@pytest.mark.parametrize("words", ["mfu", "mfu=", "mfu=fast", "mfu=90%of", "mfu=1 parsec", "=3of"])
def test_limits_that_mean_nothing_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="expected METRIC=VALUE"):
        parse_gates([words], [])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--fail-below", "mfu=6%"), 1),
        (("--fail-above", "mfu=6%"), 1),
        (("--fail-above", "mfu=30%", "--fail-below", "mfu=4%"), 0),
        (("--fail-below", "mfu=4%", "--fail-below", "hfu=99%"), 1),
        (("--fail-below", "tokens_per_s_per_device=140%ofring"), 0),
        (("--fail-below", "tokens_per_s_per_device=160%ofring"), 1),
        (("--fail-below", "tokens_per_s_per_device=140%ofbaseline", "--baseline", "ring"), 0),
    ],
)
def test_gates_decide_the_exit_code(
    runs_dir: Path, arguments: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(runs_dir, "--status", "completed", *arguments) == code
    errors = capsys.readouterr().err
    assert ("failed: " in errors) is bool(code)


@pytest.mark.parametrize("words", [(["mfu=25%"], []), ([], ["mfu=25%"])], ids=["below", "above"])
@pytest.mark.parametrize(("value", "passes"), [(0.25, (True, True)), (0.26, (True, False)), (0.24, (False, True))])
def test_a_figure_exactly_at_its_limit_passes(
    words: tuple[list[str], list[str]], value: float, passes: tuple[bool, bool]
) -> None:
    record = {"run_id": "20260101-000000-aaaaaa", "exp": "tiny", "status": "completed", "mfu": value}
    (verdict,) = judge(parse_gates(*words)[0], [record], None)
    assert verdict.passed is passes[bool(words[1])]


def test_run_without_the_figure_fails_its_gate(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs_dir, "--fail-below", "mfu=1%", "--json") == 1
    gates = json.loads(capsys.readouterr().out)["gates"]
    assert [(gate["status"], gate["passed"]) for gate in gates].count(("oom", False)) == 1
    assert sum(gate["passed"] for gate in gates) == 5


def test_nothing_to_judge_is_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(tmp_path, "--fail-below", "mfu=1%") == 1
    assert "no run" in capsys.readouterr().err


def test_unknown_metric_is_refused_with_the_nearest(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs_dir, "--fail-below", "tokens_per_s_per_devise=3") == 2
    assert "did you mean tokens_per_s_per_device?" in capsys.readouterr().err


def test_gate_against_no_baseline_is_refused(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs_dir, "--fail-below", "mfu=90%ofbaseline") == 2
    assert "--baseline METHOD or RUN" in capsys.readouterr().err


def test_page_is_written_before_a_gate_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "tiny/20260101-000000-aaaaaa")
    page = tmp_path / "r.html"
    assert report(tmp_path, "--output", str(page), "--fail-below", "mfu=99%") == 1
    assert "gate checks failed" in page.read_text(encoding="utf-8")
    capsys.readouterr()
