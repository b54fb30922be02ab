"""`burst report`: which runs, in which order and groups, with which figures, in every way to write them."""

from __future__ import annotations

import csv
import io
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from report_samples import CONFIG, PROVENANCE, make_methods, make_run

from burst_cli.report.build import Request, build_report, parse_since
from burst_cli.report.columns import COLUMNS, choose_columns
from burst_cli.report.records import provenance_facts, with_hardware
from burst_cli.report.write import report_csv, report_markdown
from burst_cli.runs.choose import select_runs
from burst_cli.runs.read import run_record
from engine.config.settings import dump_config
from engine.runs.folder import RunFolder, create_run

NOW = datetime(2026, 3, 1, tzinfo=UTC)
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


def names(runs: list[RunFolder]) -> list[str]:
    return [run.run_id[-6:] for run in runs]


def ids(runs_dir: Path, **request: object) -> list[str]:
    found = build_report(Request(runs_dir, **request))  # type: ignore[arg-type]
    return [str(record["run_id"])[-6:] for record in found.records]


# --- which runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["aaaaaa", "bbbbbb", "cccccc"]),
        (["small", "tiny"], ["aaaaaa", "bbbbbb", "cccccc"]),
        (["20260102-000000-bbbbbb"], ["bbbbbb"]),
        (["20260102"], ["bbbbbb"]),
        (["bbbbbb", "bbbbbb"], ["bbbbbb"]),
        (["small/20260103"], ["cccccc"]),
    ],
)
def test_names_and_folders_select_runs(runs_dir: Path, arguments: list[str], expected: list[str]) -> None:
    (runs_dir / "sweeps/20260101-000000-dddddd").mkdir(parents=True)  # a folder of sweeps holds no runs
    found = select_runs(runs_dir, arguments)
    assert names(found) == expected
    assert names(select_runs(Path("nowhere"), [str(run.path) for run in found])) == expected


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"exps": ("ti*",)}, ["aaaaaa", "bbbbbb"]),
        ({"statuses": ("failed,completed",)}, ["aaaaaa", "bbbbbb", "cccccc"]),
        ({"since": "2026-01-02"}, ["bbbbbb", "cccccc"]),
        ({"since": "2026-01-02T00:00:01"}, ["cccccc"]),
        ({"limit": 2}, ["bbbbbb", "cccccc"]),
        ({"limit": 1, "statuses": ("completed",), "exps": ("tiny",)}, ["aaaaaa"]),
        ({"latest": True, "exps": ("tiny",)}, ["bbbbbb"]),
        ({"sort": "-mfu"}, ["cccccc", "aaaaaa", "bbbbbb"]),
    ],
)
def test_filters_and_order(runs_dir: Path, request_: dict[str, object], expected: list[str]) -> None:
    assert ids(runs_dir, **request_) == expected


def test_a_limit_reads_no_more_runs_than_it_shows(runs_dir: Path) -> None:
    (runs_dir / "tiny/20260101-000000-aaaaaa/run.json").write_text("damaged")
    assert not build_report(Request(runs_dir, limit=1)).warnings


def test_unknown_values_come_last_in_both_directions(tmp_path: Path) -> None:
    make_run(tmp_path, "tiny/20260101-000000-aaaaaa", mfu=None)
    make_run(tmp_path, "tiny/20260102-000000-bbbbbb", mfu=0.2)
    assert ids(tmp_path, sort="mfu") == ids(tmp_path, sort="-mfu") == ["bbbbbb", "aaaaaa"]


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90m", NOW - timedelta(minutes=90)),
        ("2w", NOW - timedelta(weeks=2)),
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("20260131", datetime(2026, 1, 31, tzinfo=UTC)),
        ("2026-01-31T12:00+02:00", datetime(2026, 1, 31, 10, tzinfo=UTC)),
        ("99999999999999d", datetime.min.replace(tzinfo=UTC)),
        (None, None),
    ],
)
def test_since_takes_dates_and_ages(text: str | None, moment: datetime | None) -> None:
    assert parse_since(text, NOW) == moment


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--since", "yesterday"), ["such as 2026-01-31"]),
        (("--status", "done"), ["legal: planned"]),
        (("--columns", "run,mfuu,x"), ["did you mean mfu?", "there is no 'x'"]),
        (("--columns", ","), ["names no column"]),
        (("--sort", "sped"), ["--columns help"]),
        (("--sort", ""), ["there is no ''"]),
        (("--since", ""), ["such as 2026-01-31"]),
        (("--baseline", ""), ["neither a method of these runs nor a run"]),
        (("--sweep", ""), ["sweep"]),
        (("--json", "--format", "csv"), ["exclude each other"]),
        (("--limit", "0"), ["--limit"]),
        (("tinny", "99999999"), ["did you mean tiny?", "99999999"]),
    ],
)
def test_mistakes_are_named_with_what_is_legal(burst, runs_dir: Path, arguments: tuple[str, ...], words) -> None:
    result = burst("report", *arguments)
    assert (result.code, [word for word in words if word not in result.err]) == (2, [])


