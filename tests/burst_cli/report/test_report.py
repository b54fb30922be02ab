"""`burst report`: which runs, in which groups, with which figures, in every way to write them."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from report_samples import CONFIG, PROVENANCE, make_methods, make_run
from testkit.terminal import styled

from burst_cli.report.build import build_report
from burst_cli.report.columns import COLUMNS
from burst_cli.report.write import parts_of, report_view
from engine.config.settings import dump_config
from engine.runs.folder import RunFolder, create_run

ON_H100 = {**PROVENANCE, "hardware": {"gpus": ["NVIDIA H100, 81559 MiB, 570"]}}


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    predicted = {"predicted_step_time_s": 0.31, "predicted_step_machine": "h100", "predicted_peak_bytes": 2**28}
    losses = {"final_validation_loss": 1.5, "final_validation_bits_per_byte": 0.75, "peak_tensor_bytes": 2**27}
    make_run(folder, "tiny/20260101-000000-aaaaaa", **predicted, **losses)
    make_run(folder, "tiny/20260102-000000-bbbbbb", final="failed")
    make_run(folder, "small/20260103-000000-cccccc", mfu=0.9)
    return folder


@pytest.fixture
def reported(burst):
    """The runs of `burst report --json`."""
    return lambda *words: json.loads(burst("report", "--json", *words).out)["runs"]


# --- which runs -------------------------------------------------------------------------------------------------------


def test_names_select_runs(reported, runs_dir: Path) -> None:
    (runs_dir / "sweeps/20260101-000000-dddddd").mkdir(parents=True)  # a folder of sweeps holds no runs
    for words, expected in [
        ([], ["aaaaaa", "bbbbbb", "cccccc"]),
        (["small", "tiny"], ["aaaaaa", "bbbbbb", "cccccc"]),
        (["20260102-000000-bbbbbb"], ["bbbbbb"]),
        (["20260102"], ["bbbbbb"]),
        (["bbbbbb", "bbbbbb"], ["bbbbbb"]),
        (["small/20260103"], ["cccccc"]),
        (["--latest"], ["bbbbbb", "cccccc"]),
        (["tiny", "--latest"], ["bbbbbb"]),
    ]:
        assert [run["run_id"][-6:] for run in reported(*words)] == expected
    folder = str(runs_dir / "tiny/20260101-000000-aaaaaa")
    assert [run["run_id"][-6:] for run in reported(folder, "--runs-dir", str(runs_dir / "none"))] == ["aaaaaa"]


def test_mistakes_are_named_with_what_is_legal(burst, runs_dir: Path) -> None:
    for arguments, words in [
        (("tinny", "99999999"), ["did you mean tiny?", "99999999"]),
        (("--sweep", ""), ["sweep"]),
        (("--compare", "tiny", "nobody"), ["nobody: no such run"]),
        (("--compare", "tiny", "bbbbbb"), ["both mean tiny/20260102-000000-bbbbbb"]),
        (("--output", "r.docx"), ["ends in .html or .csv"]),
        (("--output", "r"), ["ends in .html or .csv"]),
    ]:
        result = burst("report", *arguments)
        assert (result.code, [word for word in words if word not in result.err]) == (2, [])
    # No runs are an error only for who names one.
    nothing = ("--runs-dir", str(runs_dir / "none"))
    assert "burst launch" in burst("report", *nothing).out
    assert json.loads(burst("report", "--json", *nothing).out) == {"runs": []}
    named = burst("report", "tiny", *nothing)
    assert (named.code, f"{runs_dir / 'none'} holds no runs" in named.err) == (2, True)


# --- groups -----------------------------------------------------------------------------------------------------------


def test_runs_are_grouped_by_what_makes_them_comparable(burst, runs_dir: Path) -> None:
    make_run(runs_dir, "tiny/20260104-000000-dddddd", device="H100", world_size=8)
    titles = [line for line in burst("report").out.splitlines() if "×" in line]
    assert titles == ["tiny · 2 × cpu", "small · tiny · 2 × cpu", "tiny · 8 × H100"]


def test_hardware_is_that_of_the_ranks_else_of_sister_runs_else_of_the_launcher(reported, tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "tiny/20260102-000000-aaaaaa", final="oom", provenance=ON_H100)
    assert [run["hardware"] for run in reported()] == ["NVIDIA H100"]
    for day, (exp, facts) in enumerate((("small", {}), ("tiny", {"world_size": 8}), ("tiny", {"model": "big"})), 4):
        make_run(tmp_path / "runs", f"{exp}/2026010{day}-000000-aaaaaa", device="B200", **facts)  # no sisters of it
    make_methods(tmp_path / "runs")
    assert [run["hardware"] for run in reported()] == ["cpu"] * 7 + ["B200"] * 3
    make_run(tmp_path / "runs", "tiny/20260103-000000-aaaaaa", device="A100")
    assert [run["hardware"] for run in reported()][6:8] == ["NVIDIA H100", "A100"]


# --- which figures ----------------------------------------------------------------------------------------------------


def test_record_joins_the_files_of_a_run(reported, runs_dir: Path) -> None:
    (record,) = reported("aaaaaa")
    run = RunFolder(runs_dir / "tiny/20260101-000000-aaaaaa")
    summary, state = run.read_summary(), run.read_state()
    assert summary is not None
    assert record == {
        **summary,
        **{"run_id": "20260101-000000-aaaaaa", "exp": "tiny", "path": str(run.path), "status": "completed"},
        **{"lost": False, "started_at": state["started_at"], "ended_at": state["ended_at"], "exit_code": 0},
        **{"failure": None, "failure_text": None},
        "git_sha": PROVENANCE["git"]["sha"],  # type: ignore[index]
        **{"dirty": True, "host": "node1", "hardware": "cpu", "launch_hardware": "cpu"},
        "versions": {"burst-train": "1", "torch": "2.13.0", "python": "3.11", "flash-attn": "2", "triton": "3"},
        **{"command": "burst launch exp=tiny", "image": None},
    }
    assert (record["step_time_s"], record["step_time_s_n"]) == (pytest.approx(0.3), 3)


@pytest.mark.usefixtures("runs_dir")
def test_failed_run_has_figures_of_its_steps(reported) -> None:
    completed, failed = reported("tiny")
    assert (failed["status"], failed["failure"]) == ("failed", {"rank": 1, "message": "no"})
    same = ("config_fingerprint", "attention_preset", "world_size", "steps")
    assert {name: failed[name] for name in same} == {name: completed[name] for name in same}
    assert failed["step_time_s_n"] == max(1, failed["steps"] - 3)


def test_status_is_that_of_the_run_state(reported, runs_dir: Path) -> None:
    RunFolder(runs_dir / "tiny/20260101-000000-aaaaaa").write_summary({"status": "running", "steps": 4})
    assert [run["status"] for run in reported("aaaaaa")] == ["completed"]


def test_lost_run_is_told_apart_from_a_running_one(burst, reported, tmp_path: Path) -> None:
    run = create_run(tmp_path / "runs/tiny/20260101-000000-aaaaaa", {"config.yaml": dump_config(CONFIG)})
    run.transition("starting")
    run.transition("running")
    assert [one["lost"] for one in reported()] == [False]
    run.record(pid_start="0")
    result = burst("report")
    assert ("running, lost" in result.out, "its process is gone" in result.err) == (True, True)


@pytest.mark.parametrize("name", ["run.json", "summary.json", "config.yaml", "metrics.jsonl"])
def test_damaged_run_does_not_hide_others(burst, runs_dir: Path, name: str) -> None:
    damaged = runs_dir / "tiny/20260102-000000-bbbbbb" / name
    damaged.write_bytes(b"{\xff broken: [")
    result = burst("report", "--json")
    records = json.loads(result.out)["runs"]
    assert [record["run_id"][-6:] for record in records] == ["aaaaaa", "bbbbbb", "cccccc"]
    is_named = name != "metrics.jsonl"  # torn lines are legal there
    assert (str(damaged) in result.err, bool(records[1].get("problems"))) == (is_named, is_named)
    assert records[1]["status"] == ("unreadable" if name == "run.json" else "failed")


def test_damaged_provenance_is_unknown(reported, runs_dir: Path) -> None:
    file = runs_dir / "tiny/20260101-000000-aaaaaa/provenance.json"
    for content, command in [
        *((text, None) for text in ("", "[]", "{", '{"git": 3, "versions": [], "hardware": null}', "\udcff")),
        (  # values of the environment may be secrets
            '{"command": ["burst", "launch", "cluster.environment=[TOKEN=x]", "+cluster.environment.0=TOKEN=x"]}',
            "burst launch cluster.environment=... +cluster.environment.0=...",
        ),
    ]:
        file.write_bytes(content.encode("utf-8", "surrogateescape"))
        (run,) = reported("aaaaaa")
        assert {run[name] for name in ("git_sha", "dirty", "host", "launch_hardware", "image")} == {None}
        assert run["command"] == command


def test_damaged_values_never_stop_a_report(burst, tmp_path: Path) -> None:
    values: list[object] = [None, "x", [], {}, True, float("nan"), 10**400, -1]
    for place, value in enumerate(values):
        run = make_run(tmp_path / "runs", f"tiny/20260101-00000{place}-aaaaaa")
        (run.path / "summary.json").write_text(json.dumps(dict.fromkeys(run.read_summary() or {}, value)))
        (run.path / "metrics.jsonl").write_text(json.dumps({"step": value, "loss": value}) + "\nnot json\n[]\n")
    make_run(tmp_path / "runs", "odd/20260101-000000-aaaaaa")
    (tmp_path / "runs/odd").rename(tmp_path / "runs/bad\udcff<b>")
    for words in ((), ("--json", "--output", str(tmp_path / "r.html"))):
        assert burst("report", "--effective", *words).code == 0
    assert "<b>/" not in (tmp_path / "r.html").read_text(encoding="utf-8")


# --- how it is written ------------------------------------------------------------------------------------------------


def test_table_of_one_run_shows_every_figure_at_any_width(burst, runs_dir: Path, monkeypatch) -> None:
    for width in (500, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        output = burst("report", "aaaaaa").out
        assert max(map(len, output.splitlines())) <= width
        shown = output.partition("\nHow")[0].splitlines()
        cells = dict(re.split("  +", line.strip(), maxsplit=1) for line in shown[2:] if line)
        assert cells.pop("started (UTC)").startswith("20")
        assert cells == {
            **{"run": "tiny/20260101-000000-aaaaaa", "status": "completed", "attention": "ring"},
            **{"memory policy": "full", "seq_len": "512", "ranks": "2", "steps": "4"},
            **{"tokens/s/device": "1.67K (1.46K…2.08K)", "step time": "300 ms (250…350)"},
            **{"predicted step": "310 ms on h100", "n": "3", "MFU (causal-aware)": "50%"},
            **{"MFU (full attention)": "60%", "HFU": "70%", "peak memory": "1 GiB", "peak tensors": "128 MiB"},
            **{"predicted peak": "256 MiB", "sent intra / inter node": "4 KiB / 0 B", "train loss": "1.0000"},
            **{"validation loss": "1.5000", "bits/byte": "0.7500", "peak FLOP/s per device": "1 TFLOP/s, measured"},
            "commit": "abcabcabca + changes",
        }


def test_page_has_the_provenance_of_runs(reported, runs_dir: Path) -> None:
    failed = reported("bbbbbb")[0]
    (part,) = (one for one in parts_of(build_report(runs_dir, ["bbbbbb"]), is_page=True) if one.is_aside)
    ((grid, *_),) = (part.grids,)
    assert dict(zip(grid.headings, grid.rows[0], strict=True)) == {
        **{"run": "tiny/20260102-000000-bbbbbb", "started (UTC)": failed["started_at"][:16].replace("T", " ")},
        **{"commit": "abcabcabca + changes", "config": failed["config_fingerprint"][:12], "hardware": "cpu"},
        **{"host": "node1", "versions": "burst-train 1, torch 2.13.0, python 3.11, flash-attn 2, triton 3"},
        **{"command": "burst launch exp=tiny", "failure": "no"},
    }


def test_columns_are_ranked_for_narrow_terminals() -> None:
    ranked = sorted((column for column in COLUMNS if column.rank < 99), key=lambda column: column.rank)
    assert [column.heading for column in ranked] == [
        *("run", "differs by", "tokens/s/device", "MFU (causal-aware)", "train loss", "status", "peak memory"),
        *("attention", "seq_len", "memory policy", "MFU (full attention)", "step time", "n", "validation loss"),
        *("HFU", "commit"),
    ]
    assert len({column.rank for column in ranked[1:]}) == len(ranked) - 1  # which one goes first is told for each


def test_csv_has_unrounded_figures_without_formulas(burst, runs_dir: Path, tmp_path: Path) -> None:
    run = RunFolder(runs_dir / "tiny/20260102-000000-bbbbbb")
    run.write_summary({"attention_preset": "=cmd()", "model": "-1+1\x1b[2J", "+": 1, "final_train_loss": -0.5})
    file = tmp_path / "r.csv"
    assert f"wrote {file} (3 runs)" in burst("report", "--output", str(file)).out
    first, second, _ = csv.DictReader(io.StringIO(file.read_text()))
    assert list(first)[:4] == ["run_id", "exp", "status", "path"]
    assert (float(first["tokens_per_s_per_device"]), first["comm_exposed_s"]) == (5000.0 / 3, "")
    assert "failure" not in first
    told = [second[name] for name in ("attention_preset", "model", "'+", "final_train_loss")]
    assert told == ["'=cmd()", "'-1+1", "1", "-0.5"]


def test_hostile_text_is_printed_as_text(burst, runs_dir: Path) -> None:
    run = RunFolder(runs_dir / "tiny/20260101-000000-aaaaaa")
    quartiles = {"step_time_s": 0.25, "step_time_s_p25": 0.24, "step_time_s_p75": None}
    run.write_summary({**quartiles, "attention_preset": "[red]x[/red]\x1b[2J|", "steps": 1})
    output = burst("report", "aaaaaa").out
    assert ("250 ms  " in output, "[red]x[/red]|" in output, "\x1b" in output) == (True, True, False)


def test_missing_figures_have_no_columns(burst, runs_dir: Path) -> None:
    make_run(runs_dir, "tiny/20260105-000000-eeeeee", steps=0, final="cancelled")
    output = burst("report", "eeeeee").out
    assert ("cancelled" in output, "MFU (full attention)  " in output) == (True, False)
    assert "–" not in output.partition("tokens/s and step time")[0]


def test_narrow_report_has_the_main_figures(burst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in range(5):
        make_run(tmp_path / "runs", f"tiny/20260101-00000{place}-aaaaaa")
    for width in (60, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        output = burst("report").out
        pieces = styled(report_view(build_report(tmp_path / "runs"), width), width=width)
        assert {("tiny · 2 × cpu", "bold"), ("How to read this", "bold")} <= set(pieces)
        assert "every figure." in " ".join(text for text, style in pieces if style == "dim")
        assert max(map(len, output.splitlines())) <= width
        assert sum("tiny/aaaaaa" in line for line in output.splitlines()) == 5
        table, _, _ = output.partition("Where columns")
        assert ("1.67K (1.46K…2.08K)" in table, "50%" in table, "1.0000" in table) == (True, True, True)
    monkeypatch.setenv("COLUMNS", "248")  # all have room
    assert "Where columns" not in burst("report").out


def test_a_report_in_a_pipe_is_no_wider_than_people_read(burst, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    make_methods(tmp_path / "runs")
    lines = burst("report", "--runs-dir", str(tmp_path / "runs")).out.splitlines()
    assert max(map(len, lines)) <= 160
    assert any("report.csv every figure" in line for line in lines), "where the other columns are is not said"
