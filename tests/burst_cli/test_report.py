"""`burst report`: which runs, which figures, and every way to write them."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from report_samples import CONFIG, make_run, report

from burst_cli.report.build import Request, build_report
from burst_cli.report.columns import COLUMNS, default_columns
from burst_cli.report.write import report_csv, report_markdown
from burst_cli.runs.choose import select_runs
from burst_cli.runs.read import run_record
from engine.config.settings import dump_config
from engine.runs.folder import RunFolder, create_run


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    make_run(tmp_path, "tiny/20260101-000000-aaaaaa")
    make_run(tmp_path, "tiny/20260102-000000-bbbbbb", final="failed")
    make_run(tmp_path, "small/20260103-000000-cccccc")
    return tmp_path


def names(runs: list[RunFolder]) -> list[str]:
    return [run.run_id[-6:] for run in runs]


# --- which runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["aaaaaa", "bbbbbb", "cccccc"]),
        (["tiny"], ["aaaaaa", "bbbbbb"]),
        (["small", "tiny"], ["aaaaaa", "bbbbbb", "cccccc"]),
        (["20260102-000000-bbbbbb"], ["bbbbbb"]),
        (["20260102"], ["bbbbbb"]),
        (["bbbbbb"], ["bbbbbb"]),
        (["small/20260103"], ["cccccc"]),
        (["bbbbbb", "bbbbbb"], ["bbbbbb"]),
    ],
)
def test_names_select_runs(runs_dir: Path, arguments: list[str], expected: list[str]) -> None:
    assert names(select_runs(runs_dir, arguments)) == expected
    folders = [str(run.path) for run in select_runs(runs_dir, arguments)]
    assert not folders or names(select_runs(Path("nowhere"), folders)) == expected


def test_unknown_names_are_all_listed_with_the_nearest(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs_dir, "tinny", "99999999") == 2
    message = capsys.readouterr().err
    assert "did you mean tiny?" in message
    assert "99999999" in message


def test_no_runs_at_all_are_an_error_only_for_who_names_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(tmp_path / "runs", "tiny") == 2
    assert f"{tmp_path / 'runs'} holds no runs" in capsys.readouterr().err
    assert report(tmp_path / "runs") == 0
    assert "burst launch" in capsys.readouterr().out
    assert report(tmp_path / "runs", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"runs": []}


# --- which figures ----------------------------------------------------------------------------------------------------


def test_record_joins_state_and_summary(runs_dir: Path) -> None:
    record = run_record(select_runs(runs_dir, ["aaaaaa"])[0])
    assert (record["run_id"], record["exp"], record["status"]) == ("20260101-000000-aaaaaa", "tiny", "completed")
    assert (record["attention_preset"], record["seq_len"], record["world_size"]) == ("ring", 512, 2)
    assert (record["step_time_s"], record["step_time_s_n"]) == (pytest.approx(0.3), 3)


def test_failed_run_has_the_figures_of_the_steps_it_made(runs_dir: Path) -> None:
    completed, failed = (run_record(run) for run in select_runs(runs_dir, ["tiny"]))
    assert failed["status"] == "failed"
    assert failed["failure"] == {"rank": 1, "message": "no"}
    same = ("step_time_s", "step_time_s_n", "mfu", "config_fingerprint", "attention_preset", "world_size", "steps")
    assert {name: failed[name] for name in same} == {name: completed[name] for name in same}


def test_status_of_the_state_machine_beats_that_of_the_summary(runs_dir: Path) -> None:
    run = select_runs(runs_dir, ["aaaaaa"])[0]
    run.write_summary({"status": "running", "steps": 4})
    assert run_record(run)["status"] == "completed"


def test_lost_run_is_told_apart_from_a_running_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = create_run(tmp_path / "tiny" / "20260101-000000-aaaaaa", {"config.yaml": dump_config(CONFIG)})
    run.transition("starting")
    run.transition("running")
    assert run_record(run)["lost"] is False
    run.record(pid_start="0")
    assert report(tmp_path) == 0
    captured = capsys.readouterr()
    assert "running, lost" in captured.out
    assert "its process is gone" in captured.err


@pytest.mark.parametrize("name", ["run.json", "summary.json", "config.yaml", "metrics.jsonl"])
def test_damaged_run_is_named_and_the_others_are_shown(
    runs_dir: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = select_runs(runs_dir, ["bbbbbb"])[0].path / name
    damaged.write_bytes(b"{\xff broken: [")
    assert report(runs_dir, "--json") == 0
    captured = capsys.readouterr()
    records = json.loads(captured.out)["runs"]
    assert [record["run_id"][-6:] for record in records] == ["aaaaaa", "bbbbbb", "cccccc"]
    if name != "metrics.jsonl":  # torn lines are legal there
        assert str(damaged) in captured.err
        assert records[1]["problems"]
    assert records[1]["status"] == ("unreadable" if name == "run.json" else "failed")


# --- how it is written ------------------------------------------------------------------------------------------------


def test_json_has_the_contract_keys_and_null_for_the_unknown(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(runs_dir, "--format", "json") == 0
    first = json.loads(capsys.readouterr().out)["runs"][0]
    assert {"run_id", "exp", "status", "path", "mfu", "mfu_full_attention", "hfu"} <= set(first)
    assert first["comm_exposed_s"] is None


def test_markdown_of_two_runs(runs_dir: Path) -> None:
    found = build_report(Request(runs_dir, names=("tiny",)))
    header, _, first, second, *_ = report_markdown(found).splitlines()
    assert header == (
        "| run | status | attention | memory policy | seq_len | ranks | steps | tokens/s/device | step time | n "
        "| MFU (causal-aware) | MFU (full attention) | HFU | peak memory | peak tensors | predicted peak "
        "| sent intra / inter node | train loss | validation loss | bits/byte | peak FLOP/s per device | commit "
        "| started (UTC) |"
    )
    assert first == (
        "| tiny/20260101-000000-aaaaaa | completed | ring | full | 512 | 2 | 4 | 1.67K (1.46K…2.08K) "
        "| 300 ms (250…350) | 3 | 50% | 60% | 70% | 1 GiB | – | – | 4 KiB / 0 B | 1.0000 | – | – "
        f"| 1 TFLOP/s, measured | abcabcabca + changes | {found.records[0]['started_at'][:16].replace('T', ' ')} |"
    )
    assert second.startswith("| tiny/20260102-000000-bbbbbb | failed | ring |")


def test_csv_holds_every_figure_unrounded(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs_dir, "--format", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["run_id"][-6:] for row in rows] == ["aaaaaa", "bbbbbb", "cccccc"]
    assert float(rows[0]["tokens_per_s_per_device"]) == 5000.0 / 3
    assert rows[0]["comm_exposed_s"] == ""
    assert "failure" not in rows[0]


def test_text_that_a_spreadsheet_would_run_is_made_inert() -> None:
    record = {"run_id": "=cmd()", "exp": "@x", "status": "-1+1", "path": "/runs", "final_train_loss": -0.5}
    assert report_csv([record]).splitlines()[1] == "'=cmd(),'@x,'-1+1,/runs,-0.5"
    assert report_csv([]) == "run_id,exp,status,path\n"


@pytest.mark.parametrize("width", [60, 500])
def test_table_of_one_run_shows_every_figure_at_any_width(
    runs_dir: Path, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert report(runs_dir, "aaaaaa") == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= width
    shown = default_columns(baseline=False, effective=False)
    empty = {"peak tensors", "predicted peak", "validation loss", "bits/byte"}  # of this run nobody measured these
    assert {column.heading for column in shown if column.heading not in output} == empty
    assert "1.67K (1.46K…2.08K)" in output


def test_run_that_was_cancelled_early_is_no_table_of_dashes(tmp_path: Path, capsys) -> None:
    make_run(tmp_path, "tiny/20260101-000000-aaaaaa", steps=0, final="cancelled")
    assert report(tmp_path) == 0
    assert "cancelled" in (output := capsys.readouterr().out)
    assert "MFU (full attention)  " not in output
    assert "–" not in output.partition("tokens/s and step time")[0]


@pytest.mark.parametrize("width", [60, 100])
def test_narrow_table_of_many_runs_keeps_a_row_per_run_and_names_what_it_leaves_out(
    tmp_path: Path, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in range(5):
        make_run(tmp_path, f"tiny/20260101-00000{place}-aaaaaa")
    monkeypatch.setenv("COLUMNS", str(width))
    assert report(tmp_path) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= width
    assert sum("tiny/aaaaaa" in line for line in output.splitlines()) == 5
    table, _, left_out = output.partition("Too narrow for:")
    assert ("1.67K (1.46K…2.08K)" in table, "50%" in table, "1.0000" in table) == (True, True, True)
    assert "commit" in " ".join(left_out.split())


def test_chosen_columns_are_never_left_out(
    runs_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    chosen = "run,mfu,hfu,peak_flops_per_device,command,versions"
    assert report(runs_dir, "tiny", "--columns", chosen) == 0
    output = capsys.readouterr().out
    assert "Too narrow" not in output
    assert all(column.heading in output for column in COLUMNS if column.key in chosen.split(","))


def test_hostile_text_in_a_run_is_shown_as_text(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = select_runs(runs_dir, ["aaaaaa"])[0]
    run.write_summary({"attention_preset": "[red]x[/red]\x1b[2J|", "steps": 1})
    report(runs_dir, "aaaaaa")
    assert "[red]x[/red]|" in (output := capsys.readouterr().out)
    assert "\x1b" not in output
    report(runs_dir, "aaaaaa", "--format", "md")
    assert r"[red]x[/red]\|" in capsys.readouterr().out


def test_report_imports_no_torch(runs_dir: Path) -> None:
    code = (
        "import sys; from burst_cli.app import main; "
        f"code = main(['report', '--runs-dir', {str(runs_dir)!r}]); "
        "sys.exit(code or sum(name in sys.modules for name in ('torch', 'hydra', 'omegaconf')))"
    )
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, timeout=200)