def test_no_runs_are_an_error_only_for_who_names_one(burst, runs_dir: Path) -> None:
    assert "passes these filters" in burst("report", "--status", "oom").out
    nothing = ("--runs-dir", str(runs_dir / "none"))
    assert "burst launch" in burst("report", *nothing).out
    assert json.loads(burst("report", "--json", *nothing).out) == {"runs": []}
    named = burst("report", "tiny", *nothing)
    assert (named.code, f"{runs_dir / 'none'} holds no runs" in named.err) == (2, True)


# --- groups -----------------------------------------------------------------------------------------------------------


def test_runs_are_grouped_by_what_makes_them_comparable(runs_dir: Path) -> None:
    make_run(runs_dir, "tiny/20260104-000000-dddddd", device="H100", world_size=8)
    found = build_report(Request(runs_dir))
    assert [(group.title, len(group.records)) for group in found.groups] == [
        ("tiny · 2 × cpu", 2),
        ("small · tiny · 2 × cpu", 1),
        ("tiny · 8 × H100", 1),
    ]


def test_hardware_is_that_of_the_ranks_else_of_sister_runs_else_of_the_launcher(tmp_path: Path) -> None:
    make_run(tmp_path, "tiny/20260102-000000-aaaaaa", final="oom", provenance=ON_H100)
    (alone,) = build_report(Request(tmp_path)).groups
    assert alone.hardware == "NVIDIA H100"
    make_methods(tmp_path)
    (group,) = build_report(Request(tmp_path)).groups
    assert (group.hardware, len(group.records)) == ("cpu", 7)
    family = {"exp": "tiny", "model": "tiny", "world_size": 4}
    records = [{**family, "device": device, "launch_hardware": "none"} for device in ("H100", "A100", None)]
    assert [record["hardware"] for record in with_hardware(records)] == ["H100", "A100", "none"]


# --- which figures ----------------------------------------------------------------------------------------------------


def test_record_joins_state_summary_and_where_the_run_comes_from(burst, runs_dir: Path) -> None:
    (record,) = json.loads(burst("report", "aaaaaa", "--json").out)["runs"]
    run = RunFolder(runs_dir / "tiny/20260101-000000-aaaaaa")
    summary, state = run.read_summary(), run.read_state()
    assert summary is not None
    assert record == {
        **summary,
        "run_id": "20260101-000000-aaaaaa",
        "exp": "tiny",
        "path": str(run.path),
        "status": "completed",
        "lost": False,
        "started_at": state["started_at"],
        "ended_at": state["ended_at"],
        "exit_code": 0,
        "failure": None,
        "failure_text": None,
        "git_sha": PROVENANCE["git"]["sha"],  # type: ignore[index]
        "dirty": True,
        "host": "node1",
        "hardware": "cpu",
        "launch_hardware": "cpu",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "command": "burst launch exp=tiny",
        "image": None,
    }
    assert (record["step_time_s"], record["step_time_s_n"]) == (pytest.approx(0.3), 3)


def test_failed_run_has_the_figures_of_the_steps_it_made(runs_dir: Path) -> None:
    completed, failed = (run_record(run) for run in select_runs(runs_dir, ["tiny"]))
    assert (failed["status"], failed["failure"]) == ("failed", {"rank": 1, "message": "no"})
    same = ("config_fingerprint", "attention_preset", "world_size", "steps")
    assert {name: failed[name] for name in same} == {name: completed[name] for name in same}
    assert failed["step_time_s_n"] == max(1, failed["steps"] - 3)


def test_status_of_the_state_machine_beats_that_of_the_summary(runs_dir: Path) -> None:
    run = select_runs(runs_dir, ["aaaaaa"])[0]
    run.write_summary({"status": "running", "steps": 4})
    assert run_record(run)["status"] == "completed"


