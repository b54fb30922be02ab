"""Which runs a report holds, in which order and groups, and with which columns."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from report_samples import CONFIG, PROVENANCE, make_methods, make_run, report

from burst_cli.report.build import Request, build_report, parse_since
from burst_cli.report.columns import choose_columns
from burst_cli.report.records import provenance_facts, with_hardware
from engine.runs.folder import RunFolder

NOW = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    make_run(tmp_path, "tiny/20260101-000000-aaaaaa")
    make_run(tmp_path, "tiny/20260102-000000-bbbbbb", final="failed")
    make_run(tmp_path, "small/20260103-000000-cccccc", mfu=0.9)
    return tmp_path


def ids(runs_dir: Path, **request: object) -> list[str]:
    found = build_report(Request(runs_dir, **request))  # type: ignore[arg-type]
    return [str(record["run_id"])[-6:] for record in found.records]


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
    found = build_report(Request(runs_dir, limit=1))
    assert not found.warnings


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
        (("--since", "yesterday"), "such as 2026-01-31"),
        (("--status", "done"), "legal: planned"),
        (("--columns", "run,mfuu,x"), "did you mean mfu?"),
        (("--sort", "sped"), "--columns help"),
        (("--limit", "0"), "--limit"),
    ],
)
def test_mistakes_are_named_with_what_is_legal(
    runs_dir: Path, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(runs_dir, *arguments) == 2
    assert words in capsys.readouterr().err


def test_columns_help_lists_every_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(tmp_path, "--columns", "help") == 0
    output = capsys.readouterr().out
    assert "tokens_per_s_per_device" in output
    assert "effective_fraction" in output


def test_columns_keep_the_order_in_which_they_are_typed_and_short_names_work() -> None:
    assert [column.key for column in choose_columns(["mfu,run", "attention"])] == ["mfu", "run", "attention_preset"]


def test_filters_that_leave_nothing_say_so(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs_dir, "--status", "oom") == 0
    assert "passes these filters" in capsys.readouterr().out


def test_folder_of_sweeps_holds_no_runs(runs_dir: Path) -> None:
    (runs_dir / "sweeps/20260101-000000-dddddd").mkdir(parents=True)
    assert ids(runs_dir) == ["aaaaaa", "bbbbbb", "cccccc"]


# --- groups -----------------------------------------------------------------------------------------------------------


def test_runs_are_grouped_by_what_makes_them_comparable(runs_dir: Path) -> None:
    make_run(runs_dir, "tiny/20260104-000000-dddddd", device="H100", world_size=8)
    found = build_report(Request(runs_dir))
    assert [(group.title, len(group.records)) for group in found.groups] == [
        ("tiny · 2 × cpu", 2),
        ("small · tiny · 2 × cpu", 1),
        ("tiny · 8 × H100", 1),
    ]


def test_run_that_ran_out_of_memory_belongs_to_its_sisters(tmp_path: Path) -> None:
    make_methods(tmp_path)
    on_h100 = {**PROVENANCE, "hardware": {"gpus": ["NVIDIA H100, 81559 MiB, 570"]}}
    make_run(tmp_path, "tiny/20260102-000000-aaaaaa", final="oom", provenance=on_h100)
    (group,) = build_report(Request(tmp_path)).groups
    assert len(group.records) == 7


def test_hardware_that_its_own_ranks_found_beats_what_others_had() -> None:
    family = {"exp": "tiny", "model": "tiny", "world_size": 4}
    records = [{**family, "device": device, "launch_hardware": "none"} for device in ("H100", "A100", None)]
    assert [record["hardware"] for record in with_hardware(records)] == ["H100", "A100", "none"]


def test_hardware_without_sisters_is_that_of_the_launcher(tmp_path: Path) -> None:
    on_h100 = {**PROVENANCE, "hardware": {"gpus": ["NVIDIA H100, 81559 MiB, 570"]}}
    make_run(tmp_path, "tiny/20260102-000000-aaaaaa", final="oom", provenance=on_h100)
    (group,) = build_report(Request(tmp_path)).groups
    assert group.hardware == "NVIDIA H100"


# --- provenance -------------------------------------------------------------------------------------------------------


def test_record_says_where_its_run_comes_from(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(runs_dir, "aaaaaa", "--json") == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["git_sha"] == PROVENANCE["git"]["sha"]  # type: ignore[index]
    assert (run["dirty"], run["hardware"], run["command"]) == (True, "cpu", "burst launch exp=tiny")
    assert run["versions"] == {"python": "3.11.7", "torch": "2.13.0"}
    assert len(run["config_fingerprint"]) == 64


@pytest.mark.parametrize("content", ["", "[]", "{", '{"git": 3, "versions": [], "hardware": null}', "\udcff"])
def test_damaged_provenance_is_unknown(tmp_path: Path, content: str) -> None:
    (tmp_path / "provenance.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert set(provenance_facts(tmp_path).values()) == {None}


def test_damaged_values_never_stop_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values: list[object] = [None, "x", [], {}, True, float("nan"), 10**400, -1]
    for place, value in enumerate(values):
        run = make_run(tmp_path, f"tiny/20260101-00000{place}-aaaaaa", config=CONFIG)
        summary = run.read_summary() or {}
        damaged = dict.fromkeys(summary, value)
        (run.path / "summary.json").write_text(json.dumps(damaged))
        (run.path / "metrics.jsonl").write_text(json.dumps({"step": value, "loss": value}) + "\nnot json\n[]\n")
    for format in ("table", "md", "csv", "json", "latex"):
        assert report(tmp_path, "--format", format, "--effective", "--baseline", "ring") in (0, 2)
    output = str(tmp_path / "page.html")
    assert report(tmp_path, "--format", "html", "--output", output, "--sort", "mfu") == 0
    capsys.readouterr()


def test_folder_with_a_name_that_is_no_text_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "tiny/20260101-000000-aaaaaa")
    run.path.parent.rename(tmp_path / "bad\udcff<b>")
    assert RunFolder(tmp_path / "bad\udcff<b>/20260101-000000-aaaaaa").read_state()["state"] == "completed"
    page = tmp_path / "page.html"
    assert report(tmp_path, "--format", "html", "--output", str(page)) == 0
    assert "<b>/" not in page.read_text(encoding="utf-8")
    for format in ("table", "md", "csv", "json", "latex"):
        assert report(tmp_path, "--format", format) == 0
    capsys.readouterr()