def test_lost_run_is_told_apart_from_a_running_one(burst, tmp_path: Path) -> None:
    run = create_run(tmp_path / "runs/tiny/20260101-000000-aaaaaa", {"config.yaml": dump_config(CONFIG)})
    run.transition("starting")
    run.transition("running")
    assert run_record(run)["lost"] is False
    run.record(pid_start="0")
    result = burst("report")
    assert ("running, lost" in result.out, "its process is gone" in result.err) == (True, True)


@pytest.mark.parametrize("name", ["run.json", "summary.json", "config.yaml", "metrics.jsonl"])
def test_damaged_run_is_named_and_the_others_are_shown(burst, runs_dir: Path, name: str) -> None:
    damaged = select_runs(runs_dir, ["bbbbbb"])[0].path / name
    damaged.write_bytes(b"{\xff broken: [")
    result = burst("report", "--json")
    records = json.loads(result.out)["runs"]
    assert [record["run_id"][-6:] for record in records] == ["aaaaaa", "bbbbbb", "cccccc"]
    is_named = name != "metrics.jsonl"  # torn lines are legal there
    assert (str(damaged) in result.err, bool(records[1].get("problems"))) == (is_named, is_named)
    assert records[1]["status"] == ("unreadable" if name == "run.json" else "failed")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"git": 3, "versions": [], "hardware": null}', "\udcff"])
def test_damaged_provenance_is_unknown(tmp_path: Path, content: str) -> None:
    (tmp_path / "provenance.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert set(provenance_facts(tmp_path).values()) == {None}


def test_damaged_values_and_names_never_stop_a_report(burst, tmp_path: Path) -> None:
    values: list[object] = [None, "x", [], {}, True, float("nan"), 10**400, -1]
    for place, value in enumerate(values):
        run = make_run(tmp_path / "runs", f"tiny/20260101-00000{place}-aaaaaa")
        (run.path / "summary.json").write_text(json.dumps(dict.fromkeys(run.read_summary() or {}, value)))
        (run.path / "metrics.jsonl").write_text(json.dumps({"step": value, "loss": value}) + "\nnot json\n[]\n")
    make_run(tmp_path / "runs", "odd/20260101-000000-aaaaaa")
    (tmp_path / "runs/odd").rename(tmp_path / "runs/bad\udcff<b>")
    for format in ("table", "md", "csv", "json", "latex"):
        assert burst("report", "--format", format, "--effective", "--sort", "mfu").code == 0
    page = tmp_path / "page.html"
    assert burst("report", "--output", str(page), "--baseline", "ring").code == 0
    assert "<b>/" not in page.read_text(encoding="utf-8")


# --- how it is written ------------------------------------------------------------------------------------------------


def test_markdown_of_two_runs(runs_dir: Path) -> None:
    found = build_report(Request(runs_dir, names=("tiny",)))
    header, _, first, second, *_ = report_markdown(found).splitlines()
    assert header == (
        "| run | status | attention | memory policy | seq_len | ranks | steps | tokens/s/device | step time "
        "| predicted step | n | MFU (causal-aware) | MFU (full attention) | HFU | peak memory | peak tensors "
        "| predicted peak | sent intra / inter node | train loss | validation loss | bits/byte "
        "| peak FLOP/s per device | commit | started (UTC) |"
    )
    assert first == (
        "| tiny/20260101-000000-aaaaaa | completed | ring | full | 512 | 2 | 4 | 1.67K (1.46K…2.08K) "
        "| 300 ms (250…350) | 310 ms on h100 | 3 | 50% | 60% | 70% | 1 GiB | 128 MiB | 256 MiB "
        "| 4 KiB / 0 B | 1.0000 | 1.5000 | 0.7500 "
        f"| 1 TFLOP/s, measured | abcabcabca + changes | {found.records[0]['started_at'][:16].replace('T', ' ')} |"
    )
    assert second.startswith("| tiny/20260102-000000-bbbbbb | failed | ring |")


def test_csv_holds_every_figure_unrounded_and_nothing_that_a_spreadsheet_would_run(burst, runs_dir: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(burst("report", "--format", "csv").out)))
    assert [row["run_id"][-6:] for row in rows] == ["aaaaaa", "bbbbbb", "cccccc"]
    assert (float(rows[0]["tokens_per_s_per_device"]), rows[0]["comm_exposed_s"]) == (5000.0 / 3, "")
    assert "failure" not in rows[0]
    record = {
        "run_id": "=cmd()",
        "exp": "@x",
        "status": "-1+1\x1b[2J",
        "path": "/runs",
        "final_train_loss": -0.5,
        "+": 1,
    }
    assert report_csv([record]).splitlines() == [
        "run_id,exp,status,path,final_train_loss,'+",
        "'=cmd(),'@x,'-1+1,/runs,-0.5,1",
    ]
    assert report_csv([]) == "run_id,exp,status,path\n"


def test_latex_escapes_what_tex_would_run(burst, tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "tiny/20260101-000000-aaaaaa", attention_preset="a_b & \\input{x} 100%")
    output = burst("report", "--format", "latex").out
    assert r"a\_b \& \textbackslash{}input\{x\} 100\%" in output
    assert output.count("\\begin{tabular}") == output.count("\\end{tabular}") == 1


def test_table_of_one_run_shows_every_figure_at_any_width(burst, runs_dir: Path, monkeypatch) -> None:
    shown: list[list[list[str]]] = []
    for arguments, width in ((("--format", "md"), 60), ((), 500), ((), 60)):
        monkeypatch.setenv("COLUMNS", str(width))
        output = burst("report", "aaaaaa", *arguments).out
        assert arguments or max(map(len, output.splitlines())) <= width
        lines = [line for line in output.splitlines() if re.match("[|│┃] ", line) and "---" not in line]
        shown.append([[cell.strip() for cell in re.split("[|│┃]", line)[1:-1]] for line in lines])
    assert shown[1] == shown[0]
    assert shown[2] == [list(pair) for pair in zip(*shown[0], strict=True)]


def test_a_quartile_that_is_missing_is_no_zero() -> None:
    (column,) = choose_columns(["step_time_s"])
    assert column.cell({"step_time_s": 0.25, "step_time_s_p25": 0.24, "step_time_s_p75": None}) == "250 ms"


def test_run_that_was_cancelled_early_is_no_table_of_dashes(burst, tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "tiny/20260101-000000-aaaaaa", steps=0, final="cancelled")
    output = burst("report").out
    assert ("cancelled" in output, "MFU (full attention)  " in output) == (True, False)
    assert "–" not in output.partition("tokens/s and step time")[0]


@pytest.mark.parametrize("width", [60, 100])
def test_narrow_table_of_many_runs_keeps_speed_loss_and_mfu_and_names_what_it_leaves_out(
    burst, tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in range(5):
        make_run(tmp_path / "runs", f"tiny/20260101-00000{place}-aaaaaa")
    monkeypatch.setenv("COLUMNS", str(width))
    output = burst("report").out
    assert max(map(len, output.splitlines())) <= width
    assert sum("tiny/aaaaaa" in line for line in output.splitlines()) == 5
    table, _, left_out = output.partition("Too narrow for:")
    assert ("1.67K (1.46K…2.08K)" in table, "50%" in table, "1.0000" in table) == (True, True, True)
    assert "commit" in " ".join(left_out.split())
    monkeypatch.setenv("COLUMNS", "248")  # all have room once headings stand word below word
    assert "Too narrow" not in burst("report").out


def test_chosen_columns_keep_their_order_and_are_never_left_out(burst, runs_dir: Path, monkeypatch) -> None:
    assert [column.key for column in choose_columns(["mfu,run", "attention"])] == ["mfu", "run", "attention_preset"]
    listed = burst("report", "--columns", "help").out
    assert [column.key for column in COLUMNS if column.key not in listed] == []
    document = json.loads(burst("report", "--columns", "help", "--json").out)
    assert [column["key"] for column in document["columns"]] == [column.key for column in COLUMNS]
    monkeypatch.setenv("COLUMNS", "60")
    chosen = "run,mfu,hfu,peak_flops_per_device,command,versions"
    output = burst("report", "tiny", "--columns", chosen).out
    assert "Too narrow" not in output
    assert all(column.heading in output for column in COLUMNS if column.key in chosen.split(","))


def test_hostile_text_in_a_run_is_shown_as_text(burst, runs_dir: Path) -> None:
    run = select_runs(runs_dir, ["aaaaaa"])[0]
    run.write_summary({"attention_preset": "[red]x[/red]\x1b[2J|", "steps": 1})
    output = burst("report", "aaaaaa").out
    assert ("[red]x[/red]|" in output, "\x1b" in output) == (True, False)
    assert r"[red]x[/red]\|" in burst("report", "aaaaaa", "--format", "md").out
